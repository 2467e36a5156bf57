// What the bytes of a connection go through: nothing, or TLS. Both ends decide by their own settings, and say without TLS what they
// refuse. The dialer names both ends in its first message, so that the acceptor finds the secret of the pair; HELLO follows inside.
#include <sys/socket.h>

#include "connection.hpp"
#include "lanes/owner_memory.hpp"
#include "machines/sha256.hpp"

namespace kvxfer {
namespace {

constexpr const char* kLabel = "kvxfer stream tls v1\n";

// What the dialer calls itself and its peer. The frame encoding of a HELLO is canonical.
std::string identity_of(const AgentRef& dialer, const AgentRef& acceptor) { return encode(Hello{HelloStep::Dial, dialer, acceptor, {}, {}}); }

Bytes32 secret_from(const Bytes32& key, std::string_view identity) { return hmac_sha256(key, kLabel + std::string(identity)); }

}  // namespace

void Connection::begin() {
  if (kind_ != SessionKind::Tcp) return;
  if (!dialed) {
    wire_ = Wire::Accepted;
    return;
  }
  if (!tools_.encryption->is_wanted(is_near_to(*dialed))) return;
  try {
    const auto [self, key] = shared_.look([&](const Endpoint& endpoint) { return std::pair(endpoint.self(), endpoint.key_for(session, *dialed)); });
    if (!key) throw Error(Code::unauthenticated, "agent " + printable(dialed->agent_id) + " has no key here in that incarnation");
    std::string identity = identity_of(self, *dialed);
    const Bytes32 secret = secret_from(*key, identity);
    tls_ = std::make_unique<TlsChannel>(fd(), *tools_.encryption, tools_.tls, statistics_, std::move(identity), secret);
    wire_ = Wire::Dialed;
    outbox_.set_tls(tls_.get());
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    refuse(error);
  }
}

// Whether the peer runs under this kernel, by the addresses of the connection or by what is registered of the peer.
bool Connection::is_near_to(const AgentRef& peer) const {
  if (kind_ == SessionKind::Unix || is_local(fd())) return true;
  const std::optional<PeerAddress> address = shared_.address(peer);
  return address && !address->unix_path.empty();
}

// Looks at the first byte that the peer sends, without taking it. Returns whether to go on.
bool Connection::has_decided() {
  uint8_t first = 0;
  if (check_read(::recv(fd(), &first, 1, MSG_DONTWAIT | MSG_PEEK)) == 0) return false;
  const bool is_record = TlsChannel::begins_record(first);
  if (wire_ == Wire::Accepted) return decide(is_record);
  wire_ = is_record ? Wire::Tls : Wire::Refused;
  if (!is_record) {
    become_plain();
    outbox_.mute();
  }
  return true;
}

bool Connection::decide(bool is_record) {
  wire_ = Wire::Plain;
  try {
    if (is_record) {
      if (!tools_.encryption->is_possible()) throw Error(Code::no_lane, "the peer takes no encrypted sessions: see encrypt at both ends");
      tls_ = std::make_unique<TlsChannel>(fd(), *tools_.encryption, tools_.tls, statistics_, [this](std::string_view identity) { return secret_of(identity); });
      wire_ = Wire::Tls;
      outbox_.set_tls(tls_.get());
    }
    return true;
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    refuse(error);
    return false;
  }
}

// An error in the handshake is told to the peer and to the machines; a later one ends the connection.
ssize_t Connection::read_tls(const iovec* vectors, size_t count) {
  const bool was_up = tls_->is_up();
  try {
    return tls_->read(vectors, count);
  } catch (const Error& error) {
    if (was_up || error.code() == Code::internal) throw;
    refuse(error);
    errno = EAGAIN;
    return -1;
  }
}

void Connection::become_plain() {
  outbox_.set_tls(nullptr);
  tls_.reset();
}

Bytes32 Connection::secret_of(std::string_view identity) {
  Decoder decoder;
  decoder.feed(identity);
  const std::optional<Frame> frame = decoder.next();
  const Hello* const hello = frame ? std::get_if<Hello>(&*frame) : nullptr;
  if (hello == nullptr || decoder.buffered() != 0) throw Error(Code::protocol, "a TLS session begins with the names of both agents");
  const auto [self, key] = shared_.look([&](const Endpoint& endpoint) { return std::pair(endpoint.self(), endpoint.key_for(session, hello->self)); });
  if (hello->peer != self) {
    throw Error(Code::peer_gone, "this is " + self.agent_id + " incarnation " + std::to_string(self.number) + ", not the incarnation that was dialed");
  }
  if (!key) throw Error(Code::unauthenticated, "agent " + printable(hello->self.agent_id) + " is not known here in that incarnation");
  tls_peer_ = hello->self;
  return secret_from(*key, identity);
}

// Takes what must not reach the machines: an answer to our TLS without it, a HELLO of another agent than TLS proved, and a HELLO
// without TLS of an agent with which sessions must be encrypted.
bool Connection::is_refusal(const Frame& frame) {
  const auto* const hello = std::get_if<Hello>(&frame);
  if (!dialed && hello != nullptr) {
    if (wire_ == Wire::Tls && hello->self != tls_peer_) {
      refuse(Error(Code::unauthenticated, "HELLO of another agent than the one that TLS proved"));
      return true;
    }
    if (wire_ == Wire::Tls || !tools_.encryption->is_wanted(is_near_to(hello->self))) return false;
    refuse(Error(Code::no_lane, "the peer takes encrypted sessions only: see encrypt at both ends"));
    return true;
  }
  if (wire_ != Wire::Refused) return false;
  const auto* const error = std::get_if<ErrorFrame>(&frame);
  if (error != nullptr && error->code != Code::protocol) return false;
  refuse(Error(Code::no_lane, "the peer does not encrypt, and sessions with it must be encrypted"));
  return true;
}

// The session ends. A dialer has nothing to say without TLS; an acceptor says why, if it has not answered by TLS.
void Connection::refuse(const Error& error) {
  const bool is_silent = dialed || (tls_ && tls_->has_spoken());
  if (is_silent) outbox_.mute();
  if (tls_ && !is_silent) become_plain();
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.fail_session(session, error.code(), error.what(), now, out); });
}

// Foreign memory, which may be gone, is not decrypted in place.
size_t Connection::read_copied() {
  iovec vector{tools_.scratch.get(), static_cast<size_t>(std::min<uint64_t>(decoder_.payload_pending(), kScratchBytes))};
  const size_t got = check_read(tls_->read(&vector, 1));
  if (got == 0) return 0;
  decoder_.skip_payload(got);
  const size_t blocks = static_cast<size_t>(std::min<uint64_t>(got, landing_->left));
  std::string& trailer = landing_->trailer;
  try {
    land({reinterpret_cast<const char*>(tools_.scratch.get()), blocks});
    std::memcpy(trailer.data() + landing_->trailer_at, tools_.scratch.get() + blocks, got - blocks);
    landing_->trailer_at += got - blocks;
  } catch (const Error& error) {
    if (error.code() != Code::memory_gone) throw;
    stop_landing(error.code(), error.what());
  }
  statistics_.bytes_streamed_in.add(blocks);
  if (decoder_.payload_pending() == 0) finish_payload();
  return got;
}

}  // namespace kvxfer
