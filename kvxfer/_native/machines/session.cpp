#include "session.hpp"

#include <algorithm>

#include "sha256.hpp"

namespace kvxfer {
namespace {

std::string_view as_text(const Bytes32& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// An incarnation as bytes that no other incarnation has.
std::string canonical(const AgentRef& ref) {
  std::string out;
  const auto append = [&out](uint64_t value, int bytes) {
    for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 0xff);
  };
  append(ref.agent_id.size(), 2);
  out += ref.agent_id;
  append(ref.number, 8);
  out.append(reinterpret_cast<const char*>(ref.boot_nonce.data()), ref.boot_nonce.size());
  return out;
}

}  // namespace

// kvxfer.protocol.handshake has the same in Python.
Bytes32 session_key(const Bytes32& cluster_secret, const AgentRef& one, const AgentRef& other) {
  const std::string a = canonical(one), b = canonical(other);
  return hmac_sha256(as_text(cluster_secret), "kvxfer session key v1" + std::min(a, b) + std::max(a, b));
}

Handshake::Handshake(AgentRef self, AgentRef peer, const Bytes32& nonce)
    : is_dialer_(true), state_(SessionState::AwaitAccept), self_(std::move(self)), peer_(std::move(peer)), nonce_(nonce) {}

Handshake::Handshake(AgentRef self, const Bytes32& nonce)
    : is_dialer_(false), state_(SessionState::AwaitHello), self_(std::move(self)), nonce_(nonce) {}

// The frame encoding of a HELLO is canonical, so it serves as the encoding of what is signed.
Bytes32 Handshake::mac(const Bytes32& key, const char* label) const {
  const AgentRef& dialer = is_dialer_ ? self_ : peer_;
  const AgentRef& acceptor = is_dialer_ ? peer_ : self_;
  const Bytes32& dial_nonce = is_dialer_ ? nonce_ : peer_nonce_;
  const Bytes32& accept_nonce = is_dialer_ ? peer_nonce_ : nonce_;
  std::string message = label;
  message += encode(Hello{HelloStep::Dial, dialer, acceptor, dial_nonce, accept_nonce});
  return hmac_sha256(as_text(key), message);
}

std::optional<Hello> Handshake::on_hello(const Hello& hello, const KeyOf& key_of) {
  static const char* const kAcceptLabel = "kvxfer session accept v1\n";
  static const char* const kDialLabel = "kvxfer session dial v1\n";
  if (state_ == SessionState::Up) throw Error(Code::protocol, "HELLO in a session that is up");
  if (hello.peer != self_) {
    throw Error(Code::peer_gone, "this is " + self_.agent_id + " incarnation " + std::to_string(self_.number) + ", not the incarnation that was dialed");
  }
  if (state_ != SessionState::AwaitHello && hello.self != peer_) throw Error(Code::unauthenticated, "HELLO of another agent");
  const Bytes32* key = key_of(hello.self);
  if (key == nullptr) throw Error(Code::unauthenticated, "agent " + printable(hello.self.agent_id) + " is not known here in that incarnation");

  if (state_ == SessionState::AwaitHello) {
    if (hello.step != HelloStep::Dial) throw Error(Code::protocol, "a session begins with HELLO dial");
    peer_ = hello.self;
    peer_nonce_ = hello.nonce;
    state_ = SessionState::AwaitProof;
    return Hello{HelloStep::Accept, self_, peer_, nonce_, mac(*key, kAcceptLabel)};
  }
  if (state_ == SessionState::AwaitAccept) {
    if (hello.step != HelloStep::Accept) throw Error(Code::protocol, "expected HELLO accept");
    peer_nonce_ = hello.nonce;
    if (!is_equal_constant_time(hello.mac, mac(*key, kAcceptLabel))) throw Error(Code::unauthenticated, "the session proof is wrong");
    state_ = SessionState::Up;
    return Hello{HelloStep::Prove, self_, peer_, {}, mac(*key, kDialLabel)};
  }
  if (hello.step != HelloStep::Prove) throw Error(Code::protocol, "expected HELLO prove");
  if (!is_equal_constant_time(hello.mac, mac(*key, kDialLabel))) throw Error(Code::unauthenticated, "the session proof is wrong");
  state_ = SessionState::Up;
  return std::nullopt;
}

}  // namespace kvxfer
