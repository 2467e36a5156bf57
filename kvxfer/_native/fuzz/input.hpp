// The source of a fuzz target's choices, and its report of a broken rule.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "machines/ids.hpp"

namespace kvxfer::fuzz {

// libFuzzer keeps the input that broke the rule.
[[noreturn]] inline void broken(const std::string& rule) {
  std::fprintf(stderr, "broken: %s\n", rule.c_str());
  std::abort();
}
inline void check(bool holds, const char* rule) {
  if (!holds) broken(rule);
}

// The bytes of one input, from the front. Past the end there are zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool is_empty() const { return left_ == 0; }
  size_t left() const { return left_; }
  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  bool flag() { return (byte() & 1) != 0; }
  size_t below(size_t bound) { return byte() % bound; }
  uint64_t number(size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= uint64_t{byte()} << (8 * i);
    return value;
  }
  // Mostly small, sometimes anything: one byte gives the count of bytes.
  uint64_t any() {
    const uint8_t first = byte();
    if (first < 0xf0) return first;
    return number(size_t{1} << (first & 3));
  }
  uint32_t u32() { return static_cast<uint32_t>(any()); }
  std::string bytes(size_t size) {
    size = std::min(size, left_);
    std::string value(reinterpret_cast<const char*>(data_), size);
    data_ += size;
    left_ -= size;
    return value;
  }
  std::string some_bytes() { return bytes(static_cast<size_t>(std::min<uint64_t>(any(), left_))); }
  std::string rest() { return bytes(left_); }
  template <class T>
  T& pick(std::vector<T>& from) {
    return from[below(from.size())];
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

template <size_t N>
std::array<uint8_t, N> filled(uint8_t value) {
  std::array<uint8_t, N> bytes;
  bytes.fill(value);
  return bytes;
}

}  // namespace kvxfer::fuzz
