#include "endpoint.hpp"

#include <algorithm>

namespace kvxfer {

// --- the directory ---

void Endpoint::set_peer(const AgentRef& peer, const Bytes32& key, SessionKind control) {
  if (peer == self_) return;
  peers_[peer] = Peer{key, control};
}

void Endpoint::peer_dead(const AgentRef& peer, Nanos now, Effects& out) {
  const bool has_other_life = has_bug(Bug::mix_two_sources) &&
                              std::any_of(peers_.begin(), peers_.end(), [&](const auto& p) { return p.first != peer && p.first.agent_id == peer.agent_id; });
  peers_.erase(peer);
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    const auto current = it++;
    if (current->second.source() != peer || has_other_life) continue;
    current->second.source_dead(now, out);
    settle(current, now, out);
  }
  given_up_.erase(peer);
  grants_.reader_dead(peer, now, out);
  notifier_.peer_dead(peer, out);
  std::vector<SessionId> sessions;
  for (const auto& [id, session] : sessions_) {
    if (session.handshake.peer() == peer) sessions.push_back(id);
  }
  for (SessionId id : sessions) hang_up(id, Code::peer_gone, "the peer is gone", now, out);
}

// --- the owner ---

Ledger& Endpoint::ledger(uint32_t pool) {
  const auto found = pools_.find(pool);
  if (found == pools_.end()) throw Error(Code::invalid_argument, "no pool " + std::to_string(pool));
  return *found->second;
}

void Endpoint::add_pool(const PoolInfo& info) {
  if (info.block_count == 0 || info.block_bytes == 0 || info.block_bytes > kPayloadMax) {
    throw Error(Code::invalid_argument, "a pool needs blocks of 1 to " + std::to_string(kPayloadMax) + " bytes, and at least one");
  }
  if (!pools_.emplace(info.id, std::make_unique<Ledger>(info)).second) throw Error(Code::invalid_argument, "pool id is taken");
}

void Endpoint::remove_pool(uint32_t pool) {
  if (!ledger(pool).is_idle()) throw Error(Code::blocks_busy, "blocks of the pool are granted, reserved or quarantined");
  pools_.erase(pool);
}

void Endpoint::grant(const TransferId& id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns,
                     uint32_t ready_blocks, Nanos now, Effects& out, const Bytes32& content) {
  if (ready_blocks > blocks.size()) throw Error(Code::invalid_argument, "more blocks are ready than the grant has");
  grants_.grant(id, ledger(pool), std::move(blocks), reader, ttl_ns, now, out, content);
  if (ready_blocks != 0) grants_.ready(id, ready_blocks, 0, false, now, out);
}

void Endpoint::ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete, Nanos now, Effects& out) {
  grants_.ready(id, blocks, layers, complete, now, out);
}

GrantState Endpoint::end_grant(const TransferId& id, GrantEvent event, Nanos now, Effects& out) { return grants_.end(id, event, now, out); }

void Endpoint::pull(uint32_t pool, TransferSpec spec, Nanos now, Effects& out) {
  Ledger& into = ledger(pool);
  if (transfers_.size() >= limits_.transfers_max) {
    throw Error(Code::limit_exceeded, "transfers_max (" + std::to_string(limits_.transfers_max) + ") is reached");
  }
  if (transfers_.count(spec.id) != 0 || finished_.count(spec.id) != 0) {
    throw Error(Code::invalid_argument, "this transfer id was used before; a retry needs a new one");
  }
  if (spec.source == self_) throw Error(Code::invalid_argument, "an agent does not pull from itself");
  if (!knows(spec.source)) throw Error(Code::peer_gone, "agent " + spec.source.agent_id + " is not known in that life");
  const TransferId id = spec.id;
  const auto it = transfers_.emplace(id, Transfer(std::move(spec), limits_.transfers, into, now)).first;
  settle(it, now, out);
}

void Endpoint::cancel(const TransferId& id, Nanos now, Effects& out) {
  const auto it = transfers_.find(id);
  if (it == transfers_.end()) return;
  it->second.cancel(now, out);
  settle(it, now, out);
}

void Endpoint::give_up(const TransferId& id, const AgentRef& source, Effects& out) {
  if (transfers_.count(id) != 0 || finished_.count(id) != 0) throw Error(Code::invalid_argument, "this transfer has begun: cancel it");
  if (const auto peer = peers_.find(source); peer != peers_.end() && find_up(source, std::nullopt) == 0) dial(source, peer->second.control, out);
  tell_given_up(id, source, out);
}

// By the session that is up, or as soon as the one that is being dialed is.
void Endpoint::tell_given_up(const TransferId& id, const AgentRef& source, Effects& out) {
  if (!knows(source)) return;
  if (const SessionId session = find_up(source, std::nullopt)) {
    out.push_back(SendFrame{session, Release{id}});
  } else if (const auto next = dialing_.lower_bound({source, SessionKind{}}); next != dialing_.end() && next->first == source) {
    std::vector<TransferId>& ids = given_up_[source];
    if (ids.size() < limits_.transfers_max) ids.push_back(id);
  }
}

std::optional<TransferState> Endpoint::transfer_state(const TransferId& id) const {
  if (const auto it = transfers_.find(id); it != transfers_.end()) return it->second.state();
  if (const auto it = finished_.find(id); it != finished_.end()) return it->second;
  return std::nullopt;
}

uint64_t Endpoint::notify(const AgentRef& to, std::string payload, Nanos now, Effects& out) {
  const auto peer = peers_.find(to);
  if (peer == peers_.end()) throw Error(Code::peer_gone, "agent " + to.agent_id + " is not known in that life");
  const uint64_t seq = notifier_.post(to, std::move(payload), now);
  if (const SessionId session = find_up(to, std::nullopt)) {
    notifier_.flush(to, session, false, now, out);
  } else {
    dial(to, peer->second.control, out);
  }
  return seq;
}

// --- sessions ---

SessionId Endpoint::find_up(const AgentRef& peer, std::optional<SessionKind> kind) const {
  for (const auto& [id, session] : sessions_) {
    if (session.is_up() && session.handshake.peer() == peer && (!kind || session.kind == *kind)) return id;
  }
  return 0;
}

void Endpoint::dial(const AgentRef& peer, SessionKind kind, Effects& out) {
  if (dialing_.insert({peer, kind}).second) out.push_back(Dial{peer, kind});
}

SessionId Endpoint::dialed(const AgentRef& peer, SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out) {
  const SessionId id = next_session_++;
  Session session{kind, true, Handshake(self_, peer, nonce), now + limits_.handshake_ns, now, 0, {}};
  out.push_back(SendFrame{id, session.handshake.dial_hello()});
  sessions_.emplace(id, std::move(session));
  return id;
}

SessionId Endpoint::accepted(SessionKind kind, const Bytes32& nonce, Nanos now, Effects& out) {
  const SessionId id = next_session_++;
  sessions_.emplace(id, Session{kind, false, Handshake(self_, nonce), now + limits_.handshake_ns, now, 0, {}});
  if (sessions_.size() > limits_.sessions_max) hang_up(id, Code::overloaded, "sessions_max is reached", now, out);
  return id;
}

void Endpoint::dial_failed(const AgentRef& peer, SessionKind kind, Code code, const std::string& text, Nanos now, Effects& out) {
  dialing_.erase({peer, kind});
  if (const auto next = dialing_.lower_bound({peer, SessionKind{}}); next == dialing_.end() || next->first != peer) given_up_.erase(peer);
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    const auto current = it++;
    Transfer& transfer = current->second;
    if (!transfer.can_attach() || !is_source(peer, transfer) || session_kind(transfer.lane()) != kind) continue;
    transfer.dial_failed(code, text, now, out);
    settle(current, now, out);
  }
  notifier_.postpone(peer, now);
}

void Endpoint::closed(SessionId id, Nanos now, Effects& out) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const Session session = std::move(found->second);
  sessions_.erase(found);
  if (!session.is_up()) {
    if (session.is_dialed) dial_failed(session.handshake.peer(), session.kind, Code::transport, "the connection closed in the handshake", now, out);
    return;
  }
  grants_.session_closed(id);
  for (const TransferId& transfer : session.transfers) {
    const auto it = transfers_.find(transfer);
    if (it == transfers_.end() || it->second.session() != id) continue;
    it->second.session_lost(now, out);
    settle(it, now, out);
  }
}

void Endpoint::hang_up(SessionId id, Code code, const std::string& text, Nanos now, Effects& out) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const bool is_failed_dial = found->second.is_dialed && !found->second.is_up();
  const AgentRef peer = found->second.handshake.peer();
  const SessionKind kind = found->second.kind;
  out.push_back(Hangup{id, code, text});
  if (is_failed_dial) {
    sessions_.erase(found);
    dial_failed(peer, kind, code, text, now, out);
  } else {
    closed(id, now, out);
  }
}

void Endpoint::heard(SessionId session, Nanos now) {
  if (const auto found = sessions_.find(session); found != sessions_.end()) found->second.heard_at = now;
}

void Endpoint::session_up(SessionId id, Session& session, Nanos now, Effects& out) {
  session.deadline = kNever;
  const AgentRef peer = session.handshake.peer();
  const SessionKind kind = session.kind;
  if (session.is_dialed) dialing_.erase({peer, kind});
  out.push_back(SessionUp{id, peer, kind});
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    const auto current = it++;
    Transfer& transfer = current->second;
    if (!transfer.can_attach() || !is_source(peer, transfer) || session_kind(transfer.lane()) != kind) continue;
    attach(session, transfer, now);
    transfer.session_up(id, now, out);
    settle(current, now, out);
  }
  if (const auto given_up = given_up_.find(peer); given_up != given_up_.end()) {
    for (const TransferId& transfer : given_up->second) out.push_back(SendFrame{id, Release{transfer}});
    given_up_.erase(given_up);
  }
  notifier_.flush(peer, id, true, now, out);
}

void Endpoint::on_frame(SessionId id, const Frame& frame, Nanos now, Effects& out) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  session.heard_at = now;
  try {
    if (const auto* error = std::get_if<ErrorFrame>(&frame); error != nullptr && error->id == TransferId{}) {
      return hang_up(id, error->code, printable(error->text), now, out);
    }
    if (session.is_up()) return on_proven(id, session, frame, now, out);
    const auto* hello = std::get_if<Hello>(&frame);
    if (hello == nullptr) throw Error(Code::protocol, std::string(kind_name(frame)) + " before the session was proven");
    const auto answer = session.handshake.on_hello(*hello, [this](const AgentRef& peer) -> const Bytes32* {
      const auto it = peers_.find(peer);
      return it == peers_.end() ? nullptr : &it->second.key;
    });
    if (answer) out.push_back(SendFrame{id, *answer});
    if (session.is_up()) session_up(id, session, now, out);
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    out.push_back(SendFrame{id, ErrorFrame{{}, 0, error.code(), error.what()}});
    hang_up(id, error.code(), error.what(), now, out);
  }
}

bool Endpoint::is_source(const AgentRef& peer, const Transfer& transfer) const {
  return peer == transfer.source() || (has_bug(Bug::mix_two_sources) && peer.agent_id == transfer.source().agent_id);
}

Transfer* Endpoint::transfer_of(SessionId session, const TransferId& id) {
  const auto it = transfers_.find(id);
  return it != transfers_.end() && it->second.session() == session ? &it->second : nullptr;
}

void Endpoint::on_proven(SessionId id, Session& session, const Frame& frame, Nanos now, Effects& out) {
  const AgentRef peer = session.handshake.peer();
  const auto to_transfer = [&](const TransferId& transfer_id, auto&& act) {
    if (Transfer* transfer = transfer_of(id, transfer_id)) {
      act(*transfer);
      settle(transfers_.find(transfer_id), now, out);
    }
  };
  if (const auto* f = std::get_if<Pull>(&frame)) return grants_.on_pull(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Ready>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_ready(*f, now, out); });
  if (const auto* f = std::get_if<Confirm>(&frame)) return grants_.on_confirm(id, peer, *f, now, out);
  if (const auto* f = std::get_if<Verdict>(&frame); f != nullptr && has_bug(Bug::commit_twice)) {
    const auto over = finished_.find(f->id);
    if (f->code == Code::ok && over != finished_.end() && over->second == TransferState::Committed) {
      out.push_back(TransferFinal{f->id, over->second, Code::ok, "", Lane::Stream, "", 0, 0, 0, 0, 0, 0});
    }
  }
  if (const auto* f = std::get_if<Verdict>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_verdict(*f, now, out); });
  if (const auto* f = std::get_if<Release>(&frame)) return grants_.on_release(peer, f->id, now, out);
  if (const auto* f = std::get_if<Renew>(&frame)) return grants_.on_renew(peer, *f, now);
  if (const auto* f = std::get_if<Revoke>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_revoke(*f, now, out); });
  if (const auto* f = std::get_if<Cancel>(&frame)) return grants_.on_cancel(id, *f);
  if (const auto* f = std::get_if<Notif>(&frame)) return notifier_.on_notif(id, peer, *f, now, out);
  if (const auto* f = std::get_if<ErrorFrame>(&frame)) return to_transfer(f->id, [&](Transfer& t) { t.on_error(*f, now, out); });
  if (const auto* f = std::get_if<Ping>(&frame)) {
    if (f->kind == PingKind::Ask) out.push_back(SendFrame{id, Ping{PingKind::Answer, f->token}});
    return;
  }
  if (const auto* f = std::get_if<Push>(&frame)) {  // no offer is live for these blocks: nothing may land
    out.push_back(SendFrame{id, ErrorFrame{f->id, 0, Code::refused, "there is no offer for this transfer"}});
    return;
  }
  if (std::holds_alternative<Map>(frame) || std::holds_alternative<Data>(frame)) return;  // the shell's: mapping, payload
  throw Error(Code::protocol, std::string(kind_name(frame)) + " in a session that is up");
}

// --- data ---

void Endpoint::data_sent(SessionId session, const TransferId& id, uint32_t attempt, uint32_t count, Nanos now, Effects& out) {
  grants_.data_sent(session, id, attempt, count, now, out);
}

Landing Endpoint::data_arrives(SessionId session, const Data& data, Nanos now) {
  Landing landing;
  if (Transfer* transfer = transfer_of(session, data.id)) {
    landing.blocks = transfer->on_data(data, now, landing.token);
    landing.pool = transfer->pool();
  }
  return landing;
}

bool Endpoint::is_landing(const TransferId& id, uint64_t token) const {
  const auto it = transfers_.find(id);
  return it != transfers_.end() && it->second.is_landing(token);
}

void Endpoint::read_landed(const TransferId& id, uint64_t token, Nanos now, Effects& out) {
  const auto it = transfers_.find(id);
  if (it == transfers_.end()) throw Error(Code::internal, "a read landed for a transfer that is over");
  it->second.landed(token, now, out);
  settle(it, now, out);
}

void Endpoint::read_stopped(const TransferId& id, uint64_t token, Code code, const std::string& text, Nanos now, Effects& out) {
  const auto it = transfers_.find(id);
  if (it == transfers_.end()) throw Error(Code::internal, "a read stopped for a transfer that is over");
  it->second.stopped(token, code, text, now, out);
  settle(it, now, out);
}

// --- transfers and time ---

void Endpoint::connect(Transfer& transfer, Nanos now, Effects& out) {
  const SessionKind kind = session_kind(transfer.lane());
  AgentRef source = transfer.source();
  if (has_bug(Bug::mix_two_sources)) {
    for (const auto& [peer, _] : peers_) {
      if (peer.agent_id == source.agent_id) source = peer;  // the newest life comes last
    }
  }
  if (!knows(source)) return transfer.source_dead(now, out);
  if (const SessionId session = find_up(source, kind)) {
    attach(sessions_.at(session), transfer, now);
    return transfer.session_up(session, now, out);
  }
  transfer.dialing();
  dial(source, kind, out);
}

// Silence is counted from the moment in which somebody waits for an answer: an idle session is not a silent one.
void Endpoint::attach(Session& session, const Transfer& transfer, Nanos now) {
  if (session.transfers.empty()) {
    session.heard_at = now;
    session.pinged_at = 0;
  }
  session.transfers.insert(transfer.id());
}

// After every event of a transfer: connect it where it needs that, remember when to look again, forget it when it is over.
void Endpoint::settle(Transfers::iterator it, Nanos now, Effects& out) {
  Transfer& transfer = it->second;
  if (transfer.needs_session(now)) connect(transfer, now, out);
  const TransferId id = it->first;
  if (const auto old = wake_of_.find(id); old != wake_of_.end()) {
    wakes_.erase({old->second, id});
    wake_of_.erase(old);
  }
  if (transfer.is_over()) {
    // Without a session it could not release its grant; where none can be had either, the grant's own expiry ends it.
    if (transfer.session() == 0 && transfer.state() != TransferState::Committed) tell_given_up(id, transfer.source(), out);
    finished_[id] = transfer.state();
    finished_order_.push_back(id);
    if (finished_order_.size() > limits_.finished_max) {
      finished_.erase(finished_order_.front());
      finished_order_.pop_front();
    }
    for (auto& [_, session] : sessions_) session.transfers.erase(id);
    transfers_.erase(it);
    return;
  }
  if (const Nanos at = transfer.wake_at(); at != kNever) {
    wakes_.insert({at, id});
    wake_of_[id] = at;
  }
}

void Endpoint::tick(Nanos now, Effects& out) {
  grants_.tick(now, out);
  const Nanos stall = limits_.transfers.stall_ns;
  std::vector<std::pair<SessionId, const char*>> lost;
  for (auto& [id, session] : sessions_) {
    if (!session.is_up()) {
      if (now >= session.deadline) lost.emplace_back(id, "the handshake took too long");
      continue;
    }
    if (session.transfers.empty()) continue;  // nobody here waits for this peer
    if (now - session.heard_at >= 2 * stall) {
      lost.emplace_back(id, "the peer fell silent");
    } else if (now - session.heard_at >= stall && session.pinged_at <= session.heard_at) {
      session.pinged_at = now;
      out.push_back(SendFrame{id, Ping{PingKind::Ask, static_cast<uint64_t>(now)}});
    }
  }
  for (const auto& [id, why] : lost) hang_up(id, Code::transport, why, now, out);
  while (!wakes_.empty() && wakes_.begin()->first <= now) {
    const TransferId id = wakes_.begin()->second;
    wakes_.erase(wakes_.begin());
    wake_of_.erase(id);
    const auto it = transfers_.find(id);
    if (it == transfers_.end()) continue;
    it->second.tick(now, out);
    settle(it, now, out);
    if (const auto wake = wake_of_.find(id); wake != wake_of_.end() && wake->second <= now) {
      throw Error(Code::internal, "a transfer asks to be woken in the past");
    }
  }
  for (const AgentRef& peer : notifier_.overdue(now, stall)) {
    if (const SessionId session = find_up(peer, std::nullopt)) {
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
  for (const auto& [_, session] : sessions_) {
    if (!session.is_up()) {
      next = std::min(next, session.deadline);
    } else if (!session.transfers.empty()) {
      next = std::min(next, session.heard_at + (session.pinged_at <= session.heard_at ? stall : 2 * stall));
    }
  }
  return next;
}

EndpointCounts Endpoint::counts() const {
  EndpointCounts counts;
  counts.grants = grants_.counts();
  for (const auto& [id, ledger] : pools_) {
    counts.pools.push_back({id, ledger->info().block_count, ledger->granted_count(), ledger->reserved_count(), ledger->quarantined_count()});
  }
  for (const auto& [_, transfer] : transfers_) ++(is_final(transfer.state()) ? counts.transfers_draining : counts.transfers_live);
  for (const auto& [_, session] : sessions_) ++(session.is_up() ? counts.sessions_up : counts.sessions_opening);
  counts.peers = peers_.size();
  counts.notifications_pending = notifier_.pending_count();
  return counts;
}

}  // namespace kvxfer
