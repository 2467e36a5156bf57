#include "io_thread.hpp"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>

#include "sockets.hpp"

namespace kvxfer {
namespace {

constexpr uint64_t kWakeKey = 0, kTcpKey = 1, kUnixKey = 2, kUcxKey = 3, kStagingKey = 4, kTimerKey = 5;
constexpr int kRoundsMax = 4;                   // of effects before sockets are looked at again
constexpr size_t kFewEffects = 4;
constexpr int kAcceptsARound = 64;
constexpr size_t kWarmingMax = 1024;  // what is over is read as well, the first time more slowly
constexpr size_t kQueuedFrameBytesMax = 16 << 20;  // beside our own notifications
constexpr Nanos kLinger = 500 * kMillisecond;
constexpr Nanos kCloseMax = 5'000 * kMillisecond;  // for what is in flight to end
constexpr Nanos kDialMin = 500 * kMillisecond;  // hardly a round trip takes longer
constexpr Nanos kAcceptRest = 100 * kMillisecond, kCopiesRest = 20 * kMillisecond;  // a driver that failed does not ring

Bytes32 random_nonce() {
  Bytes32 nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) throw Error(Code::internal, errno_text("getrandom"));
  return nonce;
}

}  // namespace

IoThread::IoThread(SharedEndpoint& shared, Statistics& statistics, EndpointLimits limits, LaneTools tools, LoopTurn& turn,
                   Fd tcp_listener, Fd unix_listener)
    : shared_(shared), statistics_(statistics), limits_(limits), tools_(std::move(tools)), turn_(turn),
      tcp_listener_(std::move(tcp_listener)), unix_listener_(std::move(unix_listener)), poller_(shared.wake_fd(), kWakeKey, kTimerKey), reads_(shared, statistics),
      portion_(kPortion) {
  poller_.add(tcp_listener_.get(), EPOLLIN, kTcpKey);
  if (unix_listener_) poller_.add(unix_listener_.get(), EPOLLIN, kUnixKey);
  if (tools_.ucx) poller_.add(tools_.ucx->fd(), EPOLLIN, kUcxKey);
  poller_.add(tools_.staging->fd(), EPOLLIN, kStagingKey);
}

void IoThread::run() noexcept {
  std::unique_lock turn(turn_.mutex);
  try {
    for (rest(turn); !shared_.is_shut(); rest(turn)) {  // a driver may have seen to the word that it is
      if (!reads_.is_idle()) keep_off_.end();  // they may start threads
      Nanos until = work();
      if (until != 0 && warm_some()) until = 0;
      wait(turn, until, false);
    }
    if (!shared_.has_failed()) close_all();
  } catch (const std::exception& error) {
    fail(error);
    rest(turn);
  }
  end();
}

void IoThread::fail(const std::exception& error) noexcept {
  std::fprintf(stderr, "kvxfer: the native core failed: %s\n", error.what());
  shared_.shut(error.what());
}

// One round. Returns until when nothing is to be done but what sockets bring; 0: there is more at once.
Nanos IoThread::work() {
  const Nanos now = worked_at_ = monotonic_now();
  tick_own(now);
  if (now >= tick_at_) shared_.act_io([](Endpoint& endpoint, Nanos at, Effects& out) { endpoint.tick(at, out); });
  const std::vector<Withdrawn> withdrawn = shared_.take_withdrawn();
  if (tools_.ucx) tools_.ucx->progress();
  if (tools_.staging->is_used()) settle_copies();
  const bool was_reading = !reads_.is_idle();
  is_bulk_ = reads_.work(portion_);
  if (was_reading) has_read_ = reads_.is_idle();
  flush_touched();
  bool is_quiet = false;
  Nanos until = kNever;
  for (int round = 0; round < kRoundsMax && !is_quiet; ++round) {
    until = next_own_deadline();
    std::deque<Effect> effects = shared_.take_effects(until, tick_at_);
    is_quiet = effects.empty();
    const bool is_few = effects.size() <= kFewEffects;
    for (Effect& effect : effects) {
      // Who is asked wakes up while the read is begun; of many, all are asked at once.
      if (is_few && std::holds_alternative<ReadBlocks>(effect)) flush_touched(true);
      perform(effect);
    }
    if (round == 0) withdraw(withdrawn);
    flush_touched();
  }
  let_go();
  if (!is_quiet || is_bulk_ || reads_.has_new() || !touched_.empty() || shared_.has_withdrawn()) return 0;
  if (tools_.staging->is_busy()) until = std::min(until, now + kCopiesRest);
  // A deadline that a tick has just left in the past must not make this loop spin.
  return until <= now ? now + kMillisecond : until;
}

void IoThread::on_ready(Key key, uint32_t events) {
  if (key == kWakeKey) return shared_.clear_wake();
  if (key == kUcxKey) return tools_.ucx->woken();  // progress is made in every round
  if (key == kStagingKey) return tools_.staging->woken();
  if (key == kTimerKey) {
    is_told_first_ = false;
    if (std::exchange(is_followed_, false)) has_waited_ = false;
    return poller_.clear_timer();
  }
  if (key == kTcpKey) return accept(tcp_listener_, key, SessionKind::Tcp);
  if (key == kUnixKey) return accept(unix_listener_, key, SessionKind::Unix);
  if (dialing_.count(key) != 0) return finish_dial(key);
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;
  touch(key);
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) == 0) return;  // what can go out is flushed with the rest
  try {
    found->second->receive(portion_);
    if (found->second->is_landing_from_near()) landing_ = key;
    while (const std::shared_ptr<RemoteMemory> memory = found->second->take_new_remote()) {
      if (warming_.size() < kWarmingMax) warming_.push_back(memory);
    }
  } catch (const Error& error) {
    perform_now();  // its last frames may have said why it ends
    if (connections_.count(key) != 0) lose(key, error);
  }
}

// --- connections come and go ---

void IoThread::accept(Fd& listener, Key key, SessionKind kind) {
  for (int i = 0; i < kAcceptsARound; ++i) {
    Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        poller_.change(listener.get(), 0, key);
        accept_again_at_ = monotonic_now() + kAcceptRest;
      }
      return;
    }
    if (kind == SessionKind::Unix && !is_same_user(fd.get())) {
      statistics_.sessions_refused.add();
      shared_.tell(SessionRefused{std::nullopt, kind, Code::unauthenticated, "another user's process dialed the Unix socket"});
      continue;
    }
    open(std::move(fd), kind, std::nullopt);
  }
}

void IoThread::open(Fd fd, SessionKind kind, std::optional<AgentRef> dialed) {
  if (kind == SessionKind::Tcp) tune_tcp(fd.get());
  const Key key = next_key_++;
  auto connection = std::make_unique<Connection>(std::move(fd), kind, shared_, statistics_, tools_);
  const Bytes32 nonce = random_nonce();
  connection->session = shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) {
    return dialed ? endpoint.dialed(*dialed, kind, nonce, now, out) : endpoint.accepted(kind, nonce, now, out);
  });
  connection->dialed = std::move(dialed);
  connection->interest = EPOLLIN;
  poller_.add(connection->fd(), EPOLLIN, key);
  by_session_[connection->session] = key;
  connections_.emplace(key, std::move(connection));
}

void IoThread::start_dial(const Dial& dial) {
  statistics_.dials.add();
  try {
    const std::optional<PeerAddress> address = shared_.address(dial.peer);
    if (!address) throw Error(Code::peer_gone, "the peer is not known any more");
    if (dial.kind == SessionKind::Unix && address->unix_path.empty()) throw Error(Code::no_lane, "the peer has no Unix socket on this host");
    if (dial.kind == SessionKind::Tcp && address->tcp_port == 0) throw Error(Code::no_lane, "the peer has no TCP address");
    if (dial.kind == SessionKind::Memory) throw Error(Code::no_lane, "the memory lane joins simulated agents only");
    Fd fd = dial.kind == SessionKind::Unix ? dial_unix(address->unix_path) : dial_tcp(address->tcp_host, address->tcp_port);
    const Key key = next_key_++;
    poller_.add(fd.get(), EPOLLOUT, key);
    // The kernel repeats a lost SYN after a second at the soonest: who gives a peer up so soon had better begin anew before.
    const Nanos patience = std::min(limits_.handshake_ns, std::max(limits_.transfers.reconnect_ns / 2, kDialMin));
    dialing_.emplace(key, Dialing{std::move(fd), dial.peer, dial.kind, monotonic_now() + patience});
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    dial_failed(dial.peer, dial.kind, error.code(), error.what());
  }
}

void IoThread::finish_dial(Key key) {
  Dialing dialing = std::move(dialing_.at(key));
  dialing_.erase(key);
  poller_.remove(dialing.fd.get());
  if (const int error = connect_error(dialing.fd.get()); error != 0) {
    return dial_failed(dialing.peer, dialing.kind, Code::transport, errno_text("cannot connect", error));
  }
  if (dialing.kind == SessionKind::Unix && !is_same_user(dialing.fd.get())) {
    return dial_failed(dialing.peer, dialing.kind, Code::no_lane, "the Unix socket belongs to another user's process");
  }
  open(std::move(dialing.fd), dialing.kind, std::move(dialing.peer));
}

void IoThread::dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text) {
  statistics_.dials_failed.add();
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.dial_failed(peer, kind, code, text, now, out); });
}

// The connection broke, or its peer did what no peer does: then it is told, if it still listens.
void IoThread::lose(Key key, const Error& error) {
  if (error.code() == Code::internal) throw error;
  Connection& connection = *connections_.at(key);
  if (connection.is_closing()) {  // hung up on already, and now its peer is found to be gone or to talk nonsense
    if (error.code() == Code::transport) remove(key);
    return;
  }
  const SessionId session = connection.session;
  connection.stop_landing(error.code() == Code::transport ? Code::transport : Code::protocol, error.what());
  if (session != 0) {
    shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.closed(session, now, out); });
    by_session_.erase(session);
  }
  if (error.code() == Code::transport) return remove(key);
  connection.outbox().push(ErrorFrame{{}, 0, error.code(), error.what()});
  close(key, error.code(), error.what());
}

// After what was queued, and the peer hanging up or kLinger.
void IoThread::close(Key key, Code code, const std::string& text) {
  Connection& connection = *connections_.at(key);
  if (!connection.is_up()) {
    statistics_.sessions_refused.add();
    shared_.tell(SessionRefused{connection.dialed, connection.kind(), code, text});
  } else if (code == Code::protocol || code == Code::refused) {
    statistics_.sessions_ended.add();
  }
  connection.begin_close(monotonic_now() + kLinger);
  ++closing_;
  touch(key);
}

void IoThread::remove(Key key) {
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;
  if (found->second->is_closing()) --closing_;
  poller_.remove(found->second->fd());  // closing it would not do where a forked child has it too
  connections_.erase(found);
}

// --- effects ---

void IoThread::perform_now() {
  Nanos ignored = kNever;
  for (Effect& effect : shared_.take_effects(ignored, ignored)) perform(effect);
}

void IoThread::perform(const Hangup& effect) {
  const auto found = by_session_.find(effect.session);
  if (found == by_session_.end()) return;
  const Key key = found->second;
  by_session_.erase(found);
  close(key, effect.code, effect.text);
}

void IoThread::perform(Effect& effect) {
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

Connection* IoThread::find(SessionId session) {
  const auto found = by_session_.find(session);
  if (found == by_session_.end()) return nullptr;
  touch(found->second);
  return connections_.at(found->second).get();
}

void IoThread::perform(const SendMap& effect) {
  if (Connection* connection = find(effect.session)) connection->send_map(effect.pool, effect.lane);
}

void IoThread::perform(SendData& effect) {
  Connection* connection = find(effect.session);
  if (connection == nullptr) return;
  if (OwnMemory memory = shared_.find(effect.from)) connection->send_data(std::move(effect), std::move(memory));
}

void IoThread::perform(ReadBlocks& effect) {
  const TransferId id = effect.id;
  const uint64_t token = effect.token;
  const Lane lane = effect.lane;
  try {
    const OwnMemory memory = shared_.find(effect.to);
    if (!memory) throw Error(Code::internal, "a read into memory that is not there");
    if (memory.device && lane != Lane::Ucx) throw Error(Code::no_lane, "the reader's memory is on a device");
    if (memory.device && !effect.sums.empty()) throw Error(Code::no_lane, "checksums of memory on a device are taken by stream and unix alone");
    const Connection* connection = find(effect.session);
    if (connection == nullptr || connection->is_closing()) throw Error(Code::transport, "the session ended");
    reads_.add(open_read(std::move(effect), [&](uint32_t remote) { return connection->remote(remote, lane); }, memory));
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    reads_.report_stopped(id, token, error.code(), error.what());
  }
}

// After the effects that came with it: whoever reads the memory learns that its grant is revoked before it finds the memory gone.
void IoThread::withdraw(const std::vector<Withdrawn>& gone) {
  if (gone.empty()) return;
  for (auto& [key, connection] : connections_) {
    connection->withdraw(gone);
    touch(key);
  }
}

void IoThread::stop_reads(const TransferId& id) {
  for (auto& [_, connection] : connections_) connection->stop_landing(Code::cancelled, "the transfer is over", &id);
  reads_.stop(id);
}

bool IoThread::warm_some() {
  while (!warming_.empty()) {
    const std::shared_ptr<RemoteMemory> memory = warming_.front().lock();
    if (memory && memory->warm()) return true;
    warming_.pop_front();
  }
  return false;
}

// --- rounds ---

// `is_amid`: effects are yet to be performed. What is found broken is left for the flush after them, or those that the end of a
// session brings would overtake them.
void IoThread::flush_touched(bool is_amid) {
  std::vector<Key> touched = std::exchange(touched_, {});
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (const Key key : touched) {
    const auto found = connections_.find(key);
    if (found == connections_.end()) continue;
    try {
      found->second->flush(portion_);
      if (found->second->is_held()) held_.push_back(key);
      watch(key, *found->second);
    } catch (const Error& error) {
      if (error.code() == Code::internal) throw;
      if (is_amid) {
        touch(key);
        continue;
      }
      on_ready(key, EPOLLIN);  // what the peer said before it closed; the end of it is found there
      if (connections_.count(key) != 0) lose(key, error);
    }
  }
}

// What no frame followed: blocks that are not the last of their transfer.
void IoThread::let_go() {
  for (const Key key : std::exchange(held_, {})) {
    if (const auto found = connections_.find(key); found != connections_.end()) found->second->let_go();
  }
}

void IoThread::watch(Key key, Connection& connection) {
  const bool has_out = !connection.outbox().is_empty() && !connection.outbox().is_waiting();
  if (has_out && (full_ == 0 || connection.is_near())) full_ = key;
  const uint32_t interest = (connection.is_paused() ? 0u : static_cast<uint32_t>(EPOLLIN)) | (has_out ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  if (interest == connection.interest) return;
  connection.interest = interest;
  poller_.change(connection.fd(), interest, key);
}

void IoThread::tick_own(Nanos now) {
  if (now >= accept_again_at_) {
    accept_again_at_ = kNever;
    poller_.change(tcp_listener_.get(), EPOLLIN, kTcpKey);
    if (unix_listener_) poller_.change(unix_listener_.get(), EPOLLIN, kUnixKey);
  }
  std::vector<Key> late;
  for (const auto& [key, dialing] : dialing_) {
    if (now >= dialing.deadline) late.push_back(key);
  }
  for (const Key key : late) {
    const Dialing dialing = std::move(dialing_.at(key));
    dialing_.erase(key);
    poller_.remove(dialing.fd.get());
    dial_failed(dialing.peer, dialing.kind, Code::transport, "connecting took too long");
  }
  if (closing_ == 0) return;
  late.clear();
  for (const auto& [key, connection] : connections_) {
    if (connection->is_closing() && now >= connection->close_at()) late.push_back(key);
  }
  for (const Key key : late) remove(key);
}

Nanos IoThread::next_own_deadline() const {
  Nanos next = accept_again_at_;
  for (const auto& [_, dialing] : dialing_) next = std::min(next, dialing.deadline);
  if (closing_ == 0) return next;
  for (const auto& [_, connection] : connections_) {
    if (connection->is_closing()) next = std::min(next, connection->close_at());
  }
  return next;
}

void IoThread::close_all() {
  Nanos ignored = kNever;
  for (Effect& effect : shared_.take_effects(ignored, ignored)) {
    // With what a frame speaks of: a READY without its MAP would cost the reader the lane.
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

}  // namespace kvxfer
