// Which processor a thread runs on, and whether others want it too.
#pragma once

#include "machines/ids.hpp"

namespace kvxfer {

// Whether what came last over this connection was sent on the calling thread's processor. Only of TCP within one kernel,
// which delivers on the sender's own.
bool is_sent_from_here(int fd);

// Moves the calling thread to another of the processors that it may run on; which those are stays as it was. Returns
// false where there is no other.
bool move_over();

// Whether a wait may begin without sleep. Being woken takes longer than a short spin. But while there are more threads than
// processors, who spins takes one from those who would end the wait; it is found out by not being run for a while.
class Spinning {
 public:
  bool pays(Nanos now) const { return now >= again_at_; }
  // A thread that was busy all the time did nothing between the two.
  static bool was_away(Nanos before, Nanos now) { return now - before > kAway; }
  void rest(Nanos now);  // it was away

 private:
  static constexpr Nanos kAway = 500'000;  // less than the slice of a thread that computes, more than an interrupt takes
  static constexpr Nanos kRestMin = 100 * kMillisecond, kRestMax = 6'400 * kMillisecond;
  static constexpr Nanos kMemory = 20'000 * kMillisecond;  // whoever was away again within it rests twice as long

  Nanos again_at_ = 0;
  Nanos rest_ = kRestMin;
};

}  // namespace kvxfer
