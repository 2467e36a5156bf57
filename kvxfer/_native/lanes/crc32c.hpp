// CRC-32C (Castagnoli), as RFC 3720 defines it, by the fastest method that this CPU has. Knows bytes and nothing of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvxfer {

// The CRC of `size` bytes. `value` is the CRC of the bytes before them: crc(a + b) == crc(b, crc(a)). `ahead` points to the next
// `size` bytes, which are prefetched meanwhile; null: none.
uint32_t crc32c(const void* data, size_t size, uint32_t value = 0, const void* ahead = nullptr);

struct Crc32cMethod {
  const char* name;
  uint32_t (*run)(const void* data, size_t size, uint32_t value, const void* ahead);
};
// Every method that this CPU can run, the one in use first, `portable` last. For tests and doctor.
const std::vector<Crc32cMethod>& crc32c_methods();

}  // namespace kvxfer
