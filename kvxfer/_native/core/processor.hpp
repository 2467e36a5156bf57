// Which processor a thread runs on, and whether others want it too.
#pragma once

#include <sched.h>

#include <algorithm>

#include "machines/ids.hpp"

namespace kvxfer {

// Keeps a thread of the core off the processor of the peer that it exchanges blocks with, while they flow.
//
// Whom a sender under the same kernel wakes is often put on the sender's processor, where one of the two can run: the kernel
// takes the sender to be about to sleep. So it does with each wake, and nothing but a long wait for the balancing of load
// parts them.
//
// Where the peer runs is known from what comes after a pause alone: what is sent later goes out when an acknowledgement
// lets it, on the processor of whoever acknowledges.
class KeepOff {
 public:
  // Something came over TCP from under this kernel, which delivers on the sender's own processor. By any thread.
  void heard(int fd, Nanos now);
  // Of the thread that is kept off, from here on. Blocks flow; true: it is time to begin().
  bool flows(int fd, Nanos now);
  // Takes the calling thread from the processor that it is on. Returns false where there is no other that it may run on, or
  // more threads want to run than there are: the kernel does not ask whether the one that it takes is free, and one of the
  // threads there may keep it for long (650 ms were seen).
  bool begin();
  // Gives back what was taken, if nobody has set other processors meanwhile, once no blocks have flowed for a while.
  void rest(Nanos now);
  Nanos rests_at() const { return is_on_ ? flowed_at_ + kPause : kNever; }

 private:
  static constexpr Nanos kPause = 2 * kMillisecond;
  static constexpr Nanos kTryAgain = 500'000;

  cpu_set_t all_, others_;
  int peers_ = -1;  // processor
  bool is_on_ = false;
  Nanos heard_at_ = 0, flowed_at_ = 0, tried_at_ = 0;
};

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
