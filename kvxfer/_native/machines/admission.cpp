#include "admission.hpp"

#include <algorithm>

#include "sha256.hpp"

namespace kvxfer {
namespace {

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
  return hmac_sha256(cluster_secret, "kvxfer session key v1" + std::min(a, b) + std::max(a, b));
}

std::optional<Bytes32> PeerAdmission::key_of(const AgentRef& self, const AgentRef& peer, const std::optional<Bytes32>& registered) const {
  switch (kind) {
    case Kind::RegisteredOnly: return registered;
    case Kind::BearerKey: return secret;
    case Kind::DerivedKeys: return registered ? registered : session_key(secret, self, peer);
  }
  return std::nullopt;
}

}  // namespace kvxfer
