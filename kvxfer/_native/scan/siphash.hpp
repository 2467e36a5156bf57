// SipHash-2-4 with 64 bits, as Aumasson and Bernstein define it ("SipHash: a fast short-input PRF", 2012, section 2): without the
// secret, its values can be neither foretold nor made to collide. Knows bytes, and nothing of what they mean.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvxfer {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

inline uint64_t loaded_word(const void* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}
// The first `size` bytes, fewer than 8, with zeros behind them.
inline uint64_t loaded_tail(const void* from, size_t size) {
  uint64_t word = 0;
  std::memcpy(&word, from, size);
  return word;
}

struct SipSecret {
  explicit SipSecret(const std::array<uint8_t, 16>& bytes) : low(loaded_word(bytes.data())), high(loaded_word(bytes.data() + 8)) {}
  uint64_t low, high;
};

// The hash of a stream that is given word by word.
class SipHash {
 public:
  explicit SipHash(const SipSecret& secret)
      : state_{secret.low ^ 0x736f6d6570736575, secret.high ^ 0x646f72616e646f6d, secret.low ^ 0x6c7967656e657261, secret.high ^ 0x7465646279746573} {}

  void word(uint64_t word) {
    state_.take(word);
    size_ += 8;
  }
  void words(const char* from, size_t count) {
    State state = state_;  // in registers
    for (const char* end = from + count * 8; from != end; from += 8) state.take(loaded_word(from));
    state_ = state;
    size_ += count * 8;
  }
  // The hash of the words so far and of `size` more bytes, fewer than 8. The stream can go on from before them.
  uint64_t value(const char* tail = nullptr, size_t size = 0) const {
    State state = state_;
    state.take((size == 0 ? 0 : loaded_tail(tail, size)) | (size_ + size) << 56);
    state.v2 ^= 0xff;
    for (int i = 0; i < 4; ++i) state.round();
    return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  }

 private:
  struct State {
    uint64_t v0, v1, v2, v3;

    void take(uint64_t word) {
      v3 ^= word;
      round();
      round();
      v0 ^= word;
    }
    void round() {
      v0 += v1;
      v2 += v3;
      v1 = rotated(v1, 13) ^ v0;
      v3 = rotated(v3, 16) ^ v2;
      v0 = rotated(v0, 32);
      v2 += v1;
      v0 += v3;
      v1 = rotated(v1, 17) ^ v2;
      v3 = rotated(v3, 21) ^ v0;
      v2 = rotated(v2, 32);
    }
    static uint64_t rotated(uint64_t word, int by) { return word << by | word >> (64 - by); }
  };

  State state_;
  uint64_t size_ = 0;  // bytes
};

inline uint64_t siphash(const SipSecret& secret, const char* data, size_t size) {
  SipHash hash(secret);
  hash.words(data, size / 8);
  return hash.value(data + size / 8 * 8, size % 8);
}

}  // namespace kvxfer
