// How the endpoint's sessions open, end and carry operations.
#include <algorithm>

#include "endpoint.hpp"

namespace kvxfer {
namespace {

constexpr size_t kMapsMax = 16384;  // maps that one peer gave over one session
constexpr size_t kForgottenAtOnce = 16;  // admitted peers
constexpr Nanos kProbeRoundTrips = 4;

}  // namespace

void Endpoint::admit(const PeerAdmission& admission) {
  if (admission_.kind != PeerAdmission::Kind::RegisteredOnly && admission_.kind != admission.kind) {
    throw Error(Code::invalid_argument, "peers are admitted by a bearer key or by derived keys, never by both");
  }
  admission_ = admission;
}

std::optional<Bytes32> Endpoint::key_of(const AgentRef& peer, Session& session) const {
  if (peer == self_) return std::nullopt;
  const auto known = peers_.find(peer);
  const std::optional<Bytes32> registered = known != peers_.end() ? known->second.key : std::nullopt;
  if (session.is_dialed) return registered;
  session.is_name_proven = admission_.proves_names();
  return admission_.key_of(self_, peer, registered);
}

std::optional<Bytes32> Endpoint::key_for(SessionId session, const AgentRef& peer) const {
  const auto found = sessions_.find(session);
  const auto known = peers_.find(peer);
  if (found == sessions_.end() || peer == self_) return std::nullopt;
  const std::optional<Bytes32> registered = known != peers_.end() ? known->second.key : std::nullopt;
  return found->second.is_dialed ? registered : admission_.key_of(self_, peer, registered);
}

bool Endpoint::is_admitted(const AgentRef& peer) const {
  const auto it = peers_.find(peer);
  return it != peers_.end() && !it->second.key;
}

// The last session of an admitted peer ended. A lost session alone ends no grant and no offer: the peer may come back and prove by
// the transfer id that it is the same peer. Our own posts to it end, because the next peer to use its name would receive them.
void Endpoint::on_admitted_gone(const AgentRef& peer, Nanos now, Effects& out) {
  end_operations(peer, false, now, out);
  unsent_ends_.erase(peer);
  notifier_.peer_dead(peer, out);
  const bool writes = std::any_of(operations_.begin(), operations_.end(), [&](const auto& operation) { return operation.second->peer() == peer; });
  if (!writes && !grants_.has_reader(peer)) return forget(peer, now, out);
  const TransferLimits& limits = limits_.transfers;
  const Nanos leaves_at = now + std::max(2 * limits.stall_ns + limits.reconnect_ns, limits_.grants.ttl_ns);
  peers_.at(peer).leaves_at = leaves_at;
  leaving_.emplace(leaves_at, peer);
  // A peer that invents thousands of names, each with a transfer in progress, evicts the names that left first.
  if (leaving_.size() > quota_of_one(limits_.sessions_max)) forget(AgentRef(leaving_.begin()->second), now, out);
}

// Cancels the removal of an admitted peer: it came back, was registered, or is forgotten by other means.
void Endpoint::keep(const AgentRef& peer) {
  const auto known = peers_.find(peer);
  if (known == peers_.end() || known->second.leaves_at == kNever) return;
  leaving_.erase({known->second.leaves_at, peer});
  known->second.leaves_at = kNever;
}

// Each forget() scans all transfers and grants, so one tick forgets only a few.
void Endpoint::forget_leaving(Nanos now, Effects& out) {
  if (now < leave_at()) return;
  for (size_t n = 0; n < kForgottenAtOnce && !leaving_.empty() && leaving_.begin()->first <= now; ++n) {
    forget(AgentRef(leaving_.begin()->second), now, out);
  }
  next_leave_at_ = now + kMillisecond;
}

// Whether operations and notifications of this agent's owner may use the session: for a registered peer only a session on which it proved
// its name, for an admitted peer any session.
bool Endpoint::carries_ours(const Session& session) const { return session.is_name_proven || is_admitted(session.handshake.peer()); }

// A peer's push runs on a session that its PUSH came by: the id is what shows that it is the same peer that came again.
bool Endpoint::carries(const Session& session, const Operation& operation) const {
  return operation.is_offered() ? session.is_name_proven : carries_ours(session);
}

SessionId Endpoint::find_up(const AgentRef& peer) const {
  const auto found = up_.find(peer);
  if (found == up_.end()) return 0;
  for (const SessionId id : found->second) {
    if (carries_ours(sessions_.at(id))) return id;
  }
  return 0;
}

// The session to put an operation of this lane on. Where the source sends the bytes, they are spread over several sessions: this
// returns the least used one, and dials another where none is idle.
SessionId Endpoint::find_session(const AgentRef& peer, const Operation& operation, Effects& out) {
  const SessionKind kind = session_kind(operation.lane());
  if (const auto asked = sessions_.find(operation.asked_on); asked != sessions_.end() && asked->second.kind == kind) return operation.asked_on;
  const auto found = up_.find(peer);
  if (found == up_.end()) return 0;
  SessionId best = 0;
  size_t least = 0, count = dialing_.count({peer, kind});
  for (const SessionId id : found->second) {
    const Session& session = sessions_.at(id);
    if (session.kind != kind || !carries(session, operation)) continue;
    if (is_one_sided(operation.lane())) return id;
    ++count;
    if (best == 0 || session.operations.size() < least) {
      best = id;
      least = session.operations.size();
    }
  }
  if (best != 0 && least != 0 && count < limits_.stripes && !operation.is_offered()) dial(peer, kind, out);
  return best;
}

void Endpoint::dial(const AgentRef& peer, SessionKind kind, Effects& out) {
  if (!is_admitted(peer) && dialing_.insert({peer, kind}).second) out.push_back(Dial{peer, kind});
}

// The time at which the probe of this session counts as unanswered.
Nanos Endpoint::probe_at(const Session& session) const {
  if (session.probed_at == 0 || session.is_suspect) return kNever;
  return session.probed_at + std::min(std::max(limits_.transfers.stall_ns / 5, kProbeRoundTrips * session.round_trip), limits_.transfers.stall_ns);
}

// Called when something starts to wait for this session: after idleness a PING tests it. Only TCP sessions are tested, because
// nothing between two processes of one host drops idle connections.
void Endpoint::probe(SessionId id, Session& session, Nanos now, Effects& out) {
  if (session.kind != SessionKind::Tcp || session.probed_at != 0 || now - session.heard_at < quiet_ns()) return;
  session.heard_at = now;
  session.pinged_at = 0;
  session.probed_at = now;
  watched_.insert(id);
  out.push_back(SendFrame{id, Ping{PingKind::Ask, static_cast<uint64_t>(now)}});
}

// Operations that wait on a session with a late probe move to another session. That one may be late as well, because no operation
// waited for it until then.
void Endpoint::judge_probes(Nanos now, Effects& out) {
  const auto is_late = [&](SessionId id) {
    const Session& session = sessions_.at(id);
    return session.is_up() && now >= probe_at(session);
  };
  for (auto late = watched_.begin(); (late = std::find_if(watched_.begin(), watched_.end(), is_late)) != watched_.end();) {
    on_probe_late(*late, now, out);  // marks it suspect, or hangs it up
  }
}

void Endpoint::on_probe_late(SessionId id, Nanos now, Effects& out) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  session.is_suspect = true;
  const AgentRef peer = session.handshake.peer();
  const SessionKind kind = session.kind;
  for (const SessionId other : up_.at(peer)) {
    const Session& beside = sessions_.at(other);
    if (other != id && beside.kind == kind && !beside.is_suspect && carries_ours(beside)) {
      return hang_up(id, Code::transport, "an idle session answered nothing", now, out);
    }
  }
  if (knows(peer)) dial(peer, kind, out);
}

// A fresh session is up, so suspect ones, which did not answer their probe, are closed.
void Endpoint::drop_suspects(SessionId fresh, const AgentRef& peer, SessionKind kind, Nanos now, Effects& out) {
  std::vector<SessionId> dropped;
  for (const SessionId id : up_.at(peer)) {
    const Session& session = sessions_.at(id);
    if (id != fresh && session.kind == kind && session.is_suspect) dropped.push_back(id);
  }
  for (const SessionId id : dropped) hang_up(id, Code::transport, "an idle session answered nothing", now, out);
}

void Endpoint::hear(Session& session, Nanos now) {
  session.heard_at = now;
  session.probed_at = 0;
  session.is_suspect = false;
}

SessionId Endpoint::open(Session session) {
  const SessionId id = next_session_++;
  if (!session.is_dialed) ++unproven_;
  sessions_.emplace(id, std::move(session));
  watched_.insert(id);
  return id;
}

SessionId Endpoint::dialed(const AgentRef& peer, SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out) {
  const SessionId id = open(Session{kind, true, Handshake(self_, peer, nonce), now + limits_.handshake_ns, now, 0, now});
  out.push_back(SendFrame{id, sessions_.at(id).handshake.dial_hello()});
  return id;
}

SessionId Endpoint::accepted(SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out) {
  const SessionId id = open(Session{kind, false, Handshake(self_, nonce), now + limits_.handshake_ns, now, 0, now});
  if (sessions_.size() > limits_.sessions_max || unproven_ > quota_of_one(limits_.sessions_max)) {
    // Closes the oldest session without a proof, perhaps this one: a peer that only holds connections open keeps no other peer out.
    const auto oldest = std::find_if(watched_.begin(), watched_.end(), [this](SessionId each) {
      const Session& session = sessions_.at(each);
      return !session.is_dialed && !session.is_up();
    });
    hang_up(*oldest, Code::overloaded, "sessions_max is reached", now, out);
  }
  return id;
}

void Endpoint::dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text, Nanos now, Effects& out) {
  dialing_.erase({peer, kind});
  for (auto it = operations_.begin(); it != operations_.end();) {
    const auto current = it++;
    Operation& operation = *current->second;
    if (operation.is_offered() || !operation.can_attach() || !is_peer(peer, operation) || session_kind(operation.lane()) != kind) continue;
    operation.dial_failed(code, text, now, out);
    settle(current, now, out);
  }
  notifier_.postpone(peer, now);
}

// Removes the session from all tables; what was attached is still in session->second.operations.
void Endpoint::remove(Sessions::iterator found) {
  const Session& session = found->second;
  if (!session.is_dialed && !session.is_up()) --unproven_;
  if (const auto up = up_.find(session.handshake.peer()); up != up_.end()) {
    up->second.erase(std::remove(up->second.begin(), up->second.end(), found->first), up->second.end());
    if (up->second.empty()) up_.erase(up);
  }
  watched_.erase(found->first);
  sessions_.erase(found);
}

void Endpoint::closed(SessionId id, Nanos now, Effects& out, const std::string& why) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const bool is_up = found->second.is_up(), is_dialed = found->second.is_dialed;
  const AgentRef peer = found->second.handshake.peer();
  const SessionKind kind = found->second.kind;
  const std::set<TransferId> operations = std::move(found->second.operations);
  UnackedEnds unacked_ends = std::move(found->second.unacked_ends);
  remove(found);
  if (!is_up) {
    if (is_dialed) dial_failed(peer, kind, Code::transport, "the connection closed in the handshake", now, out);
    return;
  }
  grants_.session_closed(id, now);
  for (const TransferId& operation : operations) {
    const auto it = operations_.find(operation);
    if (it != operations_.end() && it->second->session() == id) it->second->session_lost(now, why);
  }
  if (is_away(peer)) on_admitted_gone(peer, now, out);
  for (const UnackedEnd& again : unacked_ends.take()) send_end(peer, again, now, out);
  for (const TransferId& operation : operations) {
    const auto it = operations_.find(operation);
    if (it != operations_.end() && it->second->session() == 0) settle(it, now, out);
  }
}

void Endpoint::hang_up(SessionId id, Code code, const std::string& text, Nanos now, Effects& out) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  out.push_back(Hangup{id, code, text});
  if (!found->second.is_dialed || found->second.is_up()) return closed(id, now, out);
  const AgentRef peer = found->second.handshake.peer();
  const SessionKind kind = found->second.kind;
  remove(found);
  dial_failed(peer, kind, code, text, now, out);
}

void Endpoint::fail_session(SessionId id, Code code, const std::string& text, Nanos now, Effects& out) {
  out.push_back(SendFrame{id, ErrorFrame{{}, 0, code, text}});
  hang_up(id, code, text, now, out);
}

void Endpoint::heard(SessionId session, Nanos now) {
  if (const auto found = sessions_.find(session); found != sessions_.end()) hear(found->second, now);
}

void Endpoint::session_up(SessionId id, Session& session, Nanos now, Effects& out) {
  session.deadline = kNever;
  session.round_trip = now - session.opened_at;
  const AgentRef peer = session.handshake.peer();
  const SessionKind kind = session.kind;
  if (session.is_dialed) {
    dialing_.erase({peer, kind});
  } else {
    --unproven_;
    const auto up = up_.find(peer);
    if (up != up_.end() && up->second.size() >= quota_of_one(limits_.sessions_max)) {
      throw Error(Code::overloaded, "this peer has used its quota of sessions_max");
    }
  }
  keep(peer);
  notifier_.peer_alive(peer);
  peers_.try_emplace(peer, KnownPeer{std::nullopt, kind});
  up_[peer].push_back(id);
  watched_.erase(id);
  out.push_back(SessionUp{id, peer, kind});
  if (const auto ends = unsent_ends_.find(peer); ends != unsent_ends_.end() && carries_ours(session)) {
    for (const UnackedEnd& again : ends->second.take()) send_end_over(id, session, again, now, out);
    unsent_ends_.erase(ends);
  }
  for (auto it = operations_.begin(); it != operations_.end();) {
    const auto current = it++;
    Operation& operation = *current->second;
    if (!operation.can_attach() || !is_peer(peer, operation) || session_kind(operation.lane()) != kind || !carries(session, operation)) continue;
    attach(operation, id, now, out);
    settle(current, now, out);
  }
  if (!carries_ours(session)) return;
  notifier_.flush(peer, id, true, now, out);
  drop_suspects(id, peer, kind, now, out);
}

bool Endpoint::has_maps(const Session& session, const Operation& operation) {
  if (!needs_map(operation.lane())) return true;
  const std::vector<uint32_t> regions = operation.remote_regions();
  return std::all_of(regions.begin(), regions.end(), [&](uint32_t region) { return session.maps.count({region, operation.lane()}) != 0; });
}

void Endpoint::on_map(Session& session, const Map& map) {
  if (map.region_bytes == 0) {
    session.maps.erase({map.pool, map.lane});
  } else if (session.maps.size() < kMapsMax) {
    session.maps.insert({map.pool, map.lane});
  }
}

void Endpoint::on_frame(SessionId id, const Frame& frame, Nanos now, Effects& out) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  hear(session, now);
  try {
    if (const auto* error = std::get_if<ErrorFrame>(&frame); error != nullptr && error->id == TransferId{}) {
      return hang_up(id, error->code, printable(error->text), now, out);
    }
    if (session.is_up()) {
      const uint64_t before = grants_.refusals();
      on_proven(id, session, frame, now, out);
      return on_refusals(id, grants_.refusals() - before);
    }
    const auto* hello = std::get_if<Hello>(&frame);
    if (hello == nullptr) throw Error(Code::protocol, std::string(kind_name(frame)) + " before the session was proven");
    const auto answer = session.handshake.on_hello(*hello, [&](const AgentRef& peer) { return key_of(peer, session); });
    if (answer) out.push_back(SendFrame{id, *answer});
    if (session.is_up()) session_up(id, session, now, out);
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    out.push_back(SendFrame{id, ErrorFrame{{}, 0, error.code(), error.what()}});
    hang_up(id, error.code(), error.what(), now, out);
  }
}

// An honest peer is refused now and then, when the owner has just taken back what the peer asks for. A peer that only probes for
// access is counted, and must prove itself again after each refusals_max. The answer to its last request goes out before the
// session ends; if that answer is lost, the peer asks again over the next session.
void Endpoint::on_refusals(SessionId id, uint64_t count) {
  const auto found = count != 0 ? sessions_.find(id) : sessions_.end();
  if (found == sessions_.end() || (found->second.refusals += count) < limits_.refusals_max) return;
  throw Error(Code::refused, "refusals_max (" + std::to_string(limits_.refusals_max) + ") is reached on this session");
}

void Endpoint::on_proven(SessionId id, Session& session, const Frame& frame, Nanos now, Effects& out) {
  const AgentRef peer = session.handshake.peer();
  const auto to_transfer = [&](const TransferId& transfer_id, auto&& act) {
    if (Transfer* transfer = transfer_of(id, transfer_id)) {
      act(*transfer);
      settle(operations_.find(transfer_id), now, out);
    }
  };
  if (const auto* f = std::get_if<Pull>(&frame)) return on_pull(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Ready>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_ready(*f, now, out); });
  if (const auto* f = std::get_if<Queued>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_queued(*f, now, out); });
  if (const auto* f = std::get_if<Confirm>(&frame)) return grants_.on_confirm(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Verdict>(&frame); f != nullptr && has_bug(Bug::commit_twice)) {
    const auto over = finished_.find(f->id);
    if (f->code == Code::ok && over != finished_.end() && over->second == TransferState::Committed) {
      out.push_back(TransferFinal{f->id, over->second, Code::ok, "", Lane::Stream, "", 0, 0, 0, 0, 0, 0, 0, id});
    }
  }
  if (const auto* f = std::get_if<Verdict>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_verdict(*f, now, out); });
  if (const auto* f = std::get_if<Release>(&frame)) {
    if (may_read(id, peer, f->id)) grants_.on_release(peer, f->id, now, out);
    return;
  }
  if (const auto* f = std::get_if<Renew>(&frame)) return grants_.on_renew(peer, *f, now);
  if (const auto* f = std::get_if<Revoke>(&frame)) return on_revoke(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Cancel>(&frame)) return grants_.on_cancel(id, *f);
  if (const auto* f = std::get_if<Notif>(&frame)) {
    if (f->kind == NotifKind::Ack && !carries_ours(session)) return;  // it acknowledges nothing that this session sent
    return notifier_.on_notif(id, peer, *f, now, out);
  }
  if (const auto* f = std::get_if<ErrorFrame>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_error(*f, now, out); });
  if (const auto* f = std::get_if<Ping>(&frame)) {
    if (f->kind == PingKind::Ask) out.push_back(SendFrame{id, Ping{PingKind::Answer, f->token}});
    return;
  }
  if (const auto* f = std::get_if<Fetch>(&frame)) return on_fetch(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Push>(&frame)) return on_push(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Done>(&frame)) return on_done(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Map>(&frame)) return on_map(session, *f);
  if (std::holds_alternative<Data>(frame)) return;  // the shell handles payload
  throw Error(Code::protocol, std::string(kind_name(frame)) + " in a session that is up");
}

}  // namespace kvxfer
