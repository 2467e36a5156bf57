// One agent's machines behind one door: sessions, grants, transfers, notifications. Takes events from its shell, returns
// effects; owns no socket, thread or clock. Production's IO thread and the simulator drive this same class.
//
// What lives here and not in the parts is only how they meet: which session carries which transfer, who may speak of
// which grant, what a lost session or a dead peer means to each of them, and when to look again.
//
// Not thread-safe: the shell serialises calls.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "grant.hpp"
#include "notifier.hpp"
#include "session.hpp"
#include "transfer.hpp"

namespace kvxfer {

struct EndpointLimits {
  GrantLimits grants;
  TransferLimits transfers;
  size_t transfers_max = 65536;
  size_t finished_max = 65536;  // final states that can still be asked for
  size_t sessions_max = 4096;
  size_t notifications_max = 1024;
  size_t notification_bytes_max = 65536;
  Nanos handshake_ns = 1'500 * kMillisecond;
};

// What Endpoint::data_arrives decided: fill `blocks` of `pool` under `token`, or (token 0) throw the payload away.
struct Landing {
  uint64_t token = 0;
  uint32_t pool = 0;
  std::vector<uint32_t> blocks;
};

struct PoolCounts {
  uint32_t pool = 0;
  size_t blocks = 0, granted = 0, reserved = 0, quarantined = 0;
};

struct EndpointCounts {
  GrantCounts grants;
  std::vector<PoolCounts> pools;
  size_t transfers_live = 0, transfers_draining = 0, sessions_up = 0, sessions_opening = 0, peers = 0, notifications_pending = 0;
};

class Endpoint {
 public:
  Endpoint(AgentRef self, EndpointLimits limits) : self_(std::move(self)), limits_(limits), grants_(limits.grants),
      notifier_(limits.notifications_max, limits.notification_bytes_max) {}
  Endpoint(const Endpoint&) = delete;  // grants and transfers point into its pools
  Endpoint& operator=(const Endpoint&) = delete;

  const AgentRef& self() const { return self_; }

  // --- what the directory says ---
  // `control` is the kind of session dialed for notifications where none is up.
  void set_peer(const AgentRef& peer, const Bytes32& key, SessionKind control);
  // The known death of exactly this life.
  void peer_dead(const AgentRef& peer, Nanos now, Effects& out);
  bool knows(const AgentRef& peer) const { return peers_.count(peer) != 0; }

  // --- the owner's acts; each throws Error ---
  void add_pool(const PoolInfo& info);
  void remove_pool(uint32_t pool);  // blocks_busy while anything is promised, reserved or quarantined
  void grant(const TransferId& id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns,
             uint32_t ready_blocks, Nanos now, Effects& out, const Bytes32& content = {});
  void decline(const TransferId& id, Effects& out) { grants_.decline(id, out); }
  void ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete, Nanos now, Effects& out);
  GrantState end_grant(const TransferId& id, GrantEvent event, Nanos now, Effects& out);
  std::optional<GrantState> grant_state(const TransferId& id, Nanos now) const { return grants_.state(id, now); }
  void pull(uint32_t pool, TransferSpec spec, Nanos now, Effects& out);
  void cancel(const TransferId& id, Nanos now, Effects& out);
  // This agent will never pull `id` from `source`: lets the source know, where it can be reached.
  void give_up(const TransferId& id, const AgentRef& source, Effects& out);
  std::optional<TransferState> transfer_state(const TransferId& id) const;
  uint64_t notify(const AgentRef& to, std::string payload, Nanos now, Effects& out);

  // --- what the shell did ---
  // A connection that a Dial effect asked for is up; returns its session. `nonce`: 32 random bytes.
  SessionId dialed(const AgentRef& peer, SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out);
  void dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text, Nanos now, Effects& out);
  SessionId accepted(SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out);
  void closed(SessionId session, Nanos now, Effects& out);
  void heard(SessionId session, Nanos now);  // bytes came, a whole frame perhaps not yet
  void on_frame(SessionId session, const Frame& frame, Nanos now, Effects& out);

  void data_sent(SessionId session, const TransferId& id, uint32_t attempt, uint32_t count, Nanos now, Effects& out);
  Landing data_arrives(SessionId session, const Data& data, Nanos now);
  bool is_landing(const TransferId& id, uint64_t token) const;
  void read_landed(const TransferId& id, uint64_t token, Nanos now, Effects& out);
  void read_stopped(const TransferId& id, uint64_t token, Code code, const std::string& text, Nanos now, Effects& out);

  void tick(Nanos now, Effects& out);
  Nanos next_deadline() const;
  EndpointCounts counts() const;

 private:
  struct Peer {
    Bytes32 key{};
    SessionKind control = SessionKind::Tcp;
  };
  struct Session {
    SessionKind kind = SessionKind::Tcp;
    bool is_dialed = false;
    Handshake handshake;
    Nanos deadline = kNever;  // of the handshake
    Nanos heard_at = 0, pinged_at = 0;
    std::set<TransferId> transfers;  // attached
    bool is_up() const { return handshake.state() == SessionState::Up; }
  };
  using Transfers = std::map<TransferId, Transfer>;

  Ledger& ledger(uint32_t pool);
  SessionId find_up(const AgentRef& peer, std::optional<SessionKind> kind) const;
  void dial(const AgentRef& peer, SessionKind kind, Effects& out);
  void session_up(SessionId id, Session& session, Nanos now, Effects& out);
  void hang_up(SessionId id, Code code, const std::string& text, Nanos now, Effects& out);
  void on_proven(SessionId id, Session& session, const Frame& frame, Nanos now, Effects& out);
  Transfer* transfer_of(SessionId session, const TransferId& id);
  static void attach(Session& session, const Transfer& transfer, Nanos now);
  void connect(Transfer& transfer, Nanos now, Effects& out);
  void settle(Transfers::iterator it, Nanos now, Effects& out);
  void tell_given_up(const TransferId& id, const AgentRef& source, Effects& out);
  bool is_source(const AgentRef& peer, const Transfer& transfer) const;

  AgentRef self_;
  EndpointLimits limits_;
  GrantTable grants_;
  Notifier notifier_;
  std::map<uint32_t, std::unique_ptr<Ledger>> pools_;
  std::map<AgentRef, Peer> peers_;
  std::map<SessionId, Session> sessions_;
  SessionId next_session_ = 1;
  std::set<std::pair<AgentRef, SessionKind>> dialing_;
  std::map<AgentRef, std::vector<TransferId>> given_up_;  // ended while their session was being dialed: release when it is up
  Transfers transfers_;
  std::set<std::pair<Nanos, TransferId>> wakes_;
  std::map<TransferId, Nanos> wake_of_;
  std::map<TransferId, TransferState> finished_;
  std::deque<TransferId> finished_order_;
};

}  // namespace kvxfer
