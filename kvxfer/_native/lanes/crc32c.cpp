#include "crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvxfer {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected: the lowest bit is the highest power

constexpr uint32_t times_x(uint32_t r) { return (r >> 1) ^ ((r & 1) != 0 ? kPolynomial : 0); }

// --- portable: eight tables, eight bytes a step ---

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables t{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t r = byte;
    for (int bit = 0; bit < 8; ++bit) r = times_x(r);
    t[0][byte] = r;
  }
  for (size_t i = 1; i < t.size(); ++i) {
    for (size_t byte = 0; byte < 256; ++byte) t[i][byte] = (t[i - 1][byte] >> 8) ^ t[0][t[i - 1][byte] & 0xFF];
  }
  return t;
}

constexpr Tables kTables = make_tables();

uint32_t run_portable(const void* data, size_t size, uint32_t value, const void*) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t r = ~value;
  for (; size >= 8; size -= 8, at += 8) {
    const uint32_t low = r ^ (at[0] | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24);
    r = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^ kTables[4][low >> 24] ^ kTables[3][at[4]] ^
        kTables[2][at[5]] ^ kTables[1][at[6]] ^ kTables[0][at[7]];
  }
  for (; size != 0; --size, ++at) r = (r >> 8) ^ kTables[0][(r ^ *at) & 0xFF];
  return ~r;
}

#if defined(__x86_64__)

// x^n mod P as carry-less multiplication wants it: one bit up, because a product of reflected values comes out one bit low.
constexpr uint64_t power(unsigned n) {
  uint32_t r = 0x80000000;
  while (n-- != 0) r = times_x(r);
  return uint64_t{r} << 1;
}

// Prefetches the bytes at the same distance from the end of `ahead` as the checksummed ones from theirs.
class ChecksumPrefetch {
 public:
  ChecksumPrefetch(const void* ahead, const uint8_t* data) : distance_(ahead != nullptr ? static_cast<const uint8_t*>(ahead) - data : 0) {}
  // Prefetches the counterpart of the `bytes` at `at`.
  void ask(const uint8_t* at, size_t bytes) const {
    if (distance_ == 0) return;
    for (size_t i = 0; i < bytes; i += kLine) _mm_prefetch(reinterpret_cast<const char*>(at + i + distance_), _MM_HINT_T0);
  }

 private:
  static constexpr size_t kLine = 64;
  const std::ptrdiff_t distance_;
};

inline uint64_t load(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) inline uint32_t run_tail(const uint8_t* at, size_t size, uint64_t r) {
  for (; size >= 8; size -= 8, at += 8) r = _mm_crc32_u64(r, load(at));
  auto low = static_cast<uint32_t>(r);
  for (; size != 0; --size, ++at) low = _mm_crc32_u8(low, *at);
  return low;
}

// The instruction takes three cycles and a new one can begin in each: three stretches at once, then joined by a multiplication of
// the first two with the power of x for the bytes after them.
template <size_t kStretch>
__attribute__((target("sse4.2,pclmul"))) inline uint64_t run_three(const uint8_t* at, uint64_t r) {
  constexpr uint64_t kTwoOn = power(2 * kStretch * 8 - 32), kOneOn = power(kStretch * 8 - 32);
  uint64_t a = r, b = 0, c = 0;
  for (size_t i = 0; i < kStretch - 8; i += 8) {
    a = _mm_crc32_u64(a, load(at + i));
    b = _mm_crc32_u64(b, load(at + kStretch + i));
    c = _mm_crc32_u64(c, load(at + 2 * kStretch + i));
  }
  a = _mm_crc32_u64(a, load(at + kStretch - 8));
  b = _mm_crc32_u64(b, load(at + 2 * kStretch - 8));
  const __m128i first = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(a)), _mm_cvtsi64_si128(kTwoOn), 0);
  const __m128i second = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(b)), _mm_cvtsi64_si128(kOneOn), 0);
  const auto joined = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(first, second)));
  return _mm_crc32_u64(c, load(at + 3 * kStretch - 8) ^ joined);
}

__attribute__((target("sse4.2,pclmul"))) uint32_t run_sse42(const void* data, size_t size, uint32_t value, const void* ahead) {
  constexpr size_t kLong = 1360, kShort = 168;  // three of the long make 4080 bytes, nearly a page
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t r = ~value;
  ChecksumPrefetch next(ahead, at);
  for (; size >= 3 * kLong; size -= 3 * kLong, at += 3 * kLong) {
    next.ask(at, 3 * kLong);
    r = run_three<kLong>(at, r);
  }
  next.ask(at, size);
  for (; size >= 3 * kShort; size -= 3 * kShort, at += 3 * kShort) r = run_three<kShort>(at, r);
  return ~run_tail(at, size, r);
}

// 256 bytes a step in four registers: their content is multiplied on by 256 bytes, and the next 256 are added.
__attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2"))) inline __m512i fold(__m512i x, __m512i by, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), next, 0x96);
}

template <unsigned kBits>
__attribute__((target("avx512f"))) inline __m512i fold_factors() {
  constexpr auto kLow = static_cast<int64_t>(power(kBits + 32)), kHigh = static_cast<int64_t>(power(kBits - 32));
  return _mm512_set_epi64(kHigh, kLow, kHigh, kLow, kHigh, kLow, kHigh, kLow);
}

__attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2"))) uint32_t run_avx512(const void* data, size_t size, uint32_t value, const void* ahead) {
  if (size < 512) return run_sse42(data, size, value, ahead);
  const auto* at = static_cast<const uint8_t*>(data);
  const ChecksumPrefetch next(ahead, at);
  next.ask(at, 256);
  __m512i x0 = _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~value))));
  __m512i x1 = _mm512_loadu_si512(at + 64), x2 = _mm512_loadu_si512(at + 128), x3 = _mm512_loadu_si512(at + 192);
  const __m512i by_step = fold_factors<2048>();
  for (at += 256, size -= 256; size >= 256; at += 256, size -= 256) {
    next.ask(at, 256);
    x0 = fold(x0, by_step, _mm512_loadu_si512(at));
    x1 = fold(x1, by_step, _mm512_loadu_si512(at + 64));
    x2 = fold(x2, by_step, _mm512_loadu_si512(at + 128));
    x3 = fold(x3, by_step, _mm512_loadu_si512(at + 192));
  }
  const __m512i by_register = fold_factors<512>();
  x3 = fold(fold(fold(x0, by_register, x1), by_register, x2), by_register, x3);
  for (; size >= 64; at += 64, size -= 64) x3 = fold(x3, by_register, _mm512_loadu_si512(at));
  // The last 64 bytes stand for everything so far: their own CRC, from zero, is the result.
  alignas(64) uint8_t rest[64];
  _mm512_store_si512(rest, x3);
  return ~run_tail(at, size, run_tail(rest, sizeof rest, 0));
}

#endif

std::vector<Crc32cMethod> find_methods() {
  std::vector<Crc32cMethod> methods;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_sse42 = __builtin_cpu_supports("sse4.2") != 0 && __builtin_cpu_supports("pclmul") != 0;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512bw") != 0;
  if (has_sse42 && has_avx512 && __builtin_cpu_supports("vpclmulqdq") != 0) methods.push_back({"avx512", run_avx512});
  if (has_sse42) methods.push_back({"sse4.2", run_sse42});
#endif
  methods.push_back({"portable", run_portable});
  return methods;
}

}  // namespace

const std::vector<Crc32cMethod>& crc32c_methods() {
  static const std::vector<Crc32cMethod> methods = find_methods();
  return methods;
}

uint32_t crc32c(const void* data, size_t size, uint32_t value, const void* ahead) {
  static uint32_t (*const run)(const void*, size_t, uint32_t, const void*) = crc32c_methods().front().run;
  return run(data, size, value, ahead);
}

}  // namespace kvxfer
