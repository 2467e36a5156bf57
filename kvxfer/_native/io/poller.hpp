// What the loop of a core waits for: descriptors, a timer, and the wake of the core's owner.
//
// Two threads may wait for it at once: the core's own, and a caller that looks at the sockets himself, because he polls for
// an answer or drives the loop. Were both on one epoll, each answer would wake both, the own thread on one of the
// processors that the caller and who answers him run on, and that takes longer than a small read. So, once there was such a
// caller, the own thread sleeps on a second epoll, whose sources are the first, the timer and the wake: while it is muted it
// hears of the latter two only. Whoever mutes it looks at the sockets, or sees to it that somebody does again.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>

#include "memory/fd.hpp"
#include "machines/ids.hpp"

namespace kvxfer {

class Poller {
 public:
  using Key = uint64_t;  // what is told of a descriptor that is ready
  enum class Who : uint8_t { OwnThread, Caller };

  // Throws Error(limit_exceeded). The eventfd `wake_fd` outlives it.
  Poller(int wake_fd, Key wake, Key timer);

  // Each throws Error(internal).
  void add(int fd, uint32_t events, Key key) { control(EPOLL_CTL_ADD, fd, events, key); }
  void change(int fd, uint32_t events, Key key) { control(EPOLL_CTL_MOD, fd, events, key); }
  void remove(int fd);  // also where it is not there any more

  // What is ready; never waits. Needs no turn, as wait() does not. Below 0: errno says why.
  int look(epoll_event* events, int size) const { return ::epoll_wait(epoll_.get(), events, size, 0); }
  // Until something is, but no longer than `until`, in whole milliseconds. 0, too, where it was somebody else's before it
  // could be looked at.
  int wait(epoll_event* events, int size, Nanos until, Who who) const;

  // The own thread: what was given to add() does not wake it until it is unmuted. Throw Error(internal). Where there can be
  // no second epoll (UCX nests as many as the kernel allows, or the process has no descriptors left) nobody is ever muted.
  void mute();
  void unmute();
  bool is_muted() const { return is_muted_; }

  // At kNever: none. Throws Error(internal).
  void set_timer(Nanos at);
  // It was ready: whoever reads that has it to himself.
  void clear_timer();
  Nanos timer_at() const { return timer_at_; }

 private:
  enum class Bell : uint8_t { NotTried, None, Rings };
  void control(int operation, int fd, uint32_t events, Key key);
  void make_bell();
  void hear_of(uint32_t events);

  const int wake_fd_;
  Fd epoll_, timer_;
  Fd bell_;  // the second epoll; for the own thread alone
  std::atomic<Bell> has_bell_{Bell::NotTried};
  bool is_muted_ = false;
  Nanos timer_at_ = kNever;
};

}  // namespace kvxfer
