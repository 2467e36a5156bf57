#include "io_thread.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>

#include "sockets.hpp"

namespace kvxfer {
namespace {

constexpr uint64_t kWakeKey = 0, kTcpKey = 1, kUnixKey = 2;
constexpr int kRoundsMax = 4;                   // of effects before sockets are looked at again
constexpr size_t kCopyBytesARound = 4 << 20;
constexpr size_t kCopySliceBytes = 2 << 20;     // between two looks at whether the blocks are still held
constexpr int kAcceptsARound = 64;
constexpr size_t kQueuedFrameBytesMax = 16 << 20;  // beside our own notifications
constexpr Nanos kLinger = 500 * kMillisecond;
constexpr Nanos kAcceptRest = 100 * kMillisecond;

Bytes32 random_nonce() {
  Bytes32 nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) throw Error(Code::internal, errno_text("getrandom"));
  return nonce;
}

}  // namespace

IoThread::IoThread(SharedEndpoint& shared, Statistics& statistics, EndpointLimits limits, Fd tcp_listener, Fd unix_listener)
    : shared_(shared), statistics_(statistics), limits_(limits), epoll_(::epoll_create1(EPOLL_CLOEXEC)), tcp_listener_(std::move(tcp_listener)),
      unix_listener_(std::move(unix_listener)) {
  if (!epoll_) fail_errno(Code::limit_exceeded, "epoll_create1");
  poll(EPOLL_CTL_ADD, shared_.wake_fd(), EPOLLIN, kWakeKey);
  poll(EPOLL_CTL_ADD, tcp_listener_.get(), EPOLLIN, kTcpKey);
  if (unix_listener_) poll(EPOLL_CTL_ADD, unix_listener_.get(), EPOLLIN, kUnixKey);
}

void IoThread::run() noexcept {
  std::string failure;
  try {
    loop();
    close_all();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  copies_.clear();
  connections_.clear();
  dialing_.clear();
  tcp_listener_.reset();
  unix_listener_.reset();
  if (failure.empty()) return;
  std::fprintf(stderr, "kvxfer: the native core failed: %s\n", failure.c_str());
  shared_.shut(failure);
}

void IoThread::loop() {
  Nanos tick_at = 0;
  while (!shared_.is_shut()) {
    const Nanos now = monotonic_now();
    tick_own(now);
    if (now >= tick_at) shared_.act_io([](Endpoint& endpoint, Nanos at, Effects& out) { endpoint.tick(at, out); });
    copy_some();
    flush_touched();
    bool is_quiet = false;
    Nanos until = kNever;
    for (int round = 0; round < kRoundsMax && !is_quiet; ++round) {
      until = next_own_deadline();
      std::deque<Effect> effects = shared_.take_effects(until, tick_at);
      is_quiet = effects.empty();
      for (Effect& effect : effects) perform(effect);
      flush_touched();
    }
    // A deadline that a tick has just left in the past must not make this loop spin.
    if (until <= now) until = now + kMillisecond;
    const bool is_busy = !is_quiet || !copies_.empty() || !touched_.empty();
    wait(is_busy || warm_some(), until);
  }
}

void IoThread::wait(bool must_return, Nanos until) {
  int timeout_ms = 0;
  if (!must_return) {
    const Nanos left = until == kNever ? kNever : until - monotonic_now();
    timeout_ms = until == kNever ? -1 : static_cast<int>(std::clamp<Nanos>((left + kMillisecond - 1) / kMillisecond, 0, 1'000'000));
  }
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, timeout_ms);
  statistics_.wakeups.add();
  if (count < 0 && errno != EINTR) throw Error(Code::internal, errno_text("epoll_wait"));
  for (int i = 0; i < count; ++i) on_ready(events[i].data.u64, events[i].events);
}

void IoThread::on_ready(Key key, uint32_t events) {
  if (key == kWakeKey) {
    eventfd_t ignored;
    ::eventfd_read(shared_.wake_fd(), &ignored);
    return;
  }
  if (key == kTcpKey) return accept(tcp_listener_, key, SessionKind::Tcp);
  if (key == kUnixKey) return accept(unix_listener_, key, SessionKind::Unix);
  if (dialing_.count(key) != 0) return finish_dial(key);
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;
  touch(key);
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) == 0) return;  // what can go out is flushed with the rest
  try {
    found->second->receive();
    while (const std::shared_ptr<Mapping> mapping = found->second->take_new_mapping()) warming_.push_back(mapping);
  } catch (const Error& error) {
    perform_now();  // its last frames may have said why it ends
    if (connections_.count(key) != 0) lose(key, error);
  }
}

void IoThread::poll(int operation, int fd, uint32_t events, Key key) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) throw Error(Code::internal, errno_text("epoll_ctl"));
}

// --- connections come and go ---

void IoThread::accept(Fd& listener, Key key, SessionKind kind) {
  for (int i = 0; i < kAcceptsARound; ++i) {
    Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        poll(EPOLL_CTL_MOD, listener.get(), 0, key);
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
  auto connection = std::make_unique<Connection>(std::move(fd), kind, shared_, statistics_);
  const Bytes32 nonce = random_nonce();
  connection->session = shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) {
    return dialed ? endpoint.dialed(*dialed, kind, nonce, now, out) : endpoint.accepted(kind, nonce, now, out);
  });
  connection->dialed = std::move(dialed);
  connection->interest = EPOLLIN;
  poll(EPOLL_CTL_ADD, connection->fd(), EPOLLIN, key);
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
    poll(EPOLL_CTL_ADD, fd.get(), EPOLLOUT, key);
    dialing_.emplace(key, Dialing{std::move(fd), dial.peer, dial.kind, monotonic_now() + limits_.handshake_ns});
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    dial_failed(dial.peer, dial.kind, error.code(), error.what());
  }
}

void IoThread::finish_dial(Key key) {
  Dialing dialing = std::move(dialing_.at(key));
  dialing_.erase(key);
  if (const int error = connect_error(dialing.fd.get()); error != 0) {
    return dial_failed(dialing.peer, dialing.kind, Code::transport, errno_text("cannot connect", error));
  }
  if (dialing.kind == SessionKind::Unix && !is_same_user(dialing.fd.get())) {
    return dial_failed(dialing.peer, dialing.kind, Code::unauthenticated, "the Unix socket belongs to another user's process");
  }
  poll(EPOLL_CTL_DEL, dialing.fd.get(), 0, key);
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
  }
  connection.begin_close(monotonic_now() + kLinger);
  ++closing_;
  touch(key);
}

void IoThread::remove(Key key) {
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;
  if (found->second->is_closing()) --closing_;
  connections_.erase(found);  // closing the descriptor takes it out of epoll
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
  if (auto* e = std::get_if<TransferFinal>(&effect)) return stop_reads(e->id);
  if (auto* e = std::get_if<SendFrame>(&effect)) {
    Connection* connection = find(e->session);
    if (connection == nullptr) return;
    connection->outbox().push(e->frame);
    const size_t queued_max = kQueuedFrameBytesMax + limits_.notifications_max * limits_.notification_bytes_max;
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
  const std::shared_ptr<const Pool> pool = shared_.pool(effect.pool);
  Connection* connection = find(effect.session);
  if (connection != nullptr && pool) connection->send_map(*pool);
}

void IoThread::perform(SendData& effect) {
  const std::shared_ptr<const Pool> pool = shared_.pool(effect.pool);
  Connection* connection = find(effect.session);
  if (connection != nullptr && pool) connection->outbox().push_data(std::move(effect), pool);
}

void IoThread::perform(ReadBlocks& effect) {
  const TransferId id = effect.id;
  const uint64_t token = effect.token;
  try {
    const std::shared_ptr<const Pool> pool = shared_.pool(effect.pool);
    if (!pool) throw Error(Code::internal, "a read into a pool that is not there");
    Connection* connection = find(effect.session);
    if (connection == nullptr) throw Error(Code::transport, "the session ended");
    const uint32_t remote = effect.remote_pool;
    copies_.push_back(std::make_unique<CopyJob>(std::move(effect), connection->mapping(remote), pool));
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_stopped(id, token, error.code(), error.what(), now, out); });
  }
}

void IoThread::stop_reads(const TransferId& id) {
  for (auto& [_, connection] : connections_) connection->stop_landing(Code::cancelled, "the transfer is over", &id);
  for (auto it = copies_.begin(); it != copies_.end();) {
    if ((*it)->id() != id) {
      ++it;
      continue;
    }
    stop_copy(**it, Code::cancelled, "the transfer is over");
    it = copies_.erase(it);
  }
}

void IoThread::stop_copy(const CopyJob& copy, Code code, const std::string& text) {
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_stopped(copy.id(), copy.token(), code, text, now, out); });
}

// A portion of the copies under way, each in its turn.
void IoThread::copy_some() {
  for (size_t left = kCopyBytesARound; left != 0 && !copies_.empty();) {
    std::unique_ptr<CopyJob> copy = std::move(copies_.front());
    copies_.pop_front();
    if (!shared_.may_land(copy->session(), copy->id(), copy->token())) {
      stop_copy(*copy, Code::cancelled, "the transfer is over");
      continue;
    }
    const size_t bytes = copy->copy(std::min(left, kCopySliceBytes));
    statistics_.bytes_mapped.add(bytes);
    left -= bytes;
    if (copy->is_done()) {
      shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_landed(copy->id(), copy->token(), now, out); });
    } else {
      copies_.push_back(std::move(copy));
    }
  }
}

bool IoThread::warm_some() {
  while (!warming_.empty()) {
    const std::shared_ptr<Mapping> mapping = warming_.front().lock();
    if (mapping && mapping->warm()) return true;
    warming_.pop_front();
  }
  return false;
}

// --- rounds ---

void IoThread::flush_touched() {
  std::vector<Key> touched = std::exchange(touched_, {});
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (const Key key : touched) {
    const auto found = connections_.find(key);
    if (found == connections_.end()) continue;
    try {
      found->second->flush();
      watch(key, *found->second);
    } catch (const Error& error) {
      if (error.code() == Code::internal) throw;
      on_ready(key, EPOLLIN);  // what the peer said before it closed; the end of it is found there
      if (connections_.count(key) != 0) lose(key, error);
    }
  }
}

void IoThread::watch(Key key, Connection& connection) {
  const uint32_t interest = EPOLLIN | (connection.outbox().is_empty() ? 0u : static_cast<uint32_t>(EPOLLOUT));
  if (interest == connection.interest) return;
  connection.interest = interest;
  poll(EPOLL_CTL_MOD, connection.fd(), interest, key);
}

void IoThread::tick_own(Nanos now) {
  if (now >= accept_again_at_) {
    accept_again_at_ = kNever;
    poll(EPOLL_CTL_MOD, tcp_listener_.get(), EPOLLIN, kTcpKey);
    if (unix_listener_) poll(EPOLL_CTL_MOD, unix_listener_.get(), EPOLLIN, kUnixKey);
  }
  std::vector<Key> late;
  for (const auto& [key, dialing] : dialing_) {
    if (now >= dialing.deadline) late.push_back(key);
  }
  for (const Key key : late) {
    const Dialing dialing = std::move(dialing_.at(key));
    dialing_.erase(key);
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
    if (std::holds_alternative<SendFrame>(effect) || std::holds_alternative<Hangup>(effect)) perform(effect);
  }
  for (auto& [_, connection] : connections_) {
    const SessionId session = connection->session;
    connection->begin_close(1);
    if (session != 0) shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.closed(session, now, out); });
    try {
      connection->flush();
    } catch (const Error&) {
      continue;
    }
  }
  for (const auto& copy : copies_) stop_copy(*copy, Code::closed, "the core is closed");
}

}  // namespace kvxfer
