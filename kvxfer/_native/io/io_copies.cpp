// What the IO thread has to do with copies between devices and pinned memory (lanes/staging.hpp): it looks which are over,
// and lets go on what waited for them. And how the loop ends: with nothing that may still land, or with that kept for ever.
#include <poll.h>

#include "io_thread.hpp"

namespace kvxfer {
namespace {

constexpr Nanos kEndMax = 5'000 * kMillisecond;  // for what is in flight to end when everything else has

}  // namespace

void IoThread::settle_copies() {
  report_copies(tools_.staging->settle());
  std::vector<Key> paused;
  for (const auto& [key, connection] : connections_) {
    if (connection->outbox().is_waiting()) touch(key);
    if (connection->is_paused()) paused.push_back(key);
  }
  for (const Key key : paused) on_ready(key, EPOLLIN);
}

// Waits for all that are under way.
void IoThread::finish_copies(Nanos until) { report_copies(tools_.staging->finish(until)); }

void IoThread::finish_reads(Nanos until) {
  while (tools_.ucx && reads_.is_in_flight() && monotonic_now() < until) {
    tools_.ucx->progress();
    if (reads_.is_in_flight()) ::poll(nullptr, 0, 1);
  }
}

// Connections go first: that cancels what is in flight on them. Only then is the owner told of a failure.
void IoThread::end() noexcept {
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

void IoThread::report_copies(const std::vector<uint64_t>& gathers) {
  shared_.gathers_ended(gathers);
  for (const StoppedLanding& over : tools_.staging->take_stopped()) {
    reads_.report_stopped(over.landing->id, over.landing->token, over.code, over.text);
  }
}

}  // namespace kvxfer
