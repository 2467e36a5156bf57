#include "poller.hpp"

#include <algorithm>

#include "memory/clock.hpp"

namespace kvxfer {

Poller::Poller(int wake_fd, Key wake) : wake_fd_(wake_fd), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) fail_errno(Code::limit_exceeded, "epoll_create1");
  add(wake_fd, EPOLLIN, wake);
}

void Poller::control(const Fd& epoll, int operation, int fd, uint32_t events, Key key) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (::epoll_ctl(epoll.get(), operation, fd, &event) != 0) throw Error(Code::internal, errno_text("epoll_ctl"));
}

void Poller::remove(int fd) {
  epoll_event ignored{};
  const bool is_removed = ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, &ignored) == 0 || errno == ENOENT || errno == EBADF;
  if (!is_removed) throw Error(Code::internal, errno_text("epoll_ctl"));
}

// The sockets are in `epoll_`, and `thread_epoll_` holds `epoll_` and the eventfd. So one epoll_ctl() masks all sockets for the IO
// thread, and a caller that waits on `epoll_` still sees them. If the kernel refuses, `thread_epoll_` stays empty.
void Poller::make_thread_epoll() {
  Fd made(::epoll_create1(EPOLL_CLOEXEC));
  if (!made) return;
  for (const int fd : {epoll_.get(), wake_fd_}) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (::epoll_ctl(made.get(), EPOLL_CTL_ADD, fd, &event) != 0) return;
  }
  thread_epoll_ = std::move(made);
}

void Poller::set_mask(uint32_t events) {
  if (thread_epoll_) control(thread_epoll_, EPOLL_CTL_MOD, epoll_.get(), events, 0);
}

int Poller::wait(epoll_event* events, int size, Nanos until, Sleeper sleeper) const {
  constexpr int kForEver = -1, kLongest = 1'000'000;
  const Nanos left = until == kNever ? 0 : until - monotonic_now();
  const int timeout_ms = until == kNever ? kForEver : static_cast<int>(std::clamp<Nanos>((left + kMillisecond - 1) / kMillisecond, 0, kLongest));
  if (sleeper == Sleeper::Caller || !thread_epoll_) return ::epoll_wait(epoll_.get(), events, size, timeout_ms);
  // `thread_epoll_` reports only that `epoll_` or the eventfd is ready. `epoll_` has the eventfd too, and names those that are ready.
  const int ready = ::epoll_wait(thread_epoll_.get(), events, size, timeout_ms);
  return ready > 0 ? look(events, size) : ready;
}

}  // namespace kvxfer
