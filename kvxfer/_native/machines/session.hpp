// One session: two proven agents on one connection. This file knows how a session comes up, and nothing of its later frames.
//
//   dialer                                acceptor
//   HELLO dial   {self, peer, nonce_d} ->
//                                      <- HELLO accept {self, peer, nonce_a, mac_a}
//   HELLO prove  {mac_d}               ->
//   up when mac_a is right                up when mac_d is right
//
// Both MACs are HMAC-SHA256 under the key of the pair (from the coordinator, over its authenticated channel), over a label of the
// sender's role, both nonces and both incarnations: a proof cannot be replayed, reflected, or used by another incarnation. A peer
// whose incarnation is not known here is refused: it may be older or newer than the one that the coordinator last reported. Peers
// that no coordinator named are admitted by the rule of admission.hpp, or refused.
#pragma once

#include <functional>
#include <optional>

#include "effects.hpp"

namespace kvxfer {

enum class SessionState : uint8_t { AwaitHello, AwaitAccept, AwaitProof, Up };

using KeyOf = std::function<std::optional<Bytes32>(const AgentRef&)>;  // nullopt: no such peer

class Handshake {
 public:
  // The dialer's side; its first frame is `dial_hello()`.
  Handshake(AgentRef self, AgentRef peer, const Bytes32& nonce);
  // The acceptor's side.
  Handshake(AgentRef self, const Bytes32& nonce);

  SessionState state() const { return state_; }
  const AgentRef& peer() const { return peer_; }
  Hello dial_hello() const { return Hello{HelloStep::Dial, self_, peer_, nonce_, {}}; }
  // Returns the answer to send, if any; throws Error(protocol, unauthenticated, peer_gone).
  std::optional<Hello> on_hello(const Hello& hello, const KeyOf& key_of);

 private:
  Bytes32 mac(const Bytes32& key, const char* label) const;

  bool is_dialer_;
  SessionState state_;
  AgentRef self_, peer_;
  Bytes32 nonce_{}, peer_nonce_{};
};

}  // namespace kvxfer
