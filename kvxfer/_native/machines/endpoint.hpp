// One agent's machines as one class: sessions, grants, transfers, notifications. It takes events from its shell and returns
// effects; it owns no socket, thread or clock. The production event loop and the simulator drive this same class.
//
// This class decides how the machines meet: which session carries which transfer, which peer may act on which grant, what a lost
// session or a dead peer means to each of them, and when to look again.
//
// Three files: endpoint.cpp (the owner's calls, operations, time), endpoint_sessions.cpp, endpoint_regions.cpp (what FETCH, PUSH
// and DONE mean here).
//
// A TCP session that carried nothing for a while may be dead without notice, because a NAT or a balancer on the path forgot it. So
// the first operation that uses it again probes it with a PING. If no byte comes back soon, the endpoint dials a second session,
// and closes the first one if the second is up first. If the peer is only slow, this costs one extra session until the next probe.
//
// Not thread-safe: the shell serialises calls.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>

#include "admission.hpp"
#include "grant.hpp"
#include "notifier.hpp"
#include "push.hpp"
#include "session.hpp"
#include "transfer.hpp"
#include "unacked_ends.hpp"

namespace kvxfer {

struct EndpointLimits {
  GrantLimits grants;
  TransferLimits transfers;
  size_t transfers_max = 65536;
  size_t finished_max = 65536;  // final states that transfer_state() still knows
  size_t sessions_max = 4096;
  size_t refusals_max = 64;  // refused requests of one session's peer; the last of them ends the session
  size_t notifications_max = 1024;
  size_t notification_bytes_max = 65536;
  size_t notification_queue_bytes_max = 64 << 20;  // waiting for one peer, with those of operations in progress
  size_t notification_piece_bytes = kNotifPieceMax;  // what goes in one frame
  Nanos handshake_ns = 1'500 * kMillisecond;
  uint32_t lanes = ~0u;  // that this agent reads by and serves: bit 1 << lane for each
  size_t stripes = 1;  // connections to one peer that its transfers may be spread over (stream, unix)
};

// What Endpoint::data_arrives decided: fill `to` under `token`, or (token 0) throw the payload away.
struct Landing {
  uint64_t token = 0;
  Extent to;
};

// A read or a write of registered memory. Element i of `remote` and of `local` have the same length.
struct PostSpec {
  TransferId id;
  AgentRef peer;
  ElementList local, remote;
  std::vector<Lane> lanes;  // allowed, best first
  Nanos deadline = kNever;
  uint64_t nonce_seed = 0;
  bool wants_checksums = false;
  std::optional<std::string> notification;  // to the peer's owner, once committed
};

struct RegionCounts {
  uint32_t region = 0;
  uint64_t bytes = 0;
  size_t grants = 0;     // reads by peers, and own pushes, under way
  size_t transfers = 0;  // own fetches and peers' pushes that may still write here
};

struct PoolCounts {
  uint32_t pool = 0;
  size_t blocks = 0, granted = 0, reserved = 0, quarantined = 0;
};

struct EndpointCounts {
  GrantCounts grants;
  std::vector<PoolCounts> pools;
  std::vector<RegionCounts> regions;
  size_t pulls_unknown = 0, pulls_queued = 0, pulls_granted = 0;  // own pulls that wait, by what their sources said of them
  size_t transfers_live = 0, transfers_draining = 0, sessions_up = 0, sessions_opening = 0, peers = 0, notifications_pending = 0;
};

class Endpoint {
 public:
  Endpoint(AgentRef self, EndpointLimits limits) : self_(std::move(self)), limits_(limits), grants_(limits.grants),
      notifier_(limits.notifications_max, limits.notification_bytes_max, limits.notification_queue_bytes_max, limits.notification_piece_bytes), offers_(limits.transfers_max, kOfferBytesMax) {}
  Endpoint(const Endpoint&) = delete;  // grants and transfers point into its pools
  Endpoint& operator=(const Endpoint&) = delete;

  const AgentRef& self() const { return self_; }

  // --- what the directory says ---
  // `control` is the kind of session dialed for notifications where none is up.
  void set_peer(const AgentRef& peer, const Bytes32& key, SessionKind control);
  // From now on peers that dial us prove what `admission` says, and an unregistered peer that does so is admitted. We reach it only
  // over sessions that it opened. We forget it (peer_dead) after the last one: at once, or, while it reads, writes or waits, when it
  // would itself have given this agent up. Our own posts to it end with its last session. All admitted peers together have the
  // quota of one peer. set_peer makes an admitted peer a registered one.
  // Where the proof does not show the peer's name, the peer can use any. On such a session PULL and RELEASE reach only grants of
  // regions that a FETCH or an own push made for that very name, and our operations and notifications for a registered peer never
  // use it: for those we dial, and the peer proves its own key. A transfer that a peer's PUSH asks for runs on the session that the
  // PUSH came by.
  // Throws Error(invalid_argument) if another kind was set before: a name that is claimed must not pass for a proven one.
  void admit(const PeerAdmission& admission);
  // Exactly this incarnation is known to be dead.
  void peer_dead(const AgentRef& peer, Nanos now, Effects& out);
  bool knows(const AgentRef& peer) const { return peers_.count(peer) != 0; }
  bool is_connected(const AgentRef& peer) const { return up_.count(peer) != 0; }

  // --- the owner's acts; each throws Error ---
  // `place`: where its blocks lie. Blocks that share bytes with those of another pool are busy while those are. Throws
  // invalid_argument for an id that is taken, blocks that share bytes with each other, and memory that is a region already.
  void add_pool(const PoolInfo& info, Place place = {});
  void set_digest(uint32_t pool, const Bytes32& digest);  // for pulls that are judged from now on
  void remove_pool(uint32_t pool);  // blocks_busy while anything is promised, reserved or quarantined
  void grant(const TransferId& id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns,
             uint32_t ready_blocks, Nanos now, Effects& out, const Bytes32& content_digest = {});
  void expect(const TransferId& id, const std::string& reader) { grants_.expect(id, reader); }
  void pulse(bool has_work, bool took_in, Nanos now) { grants_.pulse(has_work, took_in, now); }
  bool has_begun(const TransferId& id) const { return grants_.has_begun(id); }
  void abort_grant(const TransferId& id, Effects& out) { grants_.abort_grant(id, out); }
  // `checksums`: CRC-32C of the blocks that became ready by this call, or none.
  void ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete, Nanos now, Effects& out,
             const std::vector<uint32_t>& checksums = {});
  // The pool, and which of its blocks ready(id, blocks) would newly make ready; no blocks where the pool has no checksums.
  std::pair<uint32_t, std::vector<uint32_t>> becoming_ready(const TransferId& id, uint32_t blocks) const { return grants_.becoming_ready(id, blocks); }
  GrantState end_grant(const TransferId& id, GrantEvent event, Nanos now, Effects& out, const std::string& why = {});
  std::string bind_grant(const TransferId& id, const std::string& reader, Nanos now) { return grants_.bind(id, reader, now); }
  std::optional<GrantState> grant_state(const TransferId& id, Nanos now) const { return grants_.state(id, now); }
  bool is_granted(const TransferId& id, uint64_t serial, Nanos now) const { return grants_.is_alive(id, serial, now); }
  // `spec.blocks` may be empty where `spec.count` is not 0: then the pull asks whether its grant exists, and waits for reserve().
  void pull(uint32_t pool, TransferSpec spec, Nanos now, Effects& out);
  // Gives blocks to a pull that has none, for the grant's positions from `first` on. Throws Error(invalid_argument) if the pull has
  // blocks or is final; blocks_busy.
  void reserve(const TransferId& id, std::vector<uint32_t> blocks, uint32_t first, Nanos now, Effects& out);
  // Takes the blocks of a pull back while its grant is not known to exist; the pull then waits without them. Returns false, and
  // changes nothing, if the blocks are in use or the pull is final.
  bool unreserve(const TransferId& id, Nanos now, Effects& out);
  // Open-ended grants and offers; see RegionInfo. Regions may share bytes with each other: all that is said of a region holds for
  // each of its bytes at any time. Throws invalid_argument for an id that is or was taken, no bytes, and memory of a pool: a
  // region's bytes may change while a grant says that they do not. `base`: where it lies; 0: not known.
  void add_region(const RegionInfo& info, uint64_t base = 0);
  // Revokes every grant over the region, ends own pushes from it and peers' writes into it, and refuses new ones. Throws
  // blocks_busy while an own fetch may write there (and then changes nothing), and until peers' writes have drained (then the
  // region stays withdrawn, and the caller calls again).
  void remove_region(uint32_t region, Nanos now, Effects& out);
  // Whether the region was removed already, and remains only because something may still land in it.
  bool is_withdrawn(uint32_t region) const {
    const auto found = regions_.all().find(region);
    return found != regions_.all().end() && found->second.is_withdrawn;
  }
  // Reads the peer's elements into ours, or has the peer pull ours into its own. TransferFinal and TransferDrained report each.
  // Throws invalid_argument (lists of unequal length, an element outside its own region), peer_gone, limit_exceeded, no_lane.
  void fetch(PostSpec spec, Nanos now, Effects& out);
  void push(PostSpec spec, Nanos now, Effects& out);
  void cancel(const TransferId& id, Nanos now, Effects& out);  // of a pull, a fetch or a push
  // This agent will never pull `id` from `source`: tells the source, if it can be reached.
  void abort_pull(const TransferId& id, const AgentRef& source, Nanos now, Effects& out);
  std::optional<TransferState> transfer_state(const TransferId& id) const;
  uint64_t notify(const AgentRef& to, std::string payload, Nanos now, Effects& out);

  // --- what the shell reports ---
  // A connection that a Dial effect asked for is up; returns its session. `nonce`: 32 random bytes.
  SessionId dialed(const AgentRef& peer, SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out);
  void dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text, Nanos now, Effects& out);
  SessionId accepted(SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out);
  void closed(SessionId session, Nanos now, Effects& out, const std::string& why = {});  // `why`: for people
  void heard(SessionId session, Nanos now);  // bytes came, perhaps not yet a whole frame
  void on_frame(SessionId session, const Frame& frame, Nanos now, Effects& out);
  // The key that a session with this peer must prove, as the proof in HELLO does; none: the peer is not known in that incarnation.
  std::optional<Bytes32> key_for(SessionId session, const AgentRef& peer) const;
  // The shell cannot let the session go on: the peer gets an ERROR, and the session ends.
  void fail_session(SessionId session, Code code, const std::string& text, Nanos now, Effects& out);

  void data_sent(SessionId session, const TransferId& id, uint32_t attempt, uint32_t count, bool is_zero_copy, Nanos now, Effects& out,
                 uint64_t serial = 0);
  // The shell calls it also after the session ended; see GrantTable.
  void data_failed(const TransferId& id, uint64_t serial, Code code, const std::string& text, Nanos now, Effects& out) {
    grants_.data_failed(id, serial, code, text, now, out);
  }
  Landing data_arrives(SessionId session, const Data& data, Nanos now);
  bool is_landing(const TransferId& id, uint64_t token) const;
  // Whether a PUSH of this id counts as a repeat.
  bool has_met(const TransferId& id) const { return operations_.count(id) != 0 || offers_ended_.count(id) != 0; }
  void read_landed(const TransferId& id, uint64_t token, Nanos now, Effects& out);
  void read_stopped(const TransferId& id, uint64_t token, Code code, const std::string& text, Nanos now, Effects& out);

  void tick(Nanos now, Effects& out);
  Nanos next_deadline() const;
  EndpointCounts counts() const;

 private:
  static constexpr uint64_t kOfferBytesMax = 256ull << 20;  // of the lists of one peer's pushes

  struct KnownPeer {
    std::optional<Bytes32> key{};  // that it was registered with; an admitted peer has none
    SessionKind control = SessionKind::Tcp;
    Nanos leaves_at = kNever;  // of an admitted peer without a session: when it is forgotten
  };
  struct Session {
    SessionKind kind = SessionKind::Tcp;
    bool is_dialed = false;
    Handshake handshake;
    Nanos deadline = kNever;  // of the handshake
    Nanos heard_at = 0, pinged_at = 0;
    Nanos opened_at = 0, round_trip = 0;           // the handshake took no less than one
    Nanos probed_at = 0;                           // after idleness, and nothing was heard since; 0: it was not
    bool is_suspect = false;                       // the probe was not answered in time
    std::set<TransferId> operations;               // attached
    std::set<std::pair<uint32_t, Lane>> maps;      // the peer's pools and regions that its MAPs let us read, by lane
    bool is_name_proven = true;                    // false: the peer only claims its name
    UnackedEnds unacked_ends{};                    // RELEASE and REVOKE that were sent over it
    uint64_t refusals = 0;                         // requests of the peer that were refused
    bool is_up() const { return handshake.state() == SessionState::Up; }
  };
  struct OfferCharge {
    AgentRef to;
    uint64_t cost = 0;
  };
  struct EndedOffer {
    AgentRef from;
    Done done;
  };
  using Sessions = std::map<SessionId, Session>;
  using Operations = std::map<TransferId, std::unique_ptr<Operation>>;

  // sessions (endpoint_sessions.cpp)
  std::optional<Bytes32> key_of(const AgentRef& peer, Session& session) const;
  bool is_admitted(const AgentRef& peer) const;  // and not registered
  void on_admitted_gone(const AgentRef& peer, Nanos now, Effects& out);
  void keep(const AgentRef& peer);
  Nanos leave_at() const { return leaving_.empty() ? kNever : std::max(leaving_.begin()->first, next_leave_at_); }
  void forget_leaving(Nanos now, Effects& out);
  bool is_away(const AgentRef& peer) const { return is_admitted(peer) && !is_connected(peer); }
  bool carries_ours(const Session& session) const;
  bool carries(const Session& session, const Operation& operation) const;
  // An admitted peer can come back under any number of names, so all of them together have the quota of one peer.
  AgentRef charged_peer(const AgentRef& peer) const { return is_admitted(peer) ? AgentRef{} : peer; }
  SessionId open(Session session);
  SessionId find_up(const AgentRef& peer) const;  // that carries what is ours
  SessionId find_session(const AgentRef& peer, const Operation& operation, Effects& out);
  void dial(const AgentRef& peer, SessionKind kind, Effects& out);
  Nanos quiet_ns() const { return limits_.transfers.stall_ns / 4; }
  Nanos probe_at(const Session& session) const;
  void probe(SessionId id, Session& session, Nanos now, Effects& out);
  void judge_probes(Nanos now, Effects& out);
  void on_probe_late(SessionId id, Nanos now, Effects& out);
  void drop_suspects(SessionId fresh, const AgentRef& peer, SessionKind kind, Nanos now, Effects& out);
  static void hear(Session& session, Nanos now);
  void session_up(SessionId id, Session& session, Nanos now, Effects& out);
  void hang_up(SessionId id, Code code, const std::string& text, Nanos now, Effects& out);
  void remove(Sessions::iterator session);
  void on_proven(SessionId id, Session& session, const Frame& frame, Nanos now, Effects& out);
  void on_refusals(SessionId id, uint64_t count);
  void on_map(Session& session, const Map& map);
  static bool has_maps(const Session& session, const Operation& operation);

  // registered memory (endpoint_regions.cpp)
  bool serves(Lane lane) const { return (limits_.lanes >> static_cast<unsigned>(lane) & 1) != 0; }
  void drop_unserved(std::vector<Lane>& lanes) const;
  void check_post(const PostSpec& spec) const;
  void on_pull(SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out);
  void on_fetch(SessionId session, const AgentRef& peer, const Fetch& fetch, Nanos now, Effects& out);
  void on_push(SessionId session, const AgentRef& peer, const Push& push, Nanos now, Effects& out);
  void on_done(SessionId session, const AgentRef& peer, const Done& done, Nanos now, Effects& out);
  void on_revoke(SessionId session, const AgentRef& peer, const Revoke& revoke, Nanos now, Effects& out);
  void stop_reader(const PushOperation& push, Nanos now, Effects& out);
  void go_on_with(Operations::iterator offered, SessionId session, const Push& push, Nanos now, Effects& out);
  void take_offer(SessionId session, const AgentRef& peer, const Push& push, Nanos now, Effects& out);
  bool is_draining_into(const MemoryClaim& into, const AgentRef& peer) const;
  void end_offer(const Transfer& transfer, Effects& out);
  void remember(const TransferId& id, const AgentRef& charged, EndedOffer ended);
  std::optional<Error> refusal_of(Lane lane, SessionId session) const;
  bool may_read(SessionId session, const AgentRef& peer, const TransferId& id) const;
  void notify_ended(const Operation& operation, const std::optional<std::string>& notification, Nanos now, Effects& out);
  PushOperation* push_of(const AgentRef& peer, const TransferId& id);

  // operations
  Ledger& ledger(uint32_t pool);
  void check_place(const Place& place, const std::string& whose, bool is_region) const;
  void check_room(const TransferId& id, const AgentRef& peer) const;
  void forget(const AgentRef& peer, Nanos now, Effects& out);
  void end_operations(const AgentRef& peer, bool is_offered_too, Nanos now, Effects& out);
  void start(std::unique_ptr<Operation> operation, Nanos now, Effects& out);
  Transfer* transfer_of(SessionId session, const TransferId& id);
  Transfer* find_transfer(const TransferId& id) const;
  void attach(Operation& operation, SessionId session, Nanos now, Effects& out);
  void connect(Operation& operation, Nanos now, Effects& out);
  void follow_session(Operation& operation, Nanos now, Effects& out);
  void detach(Operation& operation);
  void wake(Operation& operation, Nanos at);
  void settle(Operations::iterator it, Nanos now, Effects& out);
  void finish(const Operation& operation, Nanos now, Effects& out);
  UnackedEnd unacked_end(const TransferId& id, Nanos now) const { return {id, now + limits_.grants.lifetime_max_ns, false}; }
  void send_end(const AgentRef& source, const UnackedEnd& end, Nanos now, Effects& out);
  void send_end_over(SessionId id, Session& session, const UnackedEnd& end, Nanos now, Effects& out);
  bool is_peer(const AgentRef& peer, const Operation& operation) const;

  AgentRef self_;
  EndpointLimits limits_;
  std::map<uint32_t, std::unique_ptr<Ledger>> pools_;
  std::map<uint32_t, Place> places_;  // of pools and regions
  Regions regions_;
  GrantTable grants_;
  Notifier notifier_;
  std::map<AgentRef, KnownPeer> peers_;
  PeerAdmission admission_;
  std::set<std::pair<Nanos, AgentRef>> leaving_;  // KnownPeer::leaves_at of those in peers_
  Nanos next_leave_at_ = 0;                       // no earlier is one of them forgotten

  Sessions sessions_;
  SessionId next_session_ = 1;
  std::map<AgentRef, std::vector<SessionId>> up_;  // oldest first
  std::set<SessionId> watched_;                    // sessions that time limits apply to: opening, or with operations attached
  size_t unproven_ = 0;                            // accepted sessions whose peer has not proved itself
  std::set<std::pair<AgentRef, SessionKind>> dialing_;
  std::map<AgentRef, UnackedEnds> unsent_ends_;  // to be sent when a session is up

  Operations operations_;
  std::set<std::pair<Nanos, TransferId>> wakes_;  // by time: when each of operations_ gets its next tick() (Operation::woken_at)
  std::map<TransferId, TransferState> finished_;
  std::deque<TransferId> finished_order_;

  // A push that a peer asked for is an offer here.
  PeerQuota offers_;
  std::map<TransferId, OfferCharge> offer_charges_;  // live
  std::set<TransferId> offers_draining_;           // final, and a read may still land
  std::map<TransferId, EndedOffer> offers_ended_;
  std::map<AgentRef, std::deque<TransferId>> offers_ended_order_;  // by the peer that is charged, oldest first
};

}  // namespace kvxfer
