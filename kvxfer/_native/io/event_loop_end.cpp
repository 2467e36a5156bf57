// Copies between devices and pinned memory (lanes/staging.hpp), and the end of the loop: nothing may land any more, or memory that
// may still be written is kept for ever.
#include <poll.h>

#include "event_loop.hpp"

namespace kvxfer {
namespace {

constexpr Nanos kCloseMax = 5'000 * kMillisecond;  // for what is in flight to end
constexpr Nanos kEndMax = 5'000 * kMillisecond;    // for what is still in flight when everything else has ended

}  // namespace

void EventLoop::settle_copies() {
  report_copies(tools_.staging->settle());
  std::vector<Key> paused;
  for (const auto& [key, connection] : connections_) {
    if (connection->outbox().is_waiting()) touch(key);
    if (connection->is_paused()) paused.push_back(key);
  }
  for (const Key key : paused) on_ready(key, EPOLLIN);
}

// Waits for all copies in progress.
void EventLoop::finish_copies(Nanos until) { report_copies(tools_.staging->finish(until)); }

void EventLoop::finish_reads(Nanos until) {
  while (tools_.ucx && reads_.is_in_flight() && monotonic_now() < until) {
    tools_.ucx->progress();
    if (reads_.is_in_flight()) ::poll(nullptr, 0, 1);
  }
}

void EventLoop::close_all() {
  Nanos ignored = kNever;
  for (Effect& effect : shared_.take_effects(ignored, ignored)) {
    // A MAP goes with its READY: without it the reader would leave the lane.
    const bool is_said = std::holds_alternative<SendFrame>(effect) || std::holds_alternative<SendMap>(effect);
    if (is_said || std::holds_alternative<Hangup>(effect)) perform(effect);
  }
  for (auto& [_, connection] : connections_) {
    const SessionId session = connection->session;
    connection->begin_close(1);
    if (session != 0) shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.closed(session, now, out); });
    try {
      connection->flush(kPortion);
    } catch (const Error&) {
      continue;
    }
  }
  const Nanos until = monotonic_now() + kCloseMax;
  finish_copies(until);
  reads_.stop_all();
  finish_reads(until);
  reads_.work(0);
}

// Connections close first, which cancels their transfers. The owner learns of a failure only at the end.
void EventLoop::end() noexcept {
  connections_.clear();
  by_session_.clear();
  dialing_.clear();
  tcp_listener_.reset();
  unix_listener_.reset();
  const Nanos until = monotonic_now() + kEndMax;
  finish_reads(until);
  shared_.gathers_ended(tools_.staging->finish(until));
  static_cast<void>(tools_.staging->take_stopped());
  const bool has_reads = reads_.is_in_flight(), has_copies = tools_.staging->is_busy();
  if (has_reads) {
    reads_.keep();
    static_cast<void>(tools_.ucx.release());
  }
  if (has_copies) static_cast<void>(tools_.staging.release());
  if (has_reads || has_copies) shared_.keep_memory();
  shared_.tell_failure();
}

void EventLoop::report_copies(const std::vector<uint64_t>& gathers) {
  shared_.gathers_ended(gathers);
  for (const StoppedLanding& over : tools_.staging->take_stopped()) {
    reads_.report_stopped(over.landing->id, over.landing->token, over.code, over.text);
  }
}

}  // namespace kvxfer
