// Who does the loop's work, and how long it sleeps: the core's own thread, a caller that helps, or one that drives.
#include <poll.h>

#include <algorithm>

#include "io_thread.hpp"

namespace kvxfer {
namespace {

constexpr int kEventsMax = 64;
constexpr size_t kPortionOfHelp = 128 << 10;    // for a thread that has other things to do
constexpr size_t kSmallRead = 64 << 10;         // is over sooner than another thread would be awake
constexpr uint32_t kPollsMin = 8;               // whoever polls so many times without a pause ...
constexpr Nanos kNap = 200'000;                 // ... is left alone with the sockets, for so long after the last
constexpr Nanos kMute = 200'000;                // whoever polls like that until so long after a small post hears alone of sockets ...
constexpr Nanos kMuteMax = kMillisecond;        // ... and if he stops polling, nobody does until then
constexpr Nanos kQuick = 50'000;                // a wait that was over almost at once; after so many of them ...
constexpr uint32_t kQuickMin = 3, kQuickMax = 8;
constexpr Nanos kSpin = 20'000;                 // ... the next one begins without sleep
constexpr Nanos kLandingSpin = 100'000;         // while blocks come in from under this kernel
constexpr Nanos kDriverSpin = 100'000;          // of a caller that waits: it has asked for something that is on its way
constexpr Nanos kVerdictSpin = 250'000;         // ... and has read all of it: a hypervisor takes half of that to wake who is asked
constexpr Nanos kFullSpin = 400'000;            // of one whose blocks fill a socket to a peer under this kernel: much of it must be read
constexpr uint32_t kSlowMax = 16;               // of such waits in a row that were longer, and the next is slept through
constexpr Nanos kTold = 50'000;                 // for who was told first to post the next ...
constexpr Nanos kToldAtLeisure = 5 * kMillisecond;  // ... where nobody waits: a timer that is later than the clock's tick costs a tenth
constexpr Nanos kFollow = 100'000;               // for who left much to be read, to come back and wait for it
constexpr Nanos kSoon = kMillisecond;            // a thread that sleeps is woken at once for what is due so soon

}  // namespace

void IoThread::rest(std::unique_lock<std::mutex>& turn) {
  if (turn_.drivers == 0) return;
  keep_off_.end();
  if (turn_.is_driven) shared_.wake();  // what woke this thread is the driver's to see
  is_resting_ = true;
  undriven_.wait(turn, [this] { return turn_.drivers == 0; });
  is_resting_ = false;
}

bool IoThread::drive(std::unique_lock<std::mutex>& turn, Nanos until) noexcept {
  if (turn_.is_driven) return leave(), false;
  turn_.is_driven = true;
  polls_ = 0;
  try {
    poller_.mute();
    if (is_followed_ || !reads_.is_idle()) has_waited_ = true;
    if (is_followed_) set_timer(kNever);
    const Nanos thread_sleeps_until = sleeps_until_;
    Nanos next = 0;
    while (!shared_.is_shut() && !shared_.has_news() && monotonic_now() < until) {
      next = work();
      if (shared_.has_news() || !wait(turn, std::min(next, until), true)) break;
      next = 0;
    }
    // What the last wait brought; nobody else will see to it.
    const bool is_told_first = next == 0 && shared_.has_news();
    if (shared_.has_news()) helped_at_ = 0;
    if (!is_resting_ && next == 0 && !is_told_first && !shared_.is_shut()) next = work();
    sleeps_until_ = is_resting_ ? 0 : thread_sleeps_until;
    if (!is_resting_) is_told_first ? tell_first() : hand_over(left_to_wait_for(next));
    poller_.unmute();
  } catch (const std::exception& error) {
    fail(error);
  }
  turn_.is_driven = false;
  leave();
  return true;
}

void IoThread::leave() {
  if (--turn_.drivers != 0) return;
  if (is_resting_) undriven_.notify_one();
  if (!is_letting_) return;
  const std::lock_guard lock(letting_);
  let_.notify_one();
}

// Without the turn. Whatever woke this thread, a driver at work sees it when it next looks at the sockets; to wait for the
// turn would make it pay for handing it over each time. One that is asleep may not have been woken: see rest(). Not after a
// wake that was read: nobody sees that again.
void IoThread::let_drive() {
  if (turn_.drivers == 0) return;
  keep_off_.end();
  std::unique_lock lock(letting_);
  is_letting_ = true;
  let_.wait(lock, [this] { return turn_.drivers == 0 || is_driver_asleep_; });
  is_letting_ = false;
}

bool IoThread::help(bool is_polling) noexcept {
  if (shared_.is_shut() || turn_.is_driven || (is_polling && is_bulk_)) return false;  // much to read is the thread's own work, in larger portions
  portion_ = kPortionOfHelp;
  const Nanos now = monotonic_now();
  const bool is_soon = now - helped_at_ < kMute;
  try {
    if (is_polling) {
      polls_ = is_polled_still(now) ? polls_ + 1 : 0;
      polled_at_.store(now, std::memory_order_relaxed);
      // What he polls for, as a rule, is the small post that he came with before.
      if (!is_soon && poller_.is_muted()) has_polled_ = false;
      if (!is_soon) poller_.unmute();
      else if (polls_ >= kPollsMin && sleeps_until_ != 0 && !is_napping_) poller_.mute();
      epoll_event events[kEventsMax];
      const int count = poller_.look(events, kEventsMax);
      for (int i = 0; i < count; ++i) on_ready(events[i].data.u64, events[i].events);
      // A thread that naps does not do the rest soon: others would wait for as long as every poll brings news.
      const bool is_late = is_napping_ && now - worked_at_ >= kNap;
      if (shared_.has_news() && !is_late) {
        portion_ = kPortion;
        tell_first();
        has_polled_ |= is_soon;
        return answered(), true;
      }
    } else {
      const bool is_alone = helped_at_ == 0 || now - helped_at_ > kMuteMax;  // of many the first are answered while he posts the others
      helped_at_ = now;
      if (!is_alone) poller_.unmute();
      else if (has_polled_ && sleeps_until_ != 0 && !is_napping_) poller_.mute();  // as he will again: before the answer can be there
    }
    Nanos next = work();
    // Asked for and read in one go: the thread need not be woken for it, and the source hears of the end while it wakes.
    if (next == 0 && !is_polling && reads_.has_new() && reads_.is_small(kSmallRead)) next = work();
    const Nanos until = left_to_wait_for(next);
    if (is_bulk_) polls_ = 0;  // no nap now
    if (is_napping_) hand_over(warming_.empty() ? until : 0);  // to warm is the thread's
    else hand_over(until, !is_polling && has_waited_);
    if (shared_.has_news()) answered();
    // Who polls may never come again, and whatever timer there was may be gone: he has read it.
    else if (poller_.is_muted() && std::min(sleeps_until_, poller_.timer_at()) > helped_at_ + kMuteMax) set_timer(helped_at_ + kMuteMax);
  } catch (const std::exception& error) {
    fail(error);
  }
  portion_ = kPortion;
  return true;
}

void IoThread::answered() {
  helped_at_ = 0;
  poller_.unmute();
}

void IoThread::set_timer(Nanos at, bool is_followed) {
  is_followed_ = is_followed;
  poller_.set_timer(at);
}

// Until when the thread may sleep, where a caller that had work() say `until` goes away: what UCX has in flight wakes
// nobody unless it is armed.
Nanos IoThread::left_to_wait_for(Nanos until) {
  if (until == 0 || !tools_.ucx) return until;
  const bool is_armed = tools_.ucx->may_sleep();
  const Nanos by = tools_.ucx->wake_by();
  return is_armed || by != kNever ? std::min(until, by) : 0;
}

// Whether somebody has polled a moment ago. Needs no turn.
bool IoThread::is_polled_still(Nanos now) const { return now - polled_at_.load(std::memory_order_relaxed) < kPollPause; }

bool IoThread::wait(std::unique_lock<std::mutex>& turn, Nanos until, bool is_driver) {
  epoll_event events[kEventsMax];
  int count = 0;
  statistics_.wakeups.add();
  if (!is_driver && keep_off_.is_on()) keep_off_.rest(monotonic_now());
  const bool is_polled = !is_driver && polls_ >= kPollsMin && is_polled_still(monotonic_now());
  if (until != 0 && tools_.ucx) until = tools_.ucx->may_sleep() || is_polled ? std::min(until, tools_.ucx->wake_by()) : 0;
  if (until == 0) {
    count = poller_.look(events, kEventsMax);
  } else {
    sleeps_until_ = until;
    is_napping_ = is_polled;
    if (is_driver) is_driver_asleep_ = true;
    const Nanos began = monotonic_now();
    Begin begin = is_polled ? Begin{} : begin_wait(is_driver, began);
    turn.unlock();
    count = wait_unlocked(events, kEventsMax, until, is_driver, is_polled, begin);
    const Nanos took = monotonic_now() - began;
    if (is_driver) {
      is_driver_asleep_ = false;
    } else if (!is_polled) {  // a nap has read the wake: rest() gives it back
      let_drive();
    }
    turn.lock();
    if (!is_driver && !turn_.is_driven) {
      if (poller_.is_muted() && monotonic_now() - helped_at_ >= kMute) has_polled_ = false;  // this time nobody did, or it takes longer
      poller_.unmute();
    }
    if (!is_driver) has_read_ = false;
    if (begin.away != 0) spinning_.was_away(begin.away, monotonic_now());
    if (!is_driver && !is_polled) quick_ = took < kQuick ? std::min(quick_ + 1, kQuickMax) : 0;
    if (begin.is_full) slowly_ = took >= kFullSpin ? std::min(slowly_ + 1, kSlowMax) : 0;
    sleeps_until_ = 0;
    is_napping_ = false;
  }
  if (count < 0 && errno != EINTR) throw Error(Code::internal, errno_text("epoll_wait"));
  if (!is_driver) rest(turn);
  for (int i = 0; i < count; ++i) on_ready(events[i].data.u64, events[i].events);
  return count >= 0;
}

// After waits that were over almost at once the next one is taken for such a one too, and for a moment not slept through.
// A caller's thread is not ours to move: where it must not be brought to its reader's processor, it may not sleep.
IoThread::Begin IoThread::begin_wait(bool is_driver, Nanos now) {
  const auto full = connections_.find(std::exchange(full_, 0));
  const auto landing = connections_.find(std::exchange(landing_, 0));
  const bool is_landing = landing != connections_.end(), is_full = full != connections_.end();
  const bool is_filling_near = is_full && full->second->is_near();
  const auto is_tcp = [](const auto& found) { return found->second->kind() == SessionKind::Tcp; };
  const bool is_tcp_landing = is_landing && is_tcp(landing);
  Begin begin;
  begin.is_full = !is_driver && is_filling_near && !is_tcp(full);
  if (!is_driver && (is_tcp_landing || (is_filling_near && is_tcp(full)))) {
    const Connection& flow = *(is_tcp_landing ? landing : full)->second;
    begin.moves = keep_off_.flows(flow.fd(), flow.asker(), now) && reads_.is_idle();
  }
  if (!spinning_.pays(now)) {
    begin.moves = false;
    return begin;
  }
  // A socket that is full is emptied by its reader, who needs the processors more than this loop does. But who sleeps on a Unix
  // socket is woken on its reader's processor, and it does not say which that is, for this thread to be moved from there. Not
  // for a reader that is slow in any case: one that shares this thread's processor is parted from it after some of those waits.
  const bool stays_up = is_filling_near && (is_driver || (begin.is_full && slowly_ < kSlowMax));
  if (is_full) begin.spin = stays_up ? kFullSpin : 0;
  else if (is_driver) begin.spin = std::exchange(has_read_, false) ? kVerdictSpin : kDriverSpin;
  else begin.spin = is_landing ? kLandingSpin : quick_ >= kQuickMin ? kSpin : 0;
  return begin;
}

// Without the turn.
int IoThread::wait_unlocked(epoll_event* events, int size, Nanos until, bool is_driver, bool is_polled, Begin& begin) {
  const Nanos began = monotonic_now();
  if (is_polled) {
    until = std::min(until, keep_off_.rests_at());
    pollfd wake{shared_.wake_fd(), POLLIN, 0};
    Nanos now = began;
    do {
      const timespec nap{0, static_cast<long>(std::clamp<Nanos>(until - now, 0, kNap))};
      ::ppoll(&wake, 1, &nap, nullptr);
      if (wake.revents != 0) return shared_.clear_wake(), 0;
      now = monotonic_now();
    } while (now < until && is_polled_still(now));  // without the turn, which would only make the other wait
    return 0;
  }
  int count = 0;
  if (begin.moves) {
    if (keep_off_.begin()) statistics_.moves_over.add();
    else begin.spin = 0;
    begin.away = Spinning::away(began, monotonic_now());
    if (begin.away != 0) begin.spin = 0;
  }
  if (!is_driver) until = std::min(until, keep_off_.rests_at());
  if (begin.spin != 0) {
    begin.spin = std::min(begin.spin, until - began);
    Nanos now = began;
    do {
      count = poller_.look(events, size);
      const Nanos before = std::exchange(now, monotonic_now());
      begin.away = Spinning::away(before, now);
    } while (count == 0 && begin.away == 0 && now - began < begin.spin);
  }
  return count != 0 ? count : poller_.wait(events, size, until, is_driver ? Poller::Who::Caller : Poller::Who::OwnThread);
}

// Who leaves the loop to the thread says until when that may sleep. What was just asked for is answered soon, and perhaps
// nobody else looks: the thread gets up when that is late, and not to be told so. `is_followed`: he will come back to wait for
// it, as he did before; a thread that is woken finds him at it, has to be woken again when he leaves, and costs him both.
void IoThread::hand_over(Nanos until, bool is_followed) {
  // Shut: this caller may have seen the word of it instead of the thread.
  if (shared_.is_shut()) return shared_.wake();
  if (sleeps_until_ == 0) return;
  const Nanos now = monotonic_now();
  is_followed = is_followed && until < now + kFollow;
  if (is_followed) until = now + kFollow;
  const bool was_told_first = std::exchange(is_told_first_, false);  // the timer is for what was done now
  if (until >= (was_told_first ? sleeps_until_ : std::min(sleeps_until_, poller_.timer_at()))) return was_told_first ? set_timer(kNever) : void();
  if (!is_followed && until - now < kSoon) return shared_.wake();
  set_timer(until, is_followed);
}

// Who polls or waits is told at once what came. What is to be sent for it (that a grant may end) goes out with what it posts
// next, or by the thread.
void IoThread::tell_first() {
  if (sleeps_until_ == 0 || is_napping_) return;  // it is soon at it
  const auto has_out = [this](Key key) {
    const auto found = connections_.find(key);
    return found != connections_.end() && !found->second->outbox().is_empty();
  };
  const bool is_pressing = !reads_.is_idle() || tools_.staging->is_busy() || (tools_.ucx && !tools_.ucx->is_armed()) || shared_.is_pressed() ||
                           std::any_of(touched_.begin(), touched_.end(), has_out);
  const Nanos at = monotonic_now() + (is_pressing ? kTold : kToldAtLeisure);
  if (at >= std::min(sleeps_until_, poller_.timer_at())) return;
  set_timer(at);
  is_told_first_ = is_pressing;
}

}  // namespace kvxfer
