// What the event loop sleeps on: sockets and other descriptors in one epoll, and the eventfd that wakes the loop.
//
// The IO thread sleeps on a second epoll, which holds the first one and the eventfd. While a caller that waits runs the loop it masks the first epoll there: a socket that becomes readable then wakes the caller,
// and not the IO thread beside it.
#pragma once

#include <sys/epoll.h>

#include <cstdint>

#include "machines/ids.hpp"
#include "memory/fd.hpp"

namespace kvxfer {

class Poller {
 public:
  using Key = uint64_t;  // names a descriptor that is ready
  enum class Sleeper : uint8_t { IoThread, Caller };

  // Throws Error(limit_exceeded). The eventfd `wake_fd` outlives it.
  Poller(int wake_fd, Key wake);

  // Each throws Error(internal).
  void add(int fd, uint32_t events, Key key) { control(epoll_, EPOLL_CTL_ADD, fd, events, key); }
  void change(int fd, uint32_t events, Key key) { control(epoll_, EPOLL_CTL_MOD, fd, events, key); }
  void remove(int fd);  // also if the kernel removed it already

  // Makes the IO thread's own epoll, once, after every descriptor was added that is an epoll itself (UCX): the kernel limits how
  // deep they nest. If the kernel refuses, mask() does nothing, and a socket wakes both threads.
  void make_thread_epoll();
  // From now until unmask(), sockets do not wake the IO thread. Each throws Error(internal).
  void mask() { set_mask(0); }
  void unmask() { set_mask(EPOLLIN); }

  // Descriptors that are ready now. Below 0: errno has the reason. This and wait() need no mutex.
  int look(epoll_event* events, int size) const { return ::epoll_wait(epoll_.get(), events, size, 0); }
  // The same once something is ready, at the latest at `until`, rounded up to milliseconds. Also 0 if another thread handled it.
  int wait(epoll_event* events, int size, Nanos until, Sleeper sleeper) const;

 private:
  static void control(const Fd& epoll, int operation, int fd, uint32_t events, Key key);
  void set_mask(uint32_t events);

  const int wake_fd_;
  Fd epoll_;
  Fd thread_epoll_;  // empty: the IO thread sleeps on `epoll_`
};

}  // namespace kvxfer
