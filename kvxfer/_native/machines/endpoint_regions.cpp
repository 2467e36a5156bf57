// Reads and writes by descriptors: operations of this agent's owner, and requests of peers for its registered memory.
#include <algorithm>

#include "endpoint.hpp"

namespace kvxfer {
namespace {

constexpr size_t kPushOverhead = 1024;  // bytes of a PUSH apart from its lists and its notification
constexpr size_t kPushNotificationMax = 192 * 1024;
constexpr const char* kOtherKind = "that lane does not run on this kind of session";

// The code that a peer gets for an error that its own frame caused here.
Code told(Code code) {
  if (code == Code::invalid_argument) return Code::refused;
  return code == Code::limit_exceeded ? Code::overloaded : code;
}

// The memory that a kept list takes.
uint64_t cost_of(const WireList& list) { return list.rows.size() * sizeof(StridedRange) + element_count(list) * sizeof(uint32_t); }

}  // namespace

// --- the owner's acts ---

void Endpoint::add_region(const RegionInfo& info, uint64_t base) {
  if (pools_.count(info.id) != 0) throw Error(Code::invalid_argument, "region id is taken by a pool");
  const Place place = base == 0 ? Place{} : Place::of_region(base, info.bytes);
  check_place(place, "region " + std::to_string(info.id), true);
  regions_.add(info);
  places_[info.id] = place;
}

void Endpoint::remove_region(uint32_t region, Nanos now, Effects& out) {
  if (!regions_.has(region)) throw Error(Code::invalid_argument, "there is no region " + std::to_string(region));
  const auto fills = [&](const Operation& operation) {
    const Transfer* transfer = const_cast<Operation&>(operation).as_transfer();
    if (transfer == nullptr || transfer->into().pool() != nullptr) return false;
    const std::vector<uint32_t> regions = transfer->into().maps();
    return std::binary_search(regions.begin(), regions.end(), region);
  };
  for (const auto& [_, operation] : operations_) {
    if (!operation->is_offered() && fills(*operation)) throw Error(Code::blocks_busy, "a fetch into region " + std::to_string(region) + " has not drained");
  }
  regions_.withdraw(region);
  for (auto it = operations_.begin(); it != operations_.end();) {
    const auto current = it++;
    Operation& operation = *current->second;
    const PushOperation* push = operation.as_push();
    if (push != nullptr ? !push->leans_on(region) : !fills(operation)) continue;
    operation.end(TransferState::Failed, Code::grant_revoked, push != nullptr ? "the region was removed" : "the offer was withdrawn", now, out);
    settle(current, now, out);
  }
  grants_.revoke_over(region, now, out);
  regions_.remove(region);
  places_.erase(region);
}

void Endpoint::drop_unserved(std::vector<Lane>& lanes) const {
  if (lanes.empty()) return;
  lanes.erase(std::remove_if(lanes.begin(), lanes.end(), [this](Lane lane) { return !serves(lane); }), lanes.end());
  if (lanes.empty()) throw Error(Code::no_lane, "none of the named lanes is allowed in this process");
}

void Endpoint::check_post(const PostSpec& spec) const {
  check_room(spec.id, spec.peer);
  check_alike(spec.local, spec.remote);
  if (spec.notification && spec.notification->size() > limits_.notification_bytes_max) {
    throw Error(Code::invalid_argument, "notification is over notification_bytes_max (" + std::to_string(limits_.notification_bytes_max) + ")");
  }
  if (wire_bytes(spec.local) + wire_bytes(spec.remote) + kPushOverhead > kBodyMax) {
    throw Error(Code::limit_exceeded, "the lists of this post do not fit one frame: split it");
  }
}

void Endpoint::fetch(PostSpec spec, Nanos now, Effects& out) {
  check_post(spec);
  drop_unserved(spec.lanes);
  // All checks come before the transfer takes its claim on memory.
  if (spec.notification) notifier_.check_room(spec.peer, spec.notification->size());
  auto claim = std::make_unique<ElementsClaim>(regions_, std::move(spec.local), RegionUse::Own, true);
  TransferSpec transfer;
  transfer.id = spec.id;
  transfer.source = std::move(spec.peer);
  transfer.lanes = std::move(spec.lanes);
  transfer.deadline = spec.deadline;
  transfer.nonce_seed = spec.nonce_seed;
  transfer.wants_checksums = spec.wants_checksums;
  transfer.remote = std::move(spec.remote);
  transfer.notification = std::move(spec.notification);
  const AgentRef peer = transfer.source;
  const bool is_told = transfer.notification.has_value();
  const size_t bytes = is_told ? transfer.notification->size() : 0;
  auto fetch = std::make_unique<Transfer>(std::move(transfer), limits_.transfers, std::move(claim), now);
  if (is_told) notifier_.promise(peer, bytes);
  start(std::move(fetch), now, out);
}

void Endpoint::push(PostSpec spec, Nanos now, Effects& out) {
  check_post(spec);
  drop_unserved(spec.lanes);
  auto claim = std::make_unique<ElementsClaim>(regions_, spec.local, RegionUse::Own, false);
  const size_t lists = wire_bytes(spec.local) + wire_bytes(spec.remote);
  const size_t bytes = spec.notification ? spec.notification->size() : 0;
  const bool is_own = bytes > kPushNotificationMax || (bytes != 0 && lists + bytes + kPushOverhead > kBodyMax);
  const AgentRef peer = spec.peer;
  PushSpec push{{spec.id, std::move(spec.peer), std::move(spec.lanes), spec.deadline, false}, std::move(spec.local), std::move(spec.remote),
                spec.wants_checksums, std::nullopt, std::nullopt};
  (is_own ? push.own_notification : push.notification) = std::move(spec.notification);
  auto pushed = std::make_unique<PushOperation>(std::move(push), limits_.transfers, grants_, std::move(claim), now);
  if (is_own) notifier_.promise(peer, bytes);
  start(std::move(pushed), now, out);
}

// --- a peer reads ---

PushOperation* Endpoint::push_of(const AgentRef& peer, const TransferId& id) {
  const auto it = operations_.find(id);
  return it != operations_.end() && it->second->peer() == peer ? it->second->as_push() : nullptr;
}

// Whether a PULL or a RELEASE on this session may concern that grant.
bool Endpoint::may_read(SessionId session, const AgentRef& peer, const TransferId& id) const {
  return sessions_.at(session).is_name_proven || (grants_.is_of_elements(id) && grants_.is_bound_to(id, peer));
}

// Why this agent, or this session, cannot serve a read by that lane; empty if it can.
std::optional<Error> Endpoint::refusal_of(Lane lane, SessionId session) const {
  if (!serves(lane)) return Error(Code::no_lane, "the source does not serve this lane");
  if (session_kind(lane) != sessions_.at(session).kind) return Error(Code::refused, kOtherKind);
  return std::nullopt;
}

void Endpoint::on_pull(SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out) {
  std::optional<Error> refusal = refusal_of(pull.lane, session);
  if (!refusal && !may_read(session, peer, pull.id)) refusal = Error(Code::refused, "a bearer peer reads only what was granted to itself");
  if (refusal) {
    if (refusal->code() != Code::no_lane) grants_.count_refusal();
    out.push_back(SendFrame{session, ErrorFrame{pull.id, pull.attempt, refusal->code(), refusal->what()}});
    return;
  }
  if (PushOperation* push = push_of(peer, pull.id)) {
    push->heard(pull.first, now);
    settle(operations_.find(push->id()), now, out);
  }
  grants_.on_pull(session, peer, pull, now, out);
}

void Endpoint::on_fetch(SessionId session, const AgentRef& peer, const Fetch& fetch, Nanos now, Effects& out) {
  const Pull& pull = fetch.pull;
  const auto refuse = [&](Code code, const std::string& text) {
    if (code != Code::no_lane) grants_.count_refusal();
    out.push_back(SendFrame{session, ErrorFrame{pull.id, pull.attempt, code, text}});
  };
  if (const auto refusal = refusal_of(pull.lane, session)) return refuse(refusal->code(), refusal->what());
  try {
    if (!grants_.knows(pull.id) || grants_.is_aborted_by_another(pull.id, peer)) {
      const AgentRef charged = charged_peer(peer);
      const uint64_t cost = cost_of(fetch.elements);
      grants_.check_room(charged, cost);
      auto claim = std::make_unique<ElementsClaim>(regions_, from_wire(fetch.elements), RegionUse::PeerReads, false);
      grants_.grant_elements(pull.id, std::move(claim), peer, charged, limits_.grants.ttl_ns, cost, now);
    } else if (!grants_.is_of_elements(pull.id) && grants_.state(pull.id, now) == GrantState::Alive) {
      return refuse(Code::refused, "this id is of a grant of blocks");
    }
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    return refuse(told(error.code()), error.what());
  }
  grants_.on_pull(session, peer, pull, now, out);
}

// --- a peer writes ---

void Endpoint::on_push(SessionId session, const AgentRef& peer, const Push& push, Nanos now, Effects& out) {
  const auto answer = [&](Code code, const std::string& text) { out.push_back(SendFrame{session, Done{push.id, code, text, push.turn}}); };
  if (const auto ended = offers_ended_.find(push.id); ended != offers_ended_.end()) {
    if (ended->second.from != peer) return answer(Code::refused, "this id was used by another agent");
    out.push_back(SendFrame{session, ended->second.done});
    return;
  }
  try {
    const auto live = operations_.find(push.id);
    if (live == operations_.end() && !serves(push.lane)) return answer(Code::no_lane, "the destination does not read by this lane");
    if (session_kind(push.lane) != sessions_.at(session).kind) throw Error(Code::refused, kOtherKind);
    if (live == operations_.end()) return take_offer(session, peer, push, now, out);
    if (!live->second->is_offered() || live->second->peer() != peer) throw Error(Code::refused, "this id is used by another agent");
    go_on_with(live, session, push, now, out);
  } catch (const Error& error) {
    if (error.code() == Code::internal) throw;
    grants_.count_refusal();
    answer(told(error.code()), error.what());
  }
}

// Handles a PUSH for a transfer that is live: a repeat, the next lane, or an earlier lane that arrives late.
void Endpoint::go_on_with(Operations::iterator offered, SessionId session, const Push& push, Nanos now, Effects& out) {
  Transfer& transfer = *offered->second->as_transfer();
  if (push.turn < transfer.turn()) return;
  transfer.asked_on = session;
  if (push.turn > transfer.turn()) {
    transfer.take_turn(push.turn, serves(push.lane) ? std::optional(push.lane) : std::nullopt, push.is_last, now, out);
  }
  if (!transfer.has_lane() && !is_final(transfer.state())) {
    out.push_back(SendFrame{session, Done{push.id, Code::no_lane, transfer.no_lane_text(), push.turn}});
  }
  if (transfer.can_attach() && session_kind(transfer.lane()) == sessions_.at(session).kind) attach(transfer, session, now, out);
  settle(offered, now, out);
}

// All checks come before anything is kept.
void Endpoint::take_offer(SessionId session, const AgentRef& peer, const Push& push, Nanos now, Effects& out) {
  if (finished_.count(push.id) != 0) throw Error(Code::refused, "this id was used by another agent");
  const OfferCharge charge{charged_peer(peer), cost_of(push.from) + cost_of(push.to) + push.notification.size()};
  if (operations_.size() >= limits_.transfers_max || !offers_.has_room(charge.to, charge.cost)) {
    throw Error(Code::overloaded, "this peer has too many pushes in progress");
  }
  ElementList from = from_wire(push.from), to = from_wire(push.to);
  check_alike(to, from);
  auto claim = std::make_unique<ElementsClaim>(regions_, std::move(to), RegionUse::PeerWrites, true);
  if (is_draining_into(*claim, peer)) return;

  TransferSpec spec;
  spec.id = push.id;
  spec.source = peer;
  spec.lanes = {push.lane};
  // The grant under which it reads lasts no longer than this agent's own would.
  const Nanos lifetime = limits_.grants.lifetime_max_ns;
  spec.deadline = now + (push.deadline_ms == 0 ? lifetime : std::min(lifetime, Nanos{push.deadline_ms} * kMillisecond));
  // The source knows the id, and so the nonces drawn from it. That gives it no more power than lying in its verdicts does.
  std::memcpy(&spec.nonce_seed, push.id.raw.data(), sizeof spec.nonce_seed);
  spec.wants_checksums = push.wants_checksums;
  spec.remote = std::move(from);
  spec.is_offered = true;
  spec.turn = push.turn;
  spec.is_last = push.is_last;
  if (push.has_notification) spec.notification = push.notification;
  auto transfer = std::make_unique<Transfer>(std::move(spec), limits_.transfers, std::move(claim), now);
  offers_.take(charge.to, charge.cost);
  offer_charges_[push.id] = charge;
  if (has_bug(Bug::notify_before_commit) && push.has_notification) out.push_back(NotifReceived{peer, 0, push.notification});
  transfer->asked_on = session;
  const auto it = operations_.emplace(push.id, std::move(transfer)).first;
  attach(*it->second, session, now, out);
  settle(it, now, out);
}

// Whether an earlier write of this peer, final but not drained here, may still land in the memory of its new write. Then the new
// PUSH is ignored for now; the peer sends it again.
bool Endpoint::is_draining_into(const MemoryClaim& into, const AgentRef& peer) const {
  if (offers_draining_.empty()) return false;
  const std::vector<uint32_t> regions = into.maps();
  return std::any_of(offers_draining_.begin(), offers_draining_.end(), [&](const TransferId& id) {
    const Transfer& transfer = *find_transfer(id);
    if (transfer.peer() != peer) return false;
    const std::vector<uint32_t> filled = transfer.into().maps();
    return std::any_of(filled.begin(), filled.end(), [&](uint32_t region) { return std::binary_search(regions.begin(), regions.end(), region); });
  });
}

void Endpoint::end_offer(const Transfer& transfer, Effects& out) {
  const TransferFinal& outcome = transfer.outcome();
  const TransferId& id = transfer.id();
  const AgentRef& peer = transfer.peer();
  const bool is_committed = outcome.state == TransferState::Committed;
  const std::optional<std::string>& notification = transfer.spec().notification;
  if (is_committed && notification && !has_bug(Bug::notify_before_commit)) out.push_back(NotifReceived{peer, 0, *notification});
  out.push_back(OfferEnded{id, peer, outcome.state, outcome.code, outcome.lane, transfer.into().bytes(0, transfer.done())});
  const OfferCharge charge = offer_charges_.at(id);
  offer_charges_.erase(id);
  offers_draining_.erase(id);
  offers_.give_back(charge.to, charge.cost);
  const Done done{id, outcome.code, outcome.text, transfer.turn(), outcome.blocks_checked};
  remember(id, charge.to, EndedOffer{peer, done});
  // If DONE cannot be sent now, it is sent when the peer asks again. It never goes to another peer that claimed the same name
  // since: the id is the first peer's secret.
  SessionId session = transfer.session();
  if (sessions_.count(session) == 0) session = transfer.asked_on;
  if (sessions_.count(session) == 0) {
    const auto up = up_.find(peer);
    if (up == up_.end()) return;
    const auto proven = std::find_if(up->second.begin(), up->second.end(), [this](SessionId each) { return sessions_.at(each).is_name_proven; });
    session = proven != up->second.end() ? *proven : 0;
  }
  if (session != 0) out.push_back(SendFrame{session, done});
}

// A PUSH that is repeated after its end was forgotten here would count as a new one. So a peer whose pushes end by the thousand
// evicts only its own entries, and when the total limit is reached, the peer with the most entries loses its oldest.
void Endpoint::remember(const TransferId& id, const AgentRef& charged, EndedOffer ended) {
  offers_ended_[id] = std::move(ended);
  auto most = offers_ended_order_.try_emplace(charged).first;
  most->second.push_back(id);
  if (most->second.size() <= quota_of_one(limits_.finished_max)) {
    if (offers_ended_.size() <= limits_.finished_max) return;
    most = std::max_element(offers_ended_order_.begin(), offers_ended_order_.end(),
                            [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  }
  offers_ended_.erase(most->second.front());
  most->second.pop_front();
  if (most->second.empty()) offers_ended_order_.erase(most);
}

void Endpoint::on_done(SessionId session, const AgentRef& peer, const Done& done, Nanos now, Effects& out) {
  PushOperation* push = push_of(peer, done.id);
  if (push == nullptr || !carries(sessions_.at(session), *push)) return;
  push->on_done(done, now, out);
  settle(operations_.find(push->id()), now, out);
}

// REVOKE of a pull counts only from the session that serves it. REVOKE of a push counts from any session of its writer, which may
// have left the session that the push is read on. If REVOKE overtakes its PUSH, which waits in another session, the id is
// remembered as ended, so that the PUSH starts no read beside later writes.
void Endpoint::on_revoke(SessionId session, const AgentRef& peer, const Revoke& revoke, Nanos now, Effects& out) {
  Transfer* transfer = find_transfer(revoke.id);
  const bool is_heard = transfer != nullptr || finished_.count(revoke.id) != 0 || has_met(revoke.id);
  if (!is_heard) return remember(revoke.id, charged_peer(peer), EndedOffer{peer, Done{revoke.id, revoke.code, "ended before it was heard"}});
  if (transfer == nullptr || transfer->peer() != peer) return;
  if (!transfer->is_offered() && transfer->session() != session) return;
  transfer->on_revoke(revoke, now, out);
  settle(operations_.find(revoke.id), now, out);
}

// An own push ended here. Its reader must stop before it hears of the next write, which may use the same memory and come by any
// session: so REVOKE goes over each session that is up, or, where none is, over the next one.
void Endpoint::stop_reader(const PushOperation& push, Nanos now, Effects& out) {
  if (!push.may_be_read()) return;
  UnackedEnd end = unacked_end(push.id(), now);
  end.is_of_push = true;
  const auto up = up_.find(push.peer());
  bool is_sent = false;
  if (up != up_.end()) {
    for (const SessionId id : up->second) {
      Session& session = sessions_.at(id);
      if (!carries_ours(session)) continue;
      send_end_over(id, session, end, now, out);
      is_sent = true;
    }
  }
  if (!is_sent) send_end(push.peer(), end, now, out);
}

// A fetch sends its notification as a message of its own, and so does a push whose notification is too long for PUSH. A
// notification that cannot be queued is reported as failed, under number 0.
void Endpoint::notify_ended(const Operation& operation, const std::optional<std::string>& notification, Nanos now, Effects& out) {
  if (!notification) return;
  notifier_.take_promise_back(operation.peer(), notification->size());
  if (operation.state() != TransferState::Committed) return;
  try {
    notify(operation.peer(), *notification, now, out);
  } catch (const Error& error) {
    out.push_back(NotifFailed{operation.peer(), 0, error.code()});
  }
}

}  // namespace kvxfer
