// How the event loop performs the endpoint's effects, and flushes its connections.
#include <algorithm>

#include "event_loop.hpp"

namespace kvxfer {
namespace {

constexpr size_t kQueuedFrameBytesMax = 16 << 20;  // of one connection, beside what its queued notifications may take

}  // namespace

void EventLoop::perform_now() {
  Nanos ignored = kNever;
  for (Effect& effect : shared_.take_effects(ignored, ignored)) perform(effect);
}

void EventLoop::perform(const Hangup& effect) {
  const auto found = by_session_.find(effect.session);
  if (found == by_session_.end()) return;
  const Key key = found->second;
  by_session_.erase(found);
  close(key, effect.code, effect.text);
}

void EventLoop::perform(Effect& effect) {
  if (auto* e = std::get_if<Dial>(&effect)) return start_dial(*e);
  if (auto* e = std::get_if<Hangup>(&effect)) return perform(*e);
  if (auto* e = std::get_if<SendMap>(&effect)) return perform(*e);
  if (auto* e = std::get_if<SendData>(&effect)) return perform(*e);
  if (auto* e = std::get_if<ReadBlocks>(&effect)) return perform(*e);
  if (auto* e = std::get_if<StopRead>(&effect)) return stop_reads(e->id);
  if (auto* e = std::get_if<SendFrame>(&effect)) {
    Connection* connection = find(e->session);
    if (connection == nullptr) return;
    connection->outbox().push(e->frame);
    const size_t queued_max = kQueuedFrameBytesMax + std::min(limits_.notifications_max * limits_.notification_bytes_max, limits_.notification_queue_bytes_max);
    if (connection->outbox().frame_bytes() > queued_max) {
      lose(by_session_.at(e->session), Error(Code::overloaded, "the peer asks faster than it listens"));
    }
  }
}

Connection* EventLoop::find(SessionId session) {
  const auto found = by_session_.find(session);
  if (found == by_session_.end()) return nullptr;
  touch(found->second);
  return connections_.at(found->second).get();
}

void EventLoop::perform(const SendMap& effect) {
  if (Connection* connection = find(effect.session)) connection->send_map(effect.pool, effect.lane);
}

void EventLoop::perform(SendData& effect) {
  Connection* connection = find(effect.session);
  if (connection == nullptr) return;
  if (OwnMemory memory = shared_.find(effect.from)) connection->send_data(std::move(effect), std::move(memory));
}

void EventLoop::perform(ReadBlocks& effect) {
  const TransferId id = effect.id;
  const uint64_t token = effect.token;
  const Lane lane = effect.lane;
  try {
    const OwnMemory memory = shared_.find(effect.to);
    if (!memory) throw Error(Code::internal, "a read into missing memory");
    if (memory.device && lane != Lane::Ucx) throw Error(Code::no_lane, "the reader's memory is on a device");
    if (memory.device && !effect.checksums.empty()) throw Error(Code::no_lane, "only stream and unix compute checksums of device memory");
    const Connection* connection = find(effect.session);
    if (connection == nullptr || connection->is_closing()) throw Error(Code::transport, "the session ended");
    reads_.add(open_read(std::move(effect), [&](uint32_t remote) { return connection->remote(remote, lane); }, memory));
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    reads_.report_stopped(id, token, error.code(), error.what());
  }
}

// Runs after the effects of the same moment: a reader learns that its grant is revoked before it finds the memory gone.
void EventLoop::withdraw(const std::vector<Withdrawn>& gone) {
  if (gone.empty()) return;
  for (auto& [key, connection] : connections_) {
    connection->withdraw(gone);
    touch(key);
  }
}

void EventLoop::stop_reads(const TransferId& id) {
  for (auto& [_, connection] : connections_) connection->stop_landing(Code::cancelled, "the transfer is over", &id);
  reads_.stop(id);
}

bool EventLoop::prefault_some() {
  while (!prefaulting_.empty()) {
    const std::shared_ptr<RemoteMemory> memory = prefaulting_.front().lock();
    if (memory && memory->prefault()) return true;
    prefaulting_.pop_front();
  }
  return false;
}

// --- outgoing frames ---

void EventLoop::flush_touched() {
  std::vector<Key> touched = std::exchange(touched_, {});
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (const Key key : touched) {
    const auto found = connections_.find(key);
    if (found == connections_.end()) continue;
    try {
      found->second->flush(portion_);
      if (found->second->is_corked()) corked_.push_back(key);
      watch(key, *found->second);
    } catch (const Error& error) {
      if (error.code() == Code::internal) throw;
      on_ready(key, EPOLLIN);  // reads what the peer sent before it closed, and then finds the end
      if (connections_.count(key) != 0) lose(key, error);
    }
  }
}

// A corked connection waits for a frame that would go out with the end of its payload, usually the verdict. No such frame came in
// this round, so the transfer has more blocks to come, and the kernel must not hold these back.
void EventLoop::uncork() {
  for (const Key key : std::exchange(corked_, {})) {
    if (const auto found = connections_.find(key); found != connections_.end()) found->second->uncork();
  }
}

void EventLoop::watch(Key key, Connection& connection) {
  const bool has_out = connection.outbox().wants_out();
  const uint32_t interest = (connection.is_paused() ? 0u : static_cast<uint32_t>(EPOLLIN)) | (has_out ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  if (interest == connection.interest) return;
  connection.interest = interest;
  poller_.change(connection.fd(), interest, key);
}

}  // namespace kvxfer
