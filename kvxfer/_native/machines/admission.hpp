// Which key a peer that dials us must prove, and whether the proof shows its name. The kinds of admission differ only here:
//
//   kind            a registered peer proves    any other peer proves               the proof shows the peer's name
//   RegisteredOnly  its own key                 nothing: it is refused              yes
//   BearerKey       the secret                  the secret, which our metadata has  no: every holder may use every name
//   DerivedKeys     its own key                 the session_key of the pair         yes
//
// A peer is registered by Endpoint::set_peer. Endpoint says what an admitted peer may do: see Endpoint::admit.
#pragma once

#include <optional>

#include "effects.hpp"

namespace kvxfer {

// The key of one pair of incarnations, derived from the cluster secret; the order of the two does not matter.
Bytes32 session_key(const Bytes32& cluster_secret, const AgentRef& one, const AgentRef& other);

struct PeerAdmission {
  enum class Kind : uint8_t { RegisteredOnly, BearerKey, DerivedKeys };

  Kind kind = Kind::RegisteredOnly;
  Bytes32 secret{};  // the bearer key, or the secret that keys are derived from

  // What `peer` must prove to `self`; nullopt: it is refused. `registered`: the key that the peer was registered with, if it was.
  std::optional<Bytes32> key_of(const AgentRef& self, const AgentRef& peer, const std::optional<Bytes32>& registered) const;
  bool proves_names() const { return kind != Kind::BearerKey; }
};

}  // namespace kvxfer
