// Which processor a thread runs on, and whether others want it too.
#pragma once

#include <algorithm>

#include "machines/ids.hpp"

namespace kvxfer {

// Whether what came last over this connection was sent on the calling thread's processor. Only of TCP within one kernel,
// which delivers on the sender's own.
bool is_sent_from_here(int fd);

// Moves the calling thread to another of the processors that it may run on; which those are stays as it was. Returns
// false where there is no other, or more threads want to run than there are: the kernel does not ask whether the one that it
// takes is free, and one of the threads there may keep it for long (650 ms were seen).
bool move_over();

// Whether a wait may begin without sleep. Being woken takes longer than a short spin. But while there are more threads than
// processors, who spins takes one from those who would end the wait; he finds out by not being run for a while himself. That
// may cost a fiftieth of the time: what it cost more is waited for without spinning.
class Spinning {
 public:
  bool pays(Nanos now) const { return owed(now) < kOwedMax; }
  // How long a thread that was busy all the time was not run between the two; 0: too short to be another thread's turn.
  static Nanos away(Nanos before, Nanos now) { return now - before > kAway ? now - before : 0; }
  void was_away(Nanos away, Nanos now);

 private:
  static constexpr Nanos kAway = 500'000;  // less than the slice of a thread that computes, more than an interrupt takes
  static constexpr Nanos kOwedMax = kMillisecond, kOwedCap = 100 * kMillisecond;
  static constexpr Nanos kShare = 50;

  Nanos owed(Nanos now) const { return owed_ - std::min(owed_, (now - at_) / kShare); }

  Nanos owed_ = 0, at_ = 0;
};

}  // namespace kvxfer
