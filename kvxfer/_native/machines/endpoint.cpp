#include "endpoint.hpp"

#include <algorithm>

namespace kvxfer {

// --- the directory ---

void Endpoint::set_peer(const AgentRef& peer, const Bytes32& key, SessionKind control) {
  if (peer == self_) return;
  keep(peer);
  notifier_.peer_alive(peer);
  peers_[peer] = KnownPeer{key, control};
}

void Endpoint::peer_dead(const AgentRef& peer, Nanos now, Effects& out) {
  forget(peer, now, out);
  std::vector<SessionId> sessions;
  for (const auto& [id, session] : sessions_) {
    if (session.handshake.peer() == peer) sessions.push_back(id);
  }
  for (SessionId id : sessions) hang_up(id, Code::peer_gone, "the peer is gone", now, out);
}

void Endpoint::forget(const AgentRef& peer, Nanos now, Effects& out) {
  const bool has_other_incarnation = has_bug(Bug::mix_two_sources) &&
                              std::any_of(peers_.begin(), peers_.end(), [&](const auto& p) { return p.first != peer && p.first.agent_id == peer.agent_id; });
  keep(peer);
  peers_.erase(peer);
  if (!has_other_incarnation) end_operations(peer, true, now, out);
  unsent_ends_.erase(peer);
  grants_.reader_dead(peer, now, out);
  notifier_.peer_dead(peer, out);
}

void Endpoint::end_operations(const AgentRef& peer, bool is_offered_too, Nanos now, Effects& out) {
  for (auto it = operations_.begin(); it != operations_.end();) {
    const auto current = it++;
    const Operation& operation = *current->second;
    if (operation.peer() != peer || (operation.is_offered() && !is_offered_too)) continue;
    current->second->end(TransferState::Failed, Code::peer_gone, "the peer is gone", now, out);
    settle(current, now, out);
  }
}

// --- the owner ---

Ledger& Endpoint::ledger(uint32_t pool) {
  const auto found = pools_.find(pool);
  if (found == pools_.end()) throw Error(Code::invalid_argument, "no pool " + std::to_string(pool));
  return *found->second;
}

// Throws invalid_argument where a pool's memory would be a region, too, or a region's a pool.
void Endpoint::check_place(const Place& place, const std::string& whose, bool is_region) const {
  for (const auto& [id, other] : places_) {
    if (regions_.has(id) == is_region) continue;
    const auto met = Overlap(place, other).example();
    if (!met) continue;
    const std::string what = is_region ? "block " + std::to_string(met->second) + " of pool " : "region ";
    throw Error(Code::invalid_argument, whose + " shares memory with " + what + std::to_string(id) + ": register it as one of the two");
  }
}

void Endpoint::add_pool(const PoolInfo& info, Place place) {
  if (info.block_count == 0 || info.block_bytes == 0 || info.block_bytes > kElementBytesMax) {
    throw Error(Code::invalid_argument, "a pool needs blocks of 1 to " + std::to_string(kElementBytesMax) + " bytes, and at least one");
  }
  if (regions_.has(info.id) || pools_.count(info.id) != 0) throw Error(Code::invalid_argument, "pool id is taken");
  place.count = info.block_count;
  const std::string whose = "pool " + std::to_string(info.id);
  if (const std::string shared = overlap_within(place); !shared.empty()) throw Error(Code::invalid_argument, whose + ": " + shared);
  check_place(place, whose, false);
  auto ledger = std::make_unique<Ledger>(info);
  for (auto& [id, other] : pools_) {
    const Place& theirs = places_.at(id);
    if (Overlap overlap(place, theirs); !overlap.is_empty()) Ledger::meet(*ledger, std::move(overlap), *other, Overlap(theirs, place));
  }
  pools_.emplace(info.id, std::move(ledger));
  places_[info.id] = std::move(place);
}

void Endpoint::set_digest(uint32_t pool, const Bytes32& digest) { ledger(pool).set_digest(digest); }

void Endpoint::remove_pool(uint32_t pool) {
  if (!ledger(pool).is_idle()) throw Error(Code::blocks_busy, "blocks of the pool are granted, reserved or quarantined");
  ledger(pool).leave();
  pools_.erase(pool);
  places_.erase(pool);
}

void Endpoint::grant(const TransferId& id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns,
                     uint32_t ready_blocks, Nanos now, Effects& out, const Bytes32& content_digest) {
  if (ready_blocks > blocks.size()) throw Error(Code::invalid_argument, "more blocks are ready than the grant has");
  grants_.grant(id, ledger(pool), std::move(blocks), reader, ttl_ns, now, out, content_digest);
  if (ready_blocks != 0) grants_.ready(id, ready_blocks, 0, false, now, out);
}

void Endpoint::ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete, Nanos now, Effects& out,
                     const std::vector<uint32_t>& checksums) {
  grants_.ready(id, blocks, layers, complete, now, out, checksums);
}

GrantState Endpoint::end_grant(const TransferId& id, GrantEvent event, Nanos now, Effects& out, const std::string& why) {
  if (grants_.is_of_elements(id)) throw Error(Code::grant_unknown, "no such grant");
  return grants_.end(id, event, now, out, why);
}

void Endpoint::check_room(const TransferId& id, const AgentRef& peer) const {
  if (operations_.size() >= limits_.transfers_max) {
    throw Error(Code::limit_exceeded, "transfers_max (" + std::to_string(limits_.transfers_max) + ") is reached");
  }
  if (operations_.count(id) != 0 || finished_.count(id) != 0 || offers_ended_.count(id) != 0) {
    throw Error(Code::invalid_argument, "this transfer id was used before; a retry needs a new one");
  }
  if (peer == self_) throw Error(Code::invalid_argument, "an agent does not pull from itself");
  if (!knows(peer) || is_away(peer)) {
    throw Error(Code::peer_gone, "agent " + peer.agent_id + " is not known in that incarnation");
  }
}

void Endpoint::pull(uint32_t pool, TransferSpec spec, Nanos now, Effects& out) {
  Ledger& into = ledger(pool);
  check_room(spec.id, spec.source);
  drop_unserved(spec.lanes);
  std::unique_ptr<MemoryClaim> claim;
  if (spec.blocks.empty()) {
    claim = std::make_unique<NoBlocks>(into, spec.count);
  } else {
    claim = std::make_unique<ReservedBlocks>(into, std::move(spec.blocks));
  }
  start(std::make_unique<Transfer>(std::move(spec), limits_.transfers, std::move(claim), now), now, out);
}

void Endpoint::reserve(const TransferId& id, std::vector<uint32_t> blocks, uint32_t first, Nanos now, Effects& out) {
  Transfer* transfer = find_transfer(id);
  if (transfer == nullptr || !transfer->is_pull()) throw Error(Code::invalid_argument, "no pull of this id is in progress");
  if (blocks.empty()) throw Error(Code::invalid_argument, "a transfer needs at least one block");
  auto claim = std::make_unique<ReservedBlocks>(ledger(transfer->into().pool()->id), std::move(blocks));
  transfer->reserve(std::move(claim), first, now, out);
  settle(operations_.find(id), now, out);
}

bool Endpoint::unreserve(const TransferId& id, Nanos now, Effects& out) {
  Transfer* transfer = find_transfer(id);
  if (transfer == nullptr || !transfer->is_pull() || !transfer->can_unreserve()) return false;
  transfer->unreserve(std::make_unique<NoBlocks>(ledger(transfer->into().pool()->id), transfer->total()), now, out);
  settle(operations_.find(id), now, out);
  return true;
}

void Endpoint::cancel(const TransferId& id, Nanos now, Effects& out) {
  const auto it = operations_.find(id);
  if (it == operations_.end() || it->second->is_offered()) return;
  it->second->end(TransferState::Cancelled, Code::cancelled, "cancelled", now, out);
  settle(it, now, out);
}

void Endpoint::abort_pull(const TransferId& id, const AgentRef& source, Nanos now, Effects& out) {
  if (operations_.count(id) != 0 || finished_.count(id) != 0) throw Error(Code::invalid_argument, "this transfer has begun: cancel it");
  if (const auto peer = peers_.find(source); peer != peers_.end() && find_up(source) == 0) dial(source, peer->second.control, out);
  send_end(source, unacked_end(id, now), now, out);
}

// Sends it over a session that is up, or as soon as one is.
void Endpoint::send_end(const AgentRef& source, const UnackedEnd& end, Nanos now, Effects& out) {
  if (!knows(source) || is_away(source)) return;
  if (const SessionId session = find_up(source)) {
    send_end_over(session, sessions_.at(session), end, now, out);
  } else {
    unsent_ends_[source].add(end);
  }
}

void Endpoint::send_end_over(SessionId id, Session& session, const UnackedEnd& end, Nanos now, Effects& out) {
  if (now >= end.until) return;
  out.push_back(SendFrame{id, end.is_of_push ? Frame(Revoke{end.id, Code::grant_revoked}) : Frame(Release{end.id})});
  session.unacked_ends.add(end);
}

std::optional<TransferState> Endpoint::transfer_state(const TransferId& id) const {
  if (const auto it = operations_.find(id); it != operations_.end() && !it->second->is_offered()) return it->second->state();
  if (const auto it = finished_.find(id); it != finished_.end()) return it->second;
  return std::nullopt;
}

uint64_t Endpoint::notify(const AgentRef& to, std::string payload, Nanos now, Effects& out) {
  const auto peer = peers_.find(to);
  if (peer == peers_.end() || is_away(to)) throw Error(Code::peer_gone, "agent " + to.agent_id + " is not known in that incarnation");
  const uint64_t seq = notifier_.post(to, std::move(payload), now);
  if (const SessionId session = find_up(to)) {
    notifier_.flush(to, session, false, now, out);
    probe(session, sessions_.at(session), now, out);
  } else {
    dial(to, peer->second.control, out);
  }
  return seq;
}

// --- data ---

Transfer* Endpoint::find_transfer(const TransferId& id) const {
  const auto it = operations_.find(id);
  return it != operations_.end() ? it->second->as_transfer() : nullptr;
}

Transfer* Endpoint::transfer_of(SessionId session, const TransferId& id) {
  Transfer* transfer = find_transfer(id);
  return transfer != nullptr && transfer->session() == session ? transfer : nullptr;
}

void Endpoint::data_sent(SessionId session, const TransferId& id, uint32_t attempt, uint32_t count, bool is_zero_copy, Nanos now, Effects& out,
                         uint64_t serial) {
  grants_.data_sent(session, id, attempt, count, is_zero_copy, now, out, serial);
}

Landing Endpoint::data_arrives(SessionId session, const Data& data, Nanos now) {
  Landing landing;
  if (Transfer* transfer = transfer_of(session, data.id)) landing.to = transfer->on_data(data, now, landing.token);
  return landing;
}

bool Endpoint::is_landing(const TransferId& id, uint64_t token) const {
  const Transfer* transfer = find_transfer(id);
  return transfer != nullptr && transfer->is_landing(token);
}

void Endpoint::read_landed(const TransferId& id, uint64_t token, Nanos now, Effects& out) {
  Transfer* transfer = find_transfer(id);
  if (transfer == nullptr) throw Error(Code::internal, "a read landed for a transfer that has ended");
  transfer->landed(token, now, out);
  settle(operations_.find(id), now, out);
}

void Endpoint::read_stopped(const TransferId& id, uint64_t token, Code code, const std::string& text, Nanos now, Effects& out) {
  Transfer* transfer = find_transfer(id);
  if (transfer == nullptr) throw Error(Code::internal, "a read stopped for a transfer that has ended");
  transfer->stopped(token, code, text, now, out);
  settle(operations_.find(id), now, out);
}

// --- operations and time ---

void Endpoint::start(std::unique_ptr<Operation> operation, Nanos now, Effects& out) {
  const TransferId id = operation->id();
  settle(operations_.emplace(id, std::move(operation)).first, now, out);
}

void Endpoint::connect(Operation& operation, Nanos now, Effects& out) {
  AgentRef peer = operation.peer();
  if (has_bug(Bug::mix_two_sources)) {
    for (const auto& [other, _] : peers_) {
      if (other.agent_id == peer.agent_id) peer = other;  // the newest incarnation comes last
    }
  }
  if (!knows(peer)) return operation.end(TransferState::Failed, Code::peer_gone, "the peer is gone", now, out);
  if (const SessionId session = find_session(peer, operation, out)) return attach(operation, session, now, out);
  if (is_admitted(peer) && !operation.is_offered()) return operation.lane_closed("an unregistered peer is reached only over the sessions that it opened", now, out);
  operation.dialing();
  if (!operation.is_offered()) dial(peer, session_kind(operation.lane()), out);
}

void Endpoint::attach(Operation& operation, SessionId session, Nanos now, Effects& out) {
  operation.session_up(session, has_maps(sessions_.at(session), operation), now, out);
}

// Moves the operation to the list of its current session. Silence counts from the moment when an operation waits for an answer: an
// idle session is not a silent one.
void Endpoint::follow_session(Operation& operation, Nanos now, Effects& out) {
  if (operation.listed_on == operation.session()) return;
  detach(operation);
  const auto found = sessions_.find(operation.session());
  if (found == sessions_.end()) return;
  Session& session = found->second;
  if (session.operations.empty()) {
    probe(operation.session(), session, now, out);
    session.heard_at = now;
    session.pinged_at = 0;
  }
  session.operations.insert(operation.id());
  watched_.insert(operation.session());
  operation.listed_on = operation.session();
}

void Endpoint::detach(Operation& operation) {
  if (operation.listed_on == 0) return;
  if (const auto found = sessions_.find(operation.listed_on); found != sessions_.end()) {
    found->second.operations.erase(operation.id());
    if (found->second.operations.empty() && found->second.is_up()) watched_.erase(operation.listed_on);
  }
  operation.listed_on = 0;
}

void Endpoint::wake(Operation& operation, Nanos at) {
  if (operation.woken_at == at) return;
  decltype(wakes_)::node_type node;
  if (operation.woken_at != kNever) node = wakes_.extract({operation.woken_at, operation.id()});
  operation.woken_at = at;
  if (at == kNever) return;
  if (node.empty()) {
    wakes_.emplace(at, operation.id());
  } else {
    node.value().first = at;
    wakes_.insert(std::move(node));
  }
}

// Called after every event of an operation: connects it if it needs a session, schedules its next tick, and forgets it once it is
// over.
void Endpoint::settle(Operations::iterator it, Nanos now, Effects& out) {
  Operation& operation = *it->second;
  while (operation.needs_session(now)) connect(operation, now, out);
  if (!operation.is_over()) {
    if (operation.is_offered() && is_final(operation.state())) offers_draining_.insert(operation.id());
    follow_session(operation, now, out);
    return wake(operation, operation.wake_at());
  }
  const std::unique_ptr<Operation> over = std::move(it->second);
  operations_.erase(it);
  detach(*over);
  wake(*over, kNever);
  finish(*over, now, out);
}

void Endpoint::finish(const Operation& operation, Nanos now, Effects& out) {
  const Transfer* transfer = const_cast<Operation&>(operation).as_transfer();
  if (operation.is_offered()) return end_offer(*transfer, out);
  const TransferId& id = operation.id();
  finished_[id] = operation.state();
  finished_order_.push_back(id);
  if (finished_order_.size() > limits_.finished_max) {
    finished_.erase(finished_order_.front());
    finished_order_.pop_front();
  }
  if (transfer == nullptr) {
    const PushOperation& push = *const_cast<Operation&>(operation).as_push();
    stop_reader(push, now, out);
    return notify_ended(operation, push.own_notification(), now, out);
  }
  if (const auto session = sessions_.find(operation.session()); session != sessions_.end()) {
    session->second.unacked_ends.add(unacked_end(id, now));  // the transfer sent RELEASE
  } else {
    send_end(operation.peer(), unacked_end(id, now), now, out);
  }
  notify_ended(operation, transfer->spec().notification, now, out);
}

bool Endpoint::is_peer(const AgentRef& peer, const Operation& operation) const {
  return peer == operation.peer() || (has_bug(Bug::mix_two_sources) && peer.agent_id == operation.peer().agent_id);
}

void Endpoint::tick(Nanos now, Effects& out) {
  grants_.tick(now, out);
  forget_leaving(now, out);
  const Nanos stall = limits_.transfers.stall_ns;
  std::vector<std::pair<SessionId, const char*>> lost;
  std::vector<SessionId> quiet;
  for (const SessionId id : watched_) {
    Session& session = sessions_.at(id);
    if (session.is_up() && session.operations.empty() && session.probed_at == 0) {
      quiet.push_back(id);  // it answered its probe, and no operation waits for it
    } else if (!session.is_up()) {
      if (now >= session.deadline) lost.emplace_back(id, "the handshake took too long");
    } else if (now - session.heard_at >= 2 * stall) {
      lost.emplace_back(id, "the peer fell silent");
    } else if (now - session.heard_at >= stall && session.pinged_at <= session.heard_at) {
      session.pinged_at = now;
      out.push_back(SendFrame{id, Ping{PingKind::Ask, static_cast<uint64_t>(now)}});
    }
  }
  for (const SessionId id : quiet) watched_.erase(id);
  judge_probes(now, out);
  for (const auto& [id, why] : lost) hang_up(id, Code::transport, why, now, out);
  while (!wakes_.empty() && wakes_.begin()->first <= now) {
    const TransferId id = wakes_.begin()->second;
    const auto it = operations_.find(id);  // exists, or it would not be in wakes_
    wake(*it->second, kNever);
    it->second->tick(now, out);
    settle(it, now, out);
    // Each operation gets one turn per tick: if one asked for this same moment again, the endpoint would never sleep.
    if (const auto again = operations_.find(id); again != operations_.end() && again->second->woken_at <= now) wake(*again->second, now + kMillisecond);
  }
  judge_probes(now, out);
  for (const AgentRef& peer : notifier_.overdue(now, stall)) {
    if (const SessionId session = find_up(peer)) {
      notifier_.flush(peer, session, true, now, out);
    } else if (knows(peer)) {
      dial(peer, peers_.at(peer).control, out);
    }
    notifier_.postpone(peer, now);
  }
}

Nanos Endpoint::next_deadline() const {
  const Nanos stall = limits_.transfers.stall_ns;
  Nanos next = std::min(grants_.next_deadline(), notifier_.next_deadline(stall));
  if (!wakes_.empty()) next = std::min(next, wakes_.begin()->first);
  next = std::min(next, leave_at());
  for (const SessionId id : watched_) {
    const Session& session = sessions_.at(id);
    next = std::min(next, probe_at(session));
    next = std::min(next, !session.is_up() ? session.deadline : session.heard_at + (session.pinged_at <= session.heard_at ? stall : 2 * stall));
  }
  return next;
}

EndpointCounts Endpoint::counts() const {
  EndpointCounts counts;
  counts.grants = grants_.counts();
  for (const auto& [id, ledger] : pools_) {
    counts.pools.push_back({id, ledger->info().block_count, ledger->granted_count(), ledger->reserved_count(), ledger->quarantined_count()});
  }
  for (const auto& [id, region] : regions_.all()) counts.regions.push_back({id, region.info.bytes, region.grants, region.landings});
  for (const auto& [_, operation] : operations_) {
    ++(is_final(operation->state()) ? counts.transfers_draining : counts.transfers_live);
    if (const Transfer* transfer = operation->as_transfer(); transfer != nullptr && transfer->is_waiting()) {
      ++(transfer->is_granted() ? counts.pulls_granted : transfer->is_queued() ? counts.pulls_queued : counts.pulls_unknown);
    }
  }
  for (const auto& [_, session] : sessions_) ++(session.is_up() ? counts.sessions_up : counts.sessions_opening);
  counts.peers = peers_.size();
  counts.notifications_pending = notifier_.pending_count();
  return counts;
}

}  // namespace kvxfer
