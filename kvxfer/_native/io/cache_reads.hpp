// Reading blocks into the cache before the kernel copies them, and whether that pays. Knows no socket and no grant: whoever
// sends asks, and says what its calls took.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "machines/ids.hpp"

namespace kvxfer {

// Brings runs of memory into the cache. `may_load`: they are surely there. Where they may be gone they are only asked for, which
// no memory that is missing can make a fault of.
void read_into_cache(const iovec* runs, size_t count, bool may_load);

// Whether the next call's blocks are read first. On some processors the kernel's copy waits for memory longer than plain
// loads do, on others loads only come on top of it, and no flag of the processor says which. So stretches of both kinds are
// timed, those that the calls of one connection take: the quicker kind goes on, and the other is tried now and then.
//
// A stretch is compared with its neighbours only, of the other kind, right before and after it: a machine that many share
// is half as fast for a second and then again as fast, which is more than the kinds differ by. Of the last such
// comparisons the middle one counts. What lies on two sides of a pause is not compared, nor who has just woken up.
class CacheReads {
 public:
  bool is_on() const { return kind_ == kRead; }
  // A call of the kind that is_on() said began then and took so long, and the kernel took so many bytes of blocks.
  void spent(Nanos began, Nanos time, size_t bytes);

 private:
  enum Kind : uint8_t { kPlain, kRead };
  static constexpr size_t kCompared = 5;
  void ended(double ns_per_byte);       // a stretch
  void compared(double read_to_plain);  // their times

  Kind preferred_ = kPlain, kind_ = kPlain;
  double before_ = 0;              // ns a byte of the preferred kind's last stretch; 0: none
  double tried_ = 0;               // of the other's since; 0: none
  double ratios_[kCompared] = {};
  size_t count_ = 0;               // of comparisons
  uint32_t since_try_ = 0;         // stretches of the preferred kind
  Nanos ended_at_ = 0;             // the last call
  bool is_waking_ = true;          // this stretch is the first after a pause
  Nanos time_ = 0;                 // of this stretch
  size_t bytes_ = 0;
};

}  // namespace kvxfer
