// Reading blocks into the cache before the kernel copies them, and whether that pays. Knows no socket and no grant: whoever
// sends asks, and says what its calls took.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "machines/ids.hpp"

namespace kvxfer {

// Brings runs of memory into the cache.
void read_into_cache(const iovec* runs, size_t count);

// Whether the next call's blocks are read first. On some processors the kernel's copy waits for memory longer than plain
// loads do, on others loads only come on top of it, and no flag of the processor says which. So stretches of both kinds are
// timed, those that the calls of one connection take: the quicker kind goes on, and the other is tried now and then.
class CacheReads {
 public:
  bool is_on() const { return kind_ == kRead; }
  // A call of the kind that is_on() said took so long, and the kernel so many bytes of blocks.
  void spent(Nanos time, size_t bytes);

 private:
  static constexpr size_t kPlain = 0, kRead = 1;
  struct Kind {
    double ns_per_byte = 0;
    uint32_t stretches = 0;
  };
  size_t next();

  Kind kinds_[2];
  size_t kind_ = kPlain;
  uint32_t since_try_ = 0;
  Nanos time_ = 0;
  size_t bytes_ = 0;
};

}  // namespace kvxfer
