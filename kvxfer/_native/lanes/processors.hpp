// Which processor a thread runs on, and whether others want it too.
#pragma once

#include <sched.h>

#include <algorithm>

#include "machines/ids.hpp"

namespace kvxfer {

// Those that the caller may run on; empty where the kernel does not say.
cpu_set_t own_processors() noexcept;

// How many of these have nothing to run; negative: so many threads more want to run than there are. Nobody says on which
// processors the whole machine's threads wait, so it may be more than are told. Never throws.
int idle_processors(const cpu_set_t& of) noexcept;

// On which processor the peer of a connection asked for the blocks that flow over it, where that is TCP within one kernel,
// which delivers on the sender's own processor.
//
// Only a question says so, which comes after a pause: what comes while blocks flow may have been sent by an acknowledgement,
// on the processor of whoever acknowledges. Who asked himself does not know, so that not both leave the same processor.
class Asker {
 public:
  void heard(int fd, Nanos now);  // something came
  void said(Nanos now) { said_at_ = now; }
  int processor() const { return processor_; }  // negative: not known

 private:
  static constexpr Nanos kPause = 2 * kMillisecond;

  int processor_ = -1;
  Nanos heard_at_ = 0, said_at_ = 0;
};

// Keeps a thread of the core off the processor of the peer that it exchanges blocks with, while they flow. Used by that thread
// alone; flows() needs the loop's turn, for what it is given.
//
// Whom a sender under the same kernel wakes is often put on the sender's processor, where one of the two can run: the kernel
// takes the sender to be about to sleep. So it does with each wake, and nothing but a long wait for the balancing of load
// parts them.
class KeepOff {
 public:
  // Blocks flow over this connection; true: it is time to begin().
  bool flows(int fd, const Asker& asker, Nanos now);
  // Takes the thread from the processor that it was on when they flowed. Returns false where there is no other that it may run
  // on, or more threads want to run than there are: the kernel does not ask whether the one that it takes is free, and one of
  // the threads there may keep it for long (650 ms were seen).
  bool begin();
  // Gives the processor back, if nobody has set others meanwhile (in this very moment, theirs are lost). Comes before the
  // thread starts others: they have the processors of who starts them.
  void end();
  // Ends it where no blocks have flowed for a while, or it has been for long: the peer may be elsewhere by now.
  void rest(Nanos now) {
    if (now >= rests_at()) end();
  }
  Nanos rests_at() const { return is_on_ ? std::min(flowed_at_ + kPause, began_at_ + kLongest) : kNever; }
  bool is_on() const { return is_on_; }

 private:
  static constexpr Nanos kPause = 2 * kMillisecond, kLongest = 50 * kMillisecond;
  static constexpr Nanos kTryAgain = 500'000;

  cpu_set_t all_, others_;
  int leaves_ = 0;
  bool is_on_ = false;
  Nanos flowed_at_ = 0, began_at_ = 0;
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
