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
//
// A stretch is compared with its neighbours only, of the other kind, right before and after it: a machine that many share
// is half as fast for a second and then again as fast, which is more than the kinds differ by. Of the last such
// comparisons the middle one counts.
class CacheReads {
 public:
  bool is_on() const { return kind_ == kRead; }
  // A call of the kind that is_on() said took so long, and the kernel so many bytes of blocks.
  void spent(Nanos time, size_t bytes);

 private:
  enum Kind : uint8_t { kPlain, kRead };
  static constexpr size_t kCompared = 5;
  void ended(double ns_per_byte);       // a stretch
  void compared(double read_to_plain);  // their times

  Kind preferred_ = kPlain, kind_ = kPlain;
  double before_ = 0, tried_ = 0;  // ns a byte of the preferred kind's last stretch, and of the other's since; 0: none
  double ratios_[kCompared] = {};
  size_t count_ = 0;               // of comparisons
  uint32_t since_try_ = 0;         // stretches of the preferred kind
  Nanos time_ = 0;                 // of this stretch
  size_t bytes_ = 0;
};

}  // namespace kvxfer
