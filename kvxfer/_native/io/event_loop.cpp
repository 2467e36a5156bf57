#include "event_loop.hpp"

#include <algorithm>
#include <cstdio>

namespace kvxfer {
namespace {

constexpr int kEventsMax = 64;
constexpr int kPassesMax = 4;                   // over the effects in one round, before the sockets are looked at again
constexpr size_t kPortionOfCall = 128 << 10;    // bytes that one progress() moves: its caller does not wait for more
constexpr size_t kPrefaultingMax = 1024;        // memory beyond it can be read too, with slower first reads
constexpr Nanos kCopiesRest = 20 * kMillisecond;  // a driver that failed does not report its copies

}  // namespace

EventLoop::EventLoop(SharedEndpoint& shared, Statistics& statistics, EndpointLimits limits, LaneTools tools, std::mutex& mutex, Fd tcp_listener,
                     Fd unix_listener)
    : shared_(shared), statistics_(statistics), limits_(limits), tools_(std::move(tools)), mutex_(mutex), tcp_listener_(std::move(tcp_listener)),
      unix_listener_(std::move(unix_listener)), poller_(shared.wake_fd(), kWakeKey), reads_(shared, statistics) {
  poller_.add(tcp_listener_.get(), EPOLLIN, kTcpKey);
  if (unix_listener_) poller_.add(unix_listener_.get(), EPOLLIN, kUnixKey);
  if (tools_.ucx) poller_.add(tools_.ucx->fd(), EPOLLIN, kUcxKey);
  poller_.add(tools_.staging->fd(), EPOLLIN, kStagingKey);
  poller_.make_thread_epoll();
}

// --- which thread runs it ---

void EventLoop::run() noexcept {
  std::unique_lock lock(mutex_);
  try {
    while (!shared_.is_shut()) {
      Nanos until = round();
      tell_caller();
      if (until != 0 && prefault_some()) until = 0;
      if (until != 0) {
        // If the last sleep was set to end earlier than `until`, this one ends then too, although nothing may be due. A caller that
        // adds a deadline after that time need not wake this thread.
        if (thread_alarm_ > monotonic_now()) until = std::min(until, thread_alarm_);
        thread_alarm_ = until;
      }
      sleep(lock, until, Poller::Sleeper::IoThread);
    }
  } catch (const std::exception& error) {
    fail(error);
  }
  if (has_caller_) shared_.wake();  // this thread may have consumed the wake of the caller
  caller_left_.wait(lock, [this] { return !has_caller_; });
  try {
    if (!shared_.has_failed()) close_all();
  } catch (const std::exception& error) {
    fail(error);
  }
  end();
}

bool EventLoop::progress(bool looks) noexcept {
  if (shared_.is_shut()) return false;
  portion_ = kPortionOfCall;
  try {
    if (looks && !has_caller_) look();
    hand_over(with_ucx(round()));
    tell_caller();
  } catch (const std::exception& error) {
    fail(error);
  }
  portion_ = kPortion;
  return true;
}

bool EventLoop::progress_until(std::unique_lock<std::mutex>& lock, Nanos until) noexcept {
  if (has_caller_) return false;
  has_caller_ = true;
  shared_.set_caller_waits(true);
  try {
    poller_.mask();
    Nanos next = 0;  // what the last round returned; 0 too while no round has handled what the last sleep brought
    while (!shared_.is_shut() && !shared_.has_news() && monotonic_now() < until) {
      next = round();
      if (shared_.has_news() || !sleep(lock, std::min(next, until), Poller::Sleeper::Caller)) break;
      next = 0;
    }
    if (next == 0 && !shared_.is_shut()) next = round();
    hand_over(with_ucx(next));
    poller_.unmask();
  } catch (const std::exception& error) {
    fail(error);
  }
  shared_.set_caller_waits(false);
  has_caller_ = false;
  caller_left_.notify_one();
  return true;
}

// A caller leaves the loop, and something is due at `next` (0: now). Wakes the IO thread if it would sleep longer than that, or if
// the endpoint was shut: this caller may have consumed the wake of shut().
void EventLoop::hand_over(Nanos next) {
  if (next < thread_sleeps_until_ || shared_.is_shut()) shared_.wake();
}

// Wakes the caller inside progress_until() if it has news: another thread's round may have brought them while that caller slept.
void EventLoop::tell_caller() {
  if (has_caller_ && shared_.has_news()) shared_.wake();
}

// Sleeps, without the mutex, until a socket is ready or it is `until` (0: only checks), and dispatches ready ones. Returns false if
// a signal ended the sleep.
bool EventLoop::sleep(std::unique_lock<std::mutex>& lock, Nanos until, Poller::Sleeper sleeper) {
  if (until != 0 && tools_.ucx) until = tools_.ucx->may_sleep() ? std::min(until, tools_.ucx->wake_by()) : 0;
  statistics_.wakeups.add();
  if (until == 0) return look();
  const bool is_io_thread = sleeper == Poller::Sleeper::IoThread;
  if (is_io_thread) thread_sleeps_until_ = until;
  epoll_event events[kEventsMax];
  lock.unlock();
  const int count = poller_.wait(events, kEventsMax, until, sleeper);
  const int error = errno;
  lock.lock();
  if (is_io_thread) thread_sleeps_until_ = 0;
  if (count < 0 && error != EINTR) throw Error(Code::internal, errno_text("epoll_wait", error));
  dispatch(events, count);
  return count >= 0;
}

bool EventLoop::look() {
  epoll_event events[kEventsMax];
  const int count = poller_.look(events, kEventsMax);
  if (count < 0 && errno != EINTR) throw Error(Code::internal, errno_text("epoll_wait"));
  dispatch(events, count);
  return count >= 0;
}

void EventLoop::dispatch(const epoll_event* events, int count) {
  for (int i = 0; i < count; ++i) on_ready(events[i].data.u64, events[i].events);
}

// `until`, or earlier if the IO thread must check UCX operations in flight: UCX wakes a thread only if it was armed.
Nanos EventLoop::with_ucx(Nanos until) {
  if (until == 0 || !tools_.ucx) return until;
  const bool is_armed = tools_.ucx->may_sleep();
  const Nanos by = tools_.ucx->wake_by();
  return is_armed || by != kNever ? std::min(until, by) : 0;
}

void EventLoop::fail(const std::exception& error) noexcept {
  std::fprintf(stderr, "kvxfer: the native core failed: %s\n", error.what());
  shared_.shut(error.what());
}

// --- one round ---

// Returns the time of the next work apart from sockets; 0: more is due at once.
Nanos EventLoop::round() {
  const Nanos now = monotonic_now();
  tick_own(now);
  if (now >= tick_at_) shared_.act_io([](Endpoint& endpoint, Nanos at, Effects& out) { endpoint.tick(at, out); });
  const std::vector<Withdrawn> withdrawn = shared_.take_withdrawn();
  if (tools_.ucx) tools_.ucx->progress();
  if (tools_.staging->is_used()) settle_copies();
  for (const Key key : std::exchange(buffered_, {})) on_ready(key, EPOLLIN);
  bool has_more = reads_.work(portion_);
  flush_touched();
  bool is_quiet = false;
  Nanos until = kNever;
  for (int pass = 0; pass < kPassesMax && !is_quiet; ++pass) {
    until = next_own_deadline();
    std::deque<Effect> effects = shared_.take_effects(until, tick_at_);
    is_quiet = effects.empty() && (pass != 0 || withdrawn.empty());
    for (Effect& effect : effects) perform(effect);
    if (pass == 0) withdraw(withdrawn);
    if (reads_.has_new() && !has_more) has_more = reads_.work(portion_);
    flush_touched();
  }
  uncork();
  if (!is_quiet || has_more || reads_.has_new() || !touched_.empty() || !buffered_.empty() || shared_.has_withdrawn()) return 0;
  if (tools_.staging->is_busy()) until = std::min(until, now + kCopiesRest);
  // A deadline that a tick left in the past must not make this loop spin.
  return until <= now ? now + kMillisecond : until;
}

void EventLoop::on_ready(Key key, uint32_t events) {
  if (key == kWakeKey) return shared_.clear_wake();
  if (key == kUcxKey) return tools_.ucx->woken();  // each round makes progress
  if (key == kStagingKey) return tools_.staging->woken();
  if (key == kTcpKey) return accept(tcp_listener_, key, SessionKind::Tcp);
  if (key == kUnixKey) return accept(unix_listener_, key, SessionKind::Unix);
  if (dialing_.count(key) != 0) return finish_dial(key);
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;
  touch(key);
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) == 0) return;  // the round flushes what can go out
  try {
    found->second->receive(portion_);
    if (found->second->has_buffered()) buffered_.push_back(key);
    while (const std::shared_ptr<RemoteMemory> memory = found->second->take_new_remote()) {
      if (prefaulting_.size() < kPrefaultingMax) prefaulting_.push_back(memory);
    }
  } catch (const Error& error) {
    perform_now();  // its last frames may explain the end
    if (connections_.count(key) != 0) lose(key, error);
  }
}

}  // namespace kvxfer
