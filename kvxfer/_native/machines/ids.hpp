// Names of things: transfers, agents, sessions. Values only.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>

namespace kvxfer {

// Time is an argument of every machine: nanoseconds of one monotonic clock, never compared across hosts.
using Nanos = int64_t;
constexpr Nanos kNever = INT64_MAX;
constexpr Nanos kMillisecond = 1'000'000;

using SessionId = uint64_t;  // local to one endpoint, never reused; 0 is no session
using Bytes16 = std::array<uint8_t, 16>;
using Bytes32 = std::array<uint8_t, 32>;

struct TransferId {
  Bytes16 raw{};
  bool operator==(const TransferId& other) const { return raw == other.raw; }
  bool operator!=(const TransferId& other) const { return raw != other.raw; }
  bool operator<(const TransferId& other) const { return raw < other.raw; }
};

struct TransferIdHash {
  size_t operator()(const TransferId& id) const {
    size_t value;
    std::memcpy(&value, id.raw.data(), sizeof value);  // the id is random: any eight bytes of it are a hash
    return value;
  }
};

// One incarnation of one agent. Equality of the whole pair is the only comparison that protocols make.
struct AgentRef {
  std::string agent_id;
  uint64_t number = 0;
  Bytes16 boot_nonce{};
  bool operator==(const AgentRef& o) const {
    return number == o.number && boot_nonce == o.boot_nonce && agent_id == o.agent_id;
  }
  bool operator!=(const AgentRef& o) const { return !(*this == o); }
  bool operator<(const AgentRef& o) const {
    return std::tie(agent_id, number, boot_nonce) < std::tie(o.agent_id, o.number, o.boot_nonce);
  }
};

enum class Lane : uint8_t { Mapped = 1, Stream = 2, Memory = 3, Cma = 4, Ucx = 5, Unix = 6 };
constexpr uint8_t kLaneMax = 6;

// Which kind of connection a session runs on; a lane needs one kind.
enum class SessionKind : uint8_t { Tcp = 1, Unix = 2, Memory = 3 };

inline SessionKind session_kind(Lane lane) {
  switch (lane) {
    case Lane::Mapped:
    case Lane::Cma:
    case Lane::Unix: return SessionKind::Unix;
    case Lane::Memory: return SessionKind::Memory;
    case Lane::Stream:
    case Lane::Ucx: return SessionKind::Tcp;
  }
  return SessionKind::Tcp;
}

// On a one-sided lane the reader reads by itself and then asks for the verdict. On `stream`, and on `unix` (the same over a Unix
// socket), the source sends, and the verdict is a trailer unless bytes were sent zero-copy.
inline bool is_one_sided(Lane lane) { return lane != Lane::Stream && lane != Lane::Unix; }

// Lanes whose reader needs a MAP of the source's memory first.
inline bool needs_map(Lane lane) { return lane == Lane::Mapped || lane == Lane::Cma || lane == Lane::Ucx; }

}  // namespace kvxfer
