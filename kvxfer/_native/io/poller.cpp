#include "poller.hpp"

#include <sys/timerfd.h>

#include <algorithm>

#include "memory/clock.hpp"

namespace kvxfer {

Poller::Poller(int wake_fd, Key wake, Key timer)
    : wake_fd_(wake_fd), epoll_(::epoll_create1(EPOLL_CLOEXEC)), timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!epoll_) fail_errno(Code::limit_exceeded, "epoll_create1");
  if (!timer_) fail_errno(Code::limit_exceeded, "timerfd_create");
  add(wake_fd, EPOLLIN, wake);
  add(timer_.get(), EPOLLIN, timer);
}

void Poller::control(int operation, int fd, uint32_t events, Key key) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) throw Error(Code::internal, errno_text("epoll_ctl"));
}

void Poller::remove(int fd) {
  epoll_event ignored{};
  const bool is_removed = ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, &ignored) == 0 || errno == ENOENT || errno == EBADF;
  if (!is_removed) throw Error(Code::internal, errno_text("epoll_ctl"));
}

int Poller::wait(epoll_event* events, int size, Nanos until, Who who) const {
  constexpr int kForEver = -1, kLongest = 1'000'000;
  const Nanos left = until == kNever ? 0 : until - monotonic_now();
  const int timeout_ms = until == kNever ? kForEver : static_cast<int>(std::clamp<Nanos>((left + kMillisecond - 1) / kMillisecond, 0, kLongest));
  if (who == Who::Caller || has_bell_.load(std::memory_order_acquire) != Bell::Rings) return ::epoll_wait(epoll_.get(), events, size, timeout_ms);
  const int rung = ::epoll_wait(bell_.get(), events, size, timeout_ms);
  return rung > 0 ? look(events, size) : rung;
}

// Only now: what is added to the first epoll may be one itself, and the kernel counts how deep they are nested.
void Poller::make_bell() {
  has_bell_ = Bell::None;
  bell_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!bell_) return;
  for (const int fd : {epoll_.get(), timer_.get(), wake_fd_}) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (::epoll_ctl(bell_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return bell_.reset();
  }
  has_bell_.store(Bell::Rings, std::memory_order_release);
}

void Poller::mute() {
  if (has_bell_ == Bell::NotTried) make_bell();
  if (has_bell_ == Bell::None || is_muted_) return;
  hear_of(0);
  is_muted_ = true;
}

void Poller::unmute() {
  if (!is_muted_) return;
  hear_of(EPOLLIN);
  is_muted_ = false;
}

void Poller::hear_of(uint32_t events) {
  epoll_event event{};
  event.events = events;
  if (::epoll_ctl(bell_.get(), EPOLL_CTL_MOD, epoll_.get(), &event) != 0) throw Error(Code::internal, errno_text("epoll_ctl"));
}

void Poller::set_timer(Nanos at) {
  const Nanos expiry = at == kNever ? 0 : at;  // 0 disarms it
  const itimerspec when{{0, 0}, {expiry / 1'000'000'000, static_cast<long>(expiry % 1'000'000'000)}};
  if (::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr) != 0) throw Error(Code::internal, errno_text("timerfd_settime"));
  timer_at_ = at;
}

void Poller::clear_timer() {
  uint64_t ignored;
  static_cast<void>(!::read(timer_.get(), &ignored, sizeof ignored));
  timer_at_ = kNever;
}

}  // namespace kvxfer
