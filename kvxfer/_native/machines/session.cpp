#include "session.hpp"

#include "sha256.hpp"

namespace kvxfer {

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
  return hmac_sha256(key, message);
}

std::optional<Hello> Handshake::on_hello(const Hello& hello, const KeyOf& key_of) {
  static const char* const kAcceptLabel = "kvxfer session accept v1\n";
  static const char* const kDialLabel = "kvxfer session dial v1\n";
  if (state_ == SessionState::Up) throw Error(Code::protocol, "HELLO in a session that is up");
  if (hello.peer != self_) {
    throw Error(Code::peer_gone, "this is " + self_.agent_id + " incarnation " + std::to_string(self_.number) + ", not the incarnation that was dialed");
  }
  if (state_ != SessionState::AwaitHello && hello.self != peer_) throw Error(Code::unauthenticated, "HELLO of another agent");
  const std::optional<Bytes32> key = key_of(hello.self);
  if (!key) throw Error(Code::unauthenticated, "agent " + printable(hello.self.agent_id) + " is not known here in that incarnation");

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
