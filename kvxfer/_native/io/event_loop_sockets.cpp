// How connections of the event loop begin and end: accepted, dialed, lost, closed.
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>

#include "event_loop.hpp"
#include "sockets.hpp"

namespace kvxfer {
namespace {

constexpr int kAcceptsARound = 64;                 // more connections of a listener wait for the next round
constexpr Nanos kLinger = 500 * kMillisecond;
constexpr Nanos kDialMin = 500 * kMillisecond;     // hardly a round trip takes longer
constexpr Nanos kAcceptRest = 100 * kMillisecond;  // without free descriptors or memory a listener would be ready in every round

Bytes32 random_nonce() {
  Bytes32 nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) throw Error(Code::internal, errno_text("getrandom"));
  return nonce;
}

}  // namespace

void EventLoop::accept(Fd& listener, Key key, SessionKind kind) {
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

void EventLoop::open(Fd fd, SessionKind kind, std::optional<AgentRef> dialed) {
  if (kind == SessionKind::Tcp) {
    tune_tcp(fd.get());
  } else {
    enlarge_send_buffer(fd.get());
  }
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
  connection->begin();
  connections_.emplace(key, std::move(connection));
}

void EventLoop::start_dial(const Dial& dial) {
  statistics_.dials.add();
  try {
    const std::optional<PeerAddress> address = shared_.address(dial.peer);
    if (!address) throw Error(Code::peer_gone, "the peer is no longer known");
    if (dial.kind == SessionKind::Unix && address->unix_path.empty()) throw Error(Code::no_lane, "the peer has no Unix socket on this host");
    if (dial.kind == SessionKind::Tcp && address->tcp_port == 0) throw Error(Code::no_lane, "the peer has no TCP address");
    if (dial.kind == SessionKind::Memory) throw Error(Code::no_lane, "the memory lane only joins simulated agents");
    Fd fd = dial.kind == SessionKind::Unix ? dial_unix(address->unix_path) : dial_tcp(address->tcp_host, address->tcp_port);
    const Key key = next_key_++;
    poller_.add(fd.get(), EPOLLOUT, key);
    // The kernel repeats a lost SYN after one second at the earliest. An agent with a shorter patience dials anew before.
    const Nanos patience = std::min(limits_.handshake_ns, std::max(limits_.transfers.reconnect_ns / 2, kDialMin));
    dialing_.emplace(key, Dialing{std::move(fd), dial.peer, dial.kind, monotonic_now() + patience});
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    dial_failed(dial.peer, dial.kind, error.code(), error.what());
  }
}

void EventLoop::finish_dial(Key key) {
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

void EventLoop::dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text) {
  statistics_.dials_failed.add();
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.dial_failed(peer, kind, code, text, now, out); });
}

// The connection broke, or its peer broke the protocol: then the peer gets an ERROR, if it still listens.
void EventLoop::lose(Key key, const Error& error) {
  if (error.code() == Code::internal) throw error;
  Connection& connection = *connections_.at(key);
  if (connection.is_closing()) {  // we have hung up already
    if (error.code() == Code::transport) remove(key);
    return;
  }
  const SessionId session = connection.session;
  connection.stop_landing(error.code() == Code::transport ? Code::transport : Code::protocol, error.what());
  if (session != 0) {
    shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.closed(session, now, out, connection.is_tampered() ? error.what() : ""); });
    by_session_.erase(session);
  }
  if (error.code() == Code::transport) return remove(key);
  connection.outbox().push(ErrorFrame{{}, 0, error.code(), error.what()});
  close(key, error.code(), error.what());
}

// Sends queued frames first, then waits for the peer to hang up, at most kLinger.
void EventLoop::close(Key key, Code code, const std::string& text) {
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

void EventLoop::remove(Key key) {
  const auto found = connections_.find(key);
  if (found == connections_.end()) return;
  if (found->second->is_closing()) --closing_;
  poller_.remove(found->second->fd());  // close() does not, if a forked child has the descriptor too
  connections_.erase(found);
}

void EventLoop::tick_own(Nanos now) {
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

Nanos EventLoop::next_own_deadline() const {
  Nanos next = accept_again_at_;
  for (const auto& [_, dialing] : dialing_) next = std::min(next, dialing.deadline);
  if (closing_ == 0) return next;
  for (const auto& [_, connection] : connections_) {
    if (connection->is_closing()) next = std::min(next, connection->close_at());
  }
  return next;
}

}  // namespace kvxfer
