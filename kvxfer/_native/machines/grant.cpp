#include "grant.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer {
namespace {

constexpr size_t kVerdictsMax = 16;
constexpr uint64_t kListsBytesMax = 256ull << 20;  // bytes of the lists of one peer's fetches

// The claim of a grant that a seeded bug revived.
class NoClaim final : public MemoryClaim {
 public:
  uint32_t count() const override { return 0; }
  Extent part(uint32_t, uint32_t) const override { return {}; }
  uint64_t bytes(uint32_t, uint32_t) const override { return 0; }
  uint64_t element_bytes(uint32_t) const override { return 0; }
  std::vector<uint32_t> maps() const override { return {}; }
  const char* obstacle(Lane) const override { return nullptr; }
  void take() override {}
  void give_back() override {}
};

}  // namespace

GrantState next_state(GrantState state, GrantEvent event) {
  if (state != GrantState::Alive) {
    if (event == GrantEvent::Ready) throw Error(Code::internal, "an ended grant cannot become ready");
    return state;
  }
  switch (event) {
    case GrantEvent::Ready:
    case GrantEvent::Pull:
    case GrantEvent::Confirm:
    case GrantEvent::Renew: return GrantState::Alive;
    case GrantEvent::Release: return GrantState::Released;
    case GrantEvent::Revoke: return GrantState::Revoked;
    case GrantEvent::Expire: return GrantState::Expired;
    case GrantEvent::ReaderDead: return GrantState::ReaderGone;
  }
  throw Error(Code::internal, "unlisted grant event");
}

Code code_of(GrantState state) {
  switch (state) {
    case GrantState::Alive: return Code::ok;
    case GrantState::Expired: return Code::grant_expired;
    case GrantState::Revoked: return Code::grant_revoked;
    case GrantState::Released:
    case GrantState::ReaderGone: return Code::grant_released;
  }
  return Code::internal;
}

GrantTable::GrantTable(GrantLimits limits) : limits_(limits), waiting_(limits.waiting_max), intake_(limits.grants_max, limits.unknown_wait_ns), fetches_(limits.grants_max, kListsBytesMax) {}

void GrantTable::check_new(const TransferId& id, const std::string& reader, Nanos ttl_ns) const {
  if (ttl_ns <= 0 || ttl_ns > limits_.lifetime_max_ns) throw Error(Code::invalid_argument, "grant ttl must be above 0 and at most the maximum lifetime");
  check_unused(id, reader);
  check_count();
}

void GrantTable::check_unused(const TransferId& id, const std::string& reader) const {
  const auto found = grants_.find(id);
  if (found == grants_.end()) return;
  if (!found->second.is_aborted) throw Error(Code::invalid_argument, "this transfer id was used before; a retry needs a new one");
  if (found->second.reader->agent_id == reader) throw Error(Code::grant_released, "the reader aborted this transfer before the grant was made");
}

void GrantTable::expect(const TransferId& id, const std::string& reader) {
  check_unused(id, reader);
  intake_.expect(id);
}

bool GrantTable::has_begun(const TransferId& id) const {
  const auto found = grants_.find(id);
  return found != grants_.end() && !found->second.is_of_elements && found->second.has_begun;
}

GrantCounts GrantTable::counts() const {
  GrantCounts counts = counts_;
  counts.waiting_pulls = waiting_.size();
  counts.expected = intake_.size();
  return counts;
}

// Unread grants are grants of blocks that are alive and whose reader has not asked for a block.
void GrantTable::count_unread(const Grant& grant, bool is_unread) {
  if (grant.is_of_elements || grant.has_begun) return;
  counts_.unread += is_unread ? 1 : -1;
  const size_t blocks = grant.promise->claim->count();
  counts_.unread_blocks += is_unread ? blocks : -blocks;
}

// A peer that aborted a pull may not have been the reader that the owner means: a grant that is made or aborted later replaces that
// tombstone.
GrantTable::Grant& GrantTable::add(const TransferId& id) {
  if (grants_.erase(id) != 0) aborted_.erase(std::find(aborted_.begin(), aborted_.end(), id));
  intake_.forget(id);
  Grant& grant = grants_[id];
  grant.id = id;
  grant.serial = next_serial_++;
  return grant;
}

GrantTable::Grant& GrantTable::add_alive(const TransferId& id, std::unique_ptr<MemoryClaim> claim, Nanos now) {
  Grant& grant = add(id);
  grant.promise = std::make_unique<Promise>();
  grant.promise->claim = std::move(claim);
  grant.promise->lifetime_end = now + limits_.lifetime_max_ns;
  ++counts_.alive;
  return grant;
}

void GrantTable::check_count() const {
  if (counts_.alive >= limits_.grants_max) throw Error(Code::limit_exceeded, "grants_max (" + std::to_string(limits_.grants_max) + ") is reached");
}

void GrantTable::check_room(const AgentRef& charged, uint64_t cost) const {
  check_count();
  if (!fetches_.has_room(charged, cost)) throw Error(Code::overloaded, "this peer has too many fetches in progress");
}

void GrantTable::grant(const TransferId& id, Ledger& ledger, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns,
                       Nanos now, Effects& out, const Bytes32& content_digest) {
  if (blocks.empty()) throw Error(Code::invalid_argument, "a grant needs at least one block");
  check_new(id, reader, ttl_ns);
  auto claim = std::make_unique<PromisedBlocks>(ledger, std::move(blocks));
  claim->take();

  Grant& grant = add_alive(id, std::move(claim), now);
  grant.promise->content_digest = content_digest;
  grant.reader_id = reader;
  grant.is_open = reader.empty();
  count_unread(grant, true);
  set_expiry(grant, now + ttl_ns);

  // Waiting pulls are answered in the order in which they came; accept() refuses all but the bound reader's.
  for (const WaitingPull& waited : waiting_.take(id)) accept(grant, waited.session, waited.peer, waited.pull, now, out);
}

Nanos GrantTable::grant_elements(const TransferId& id, std::unique_ptr<MemoryClaim> claim, const AgentRef& reader, const AgentRef& charged, Nanos ttl_ns,
                               uint64_t cost, Nanos now) {
  ttl_ns = std::min(ttl_ns, limits_.lifetime_max_ns);
  check_new(id, reader.agent_id, ttl_ns);
  if (cost != 0) check_room(charged, cost);
  claim->take();
  if (cost != 0) fetches_.take(charged, cost);

  Grant& grant = add_alive(id, std::move(claim), now);
  grant.is_of_elements = true;
  grant.reader = reader;
  Promise& promise = *grant.promise;
  promise.charged = charged;
  promise.cost = cost;
  promise.seq = 1;
  promise.ready_blocks = promise.claim->count();
  promise.is_complete = true;
  set_expiry(grant, now + ttl_ns);
  return promise.lifetime_end;
}

bool GrantTable::is_of_elements(const TransferId& id) const {
  const auto found = grants_.find(id);
  return found != grants_.end() && found->second.is_of_elements;
}

std::string GrantTable::bind(const TransferId& id, const std::string& reader, Nanos now) {
  const auto found = grants_.find(id);
  if (found == grants_.end() || found->second.is_of_elements || found->second.is_aborted) throw Error(Code::grant_unknown, "no such grant");
  Grant& grant = found->second;
  if (grant.reader) return grant.reader->agent_id;
  if (grant.reader_id.empty() && is_alive(grant, now)) grant.reader_id = reader;
  return grant.reader_id;
}

bool GrantTable::is_aborted_by_another(const TransferId& id, const AgentRef& peer) const {
  const auto found = grants_.find(id);
  return found != grants_.end() && found->second.is_aborted && *found->second.reader != peer;
}

bool GrantTable::is_bound_to(const TransferId& id, const AgentRef& peer) const {
  const auto found = grants_.find(id);
  return found != grants_.end() && found->second.reader && *found->second.reader == peer;
}

bool GrantTable::has_reader(const AgentRef& reader) const {
  return waiting_.has_peer(reader) || std::any_of(grants_.begin(), grants_.end(), [&](const auto& grant) {
    return grant.second.state == GrantState::Alive && grant.second.reader && *grant.second.reader == reader;
  });
}

bool GrantTable::has_confirmed(const TransferId& id) const {
  const auto found = grants_.find(id);
  if (found == grants_.end()) return true;
  const auto& verdicts = found->second.verdicts;
  return std::any_of(verdicts.begin(), verdicts.end(), [](const auto& verdict) { return verdict.second == Code::ok; });
}

void GrantTable::revoke_over(uint32_t region, Nanos now, Effects& out) {
  std::vector<TransferId> over;
  for (const auto& [id, grant] : grants_) {
    if (!grant.is_of_elements || !grant.promise) continue;
    const std::vector<uint32_t> regions = grant.promise->claim->maps();
    if (std::binary_search(regions.begin(), regions.end(), region)) over.push_back(id);
  }
  std::sort(over.begin(), over.end());
  for (const TransferId& id : over) end(id, GrantEvent::Revoke, now, out);
}

void GrantTable::abort_grant(const TransferId& id, Effects& out) {
  if (const auto found = grants_.find(id); found != grants_.end() && !found->second.is_aborted) {
    throw Error(Code::invalid_argument, "this transfer id has a grant, or had one");
  }
  add(id).state = GrantState::Revoked;
  for (const WaitingPull& waited : waiting_.take(id)) refuse(waited.session, waited.pull, Code::grant_revoked, "the source will not make this grant", out);
  add_tombstone(tombstones_, limits_.tombstones_max, id);
}

void GrantTable::ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete, Nanos now, Effects& out,
                       const std::vector<uint32_t>& checksums) {
  const auto found = grants_.find(id);
  if (found == grants_.end() || found->second.is_of_elements) throw Error(Code::grant_unknown, "no such grant");
  Grant& grant = found->second;
  // A throw drops the effects of its call, so this call must not end the grant; tick() will.
  if (!is_alive(grant, now)) throw Error(code_of(grant.state == GrantState::Alive ? GrantState::Expired : grant.state), "the grant has ended");
  Promise& promise = *grant.promise;
  const uint32_t total = promise.claim->count();
  if (blocks > total) throw Error(Code::invalid_argument, "more blocks are ready than the grant has");
  if (complete && blocks != total) throw Error(Code::invalid_argument, "complete, but not all blocks are ready");
  if (blocks < promise.ready_blocks || (promise.is_complete && !complete)) throw Error(Code::invalid_argument, "the count of ready blocks never shrinks");
  if (!checksums.empty() && checksums.size() != blocks - promise.ready_blocks) throw Error(Code::invalid_argument, "ready needs one checksum for each new block");
  grant.state = next_state(grant.state, GrantEvent::Ready);
  for (uint32_t i = 0; i < blocks - promise.ready_blocks; ++i) promise.checksums.push_back(checksums.empty() ? std::nullopt : std::optional(checksums[i]));
  promise.ready_blocks = blocks;
  promise.layers = layers;
  promise.is_complete = complete;
  ++promise.seq;
  serve(grant, now, out);
}

std::pair<uint32_t, std::vector<uint32_t>> GrantTable::becoming_ready(const TransferId& id, uint32_t blocks) const {
  const auto found = grants_.find(id);
  if (found == grants_.end() || found->second.is_of_elements || found->second.state != GrantState::Alive) return {};
  const Promise& promise = *found->second.promise;
  const PoolInfo& pool = *promise.claim->pool();
  if (!pool.has_checksums || blocks <= promise.ready_blocks || blocks > promise.claim->count()) return {pool.id, {}};
  const Extent extent = promise.claim->part(promise.ready_blocks, blocks - promise.ready_blocks);
  const auto begin = extent.ids->begin() + extent.first;
  return {pool.id, std::vector<uint32_t>(begin, begin + extent.count)};
}

GrantState GrantTable::end(const TransferId& id, GrantEvent event, Nanos now, Effects& out, const std::string& why) {
  if (event != GrantEvent::Revoke && event != GrantEvent::Release) throw Error(Code::internal, "an owner ends a grant by revoke or release");
  const auto found = grants_.find(id);
  if (found == grants_.end()) throw Error(Code::grant_unknown, "no such grant");
  Grant& grant = found->second;
  lapse(grant, now, out);
  if (grant.state == GrantState::Alive) grant.why = why.substr(0, kTextMax);
  finish(grant, event, out);
  return grant.state;
}

std::optional<GrantState> GrantTable::state(const TransferId& id, Nanos now) const {
  const auto found = grants_.find(id);
  if (found == grants_.end()) return std::nullopt;
  const Grant& grant = found->second;
  if (grant.state == GrantState::Alive && !is_alive(grant, now)) return GrantState::Expired;
  return grant.state;
}

bool GrantTable::is_alive(const TransferId& id, uint64_t serial, Nanos now) const {
  const auto found = grants_.find(id);
  return found != grants_.end() && (serial == 0 || serial == found->second.serial) && is_alive(found->second, now);
}

void GrantTable::on_pull(SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out) {
  if (const auto found = grants_.find(pull.id); found != grants_.end() && !is_aborted_by_another(pull.id, peer)) {
    lapse(found->second, now, out);
    accept(found->second, session, peer, pull, now, out);
    return;
  }
  const Nanos wait = Nanos{pull.wait_ms} * kMillisecond;
  if (wait <= 0) return refuse(session, pull, Code::grant_unknown, "no grant for this transfer", out);
  WaitingPull* waiting = waiting_.add(session, peer, pull, now + wait, now + limits_.wait_max_ns, now, intake_.rounds());
  if (waiting == nullptr) return refuse(session, pull, Code::overloaded, "too many pulls wait for their grants", out);
  tell(*waiting, now, out);
}

void GrantTable::accept(Grant& grant, SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out) {
  const bool is_other_reader = grant.reader ? *grant.reader != peer : (!grant.reader_id.empty() && grant.reader_id != peer.agent_id);
  if (is_other_reader) {
    if (!grant.is_open) count_refusal();  // the second reader of an open grant did nothing forbidden
    out.push_back(SendFrame{session, ErrorFrame{pull.id, pull.attempt, Code::refused, "this transfer is promised to another reader"}});
    return;
  }
  if (!is_alive(grant, now)) {
    return refuse(session, pull, code_of(grant.state), grant.why.empty() ? "the grant has ended" : "the grant has ended: " + grant.why, out);
  }
  Promise& promise = *grant.promise;
  const MemoryClaim& claim = *promise.claim;
  if (claim.pool() != nullptr && (pull.digest != claim.pool()->digest || pull.block_bytes != claim.pool()->block_bytes)) {
    return refuse(session, pull, Code::incompatible, "compatibility records of the two pools differ", out);
  }
  if (pull.content_digest != promise.content_digest && pull.content_digest != Bytes32{} && promise.content_digest != Bytes32{}) {
    return refuse(session, pull, Code::incompatible, "content digests differ: the two sides do not mean the same tokens", out);
  }
  if ((pull.count == 0 && grant.is_of_elements) || uint64_t{pull.first} + pull.count > claim.count()) {
    return refuse(session, pull, Code::refused,
                  "blocks " + std::to_string(pull.first) + " to " + std::to_string(uint64_t{pull.first} + pull.count) + " asked of a grant of " +
                      std::to_string(claim.count()),
                  out);
  }
  if (const char* why = claim.obstacle(pull.lane)) return refuse(session, pull, Code::no_lane, why, out);
  if (pull.attempt <= grant.attempt) return;  // a repeat, or of an attempt that its reader has left
  grant.attempt = pull.attempt;
  count_unread(grant, false);
  grant.has_begun = pull.count != 0;
  count_unread(grant, true);
  grant.reader = peer;
  grant.state = next_state(grant.state, GrantEvent::Pull);
  promise.reading = Reading{};
  promise.reading->session = session;
  promise.reading->pull = pull;
  if (needs_map(pull.lane)) {
    for (const uint32_t id : claim.maps()) out.push_back(SendMap{session, id, pull.lane});
  }
  serve(grant, now, out);
}

Code GrantTable::judge(Grant& grant, uint64_t nonce, Nanos now, Effects& out) {
  for (const auto& [known, code] : grant.verdicts) {
    if (known == nonce) return code;
  }
  lapse(grant, now, out);
  grant.state = next_state(grant.state, GrantEvent::Confirm);
  const Code code = is_alive(grant, now) ? Code::ok : code_of(grant.state);
  ++(code == Code::ok ? counts_.verdicts_ok : counts_.verdicts_refused);
  if (grant.verdicts.size() >= kVerdictsMax) grant.verdicts.erase(grant.verdicts.begin());
  grant.verdicts.emplace_back(nonce, code);
  return code;
}

void GrantTable::on_confirm(SessionId session, const AgentRef& peer, const Confirm& confirm, Nanos now, Effects& out) {
  const auto found = grants_.find(confirm.id);
  Code code = Code::grant_unknown;
  if (found != grants_.end()) {
    Grant& grant = found->second;
    code = grant.reader && *grant.reader == peer ? judge(grant, confirm.nonce, now, out) : Code::refused;
  }
  out.push_back(SendFrame{session, Verdict{confirm.id, confirm.nonce, code}});
}

void GrantTable::on_release(const AgentRef& peer, const TransferId& id, Nanos now, Effects& out) {
  const auto found = grants_.find(id);
  if (found != grants_.end()) {
    Grant& grant = found->second;
    lapse(grant, now, out);
    // The named reader may release a grant before it has asked for a block.
    const bool is_reader = grant.reader ? *grant.reader == peer : !grant.reader_id.empty() && grant.reader_id == peer.agent_id;
    if (is_reader) finish(grant, GrantEvent::Release, out);
    return;
  }
  waiting_.drop(id, peer);
  if (waiting_.has(id)) return;  // another peer still wants it
  Grant& grant = grants_[id];    // no peer will read it: grant() tells the owner
  grant.id = id;
  grant.state = GrantState::Released;
  grant.is_aborted = true;
  grant.reader = peer;
  add_tombstone(aborted_, peer_tombstones_max(), id);
}

void GrantTable::on_renew(const AgentRef& peer, const Renew& renew, Nanos now) {
  const auto found = grants_.find(renew.id);
  if (found == grants_.end()) return;
  Grant& grant = found->second;
  if (!grant.reader || *grant.reader != peer || renew.seq <= grant.renew_seq) return;
  if (has_bug(Bug::renew_revives) && !is_alive(grant, now)) {
    if (grant.state != GrantState::Alive) {
      ++counts_.alive;
      grant.promise = std::make_unique<Promise>();
      grant.promise->claim = std::make_unique<NoClaim>();
      grant.promise->lifetime_end = now + limits_.lifetime_max_ns;
      count_unread(grant, true);
    }
    grant.state = GrantState::Alive;
    set_expiry(grant, now + limits_.ttl_ns);
    return;
  }
  if (!is_alive(grant, now)) return;
  grant.renew_seq = renew.seq;
  const Nanos ttl = std::min<Nanos>(Nanos{renew.ttl_ms} * kMillisecond, limits_.ttl_ns);
  grant.state = next_state(grant.state, GrantEvent::Renew);
  set_expiry(grant, std::max(grant.expiry, std::min(now + ttl, grant.promise->lifetime_end)));
}

void GrantTable::on_cancel(SessionId session, const Cancel& cancel) {
  const auto found = grants_.find(cancel.id);
  if (found == grants_.end()) return;
  const Reading* reading = reading_of(found->second);
  if (reading != nullptr && reading->session == session && reading->pull.attempt <= cancel.attempt) found->second.promise->reading.reset();
}

void GrantTable::session_closed(SessionId session, Nanos now) {
  waiting_.session_closed(session, now + limits_.away_max_ns);
  for (auto& [_, grant] : grants_) {
    const Reading* reading = reading_of(grant);
    if (reading != nullptr && reading->session == session) grant.promise->reading.reset();  // the grant itself stays: the reader may come back
  }
}

void GrantTable::reader_dead(const AgentRef& reader, Nanos now, Effects& out) {
  waiting_.take_if([&](const WaitingPull& waiting) { return waiting.peer == reader; });
  std::vector<TransferId> dead;
  for (const auto& [id, grant] : grants_) {
    if (grant.state == GrantState::Alive && grant.reader && *grant.reader == reader) dead.push_back(id);
  }
  std::sort(dead.begin(), dead.end());  // an order that does not depend on the table's hashing, so that runs replay
  for (const TransferId& id : dead) {
    Grant& grant = grants_.at(id);
    lapse(grant, now, out);
    finish(grant, GrantEvent::ReaderDead, out);
  }
}

void GrantTable::lapse(Grant& grant, Nanos now, Effects& out) {
  if (grant.state == GrantState::Alive && now >= grant.expiry) finish(grant, GrantEvent::Expire, out);
}

void GrantTable::finish(Grant& grant, GrantEvent event, Effects& out) {
  if (grant.state != GrantState::Alive) return;
  grant.state = next_state(grant.state, event);
  expiries_.erase({grant.expiry, grant.id});
  count_unread(grant, false);
  const std::unique_ptr<Promise> promise = std::move(grant.promise);
  promise->claim->give_back();
  if (promise->cost != 0) fetches_.give_back(promise->charged, promise->cost);
  --counts_.alive;
  switch (grant.state) {
    case GrantState::Released: ++counts_.released; break;
    case GrantState::Expired: ++counts_.expired; break;
    case GrantState::Revoked: ++counts_.revoked; break;
    default: ++counts_.reader_gone; break;
  }
  // This notice only spares the reader useless work; safety does not depend on its arrival.
  if (promise->reading && (grant.state == GrantState::Expired || grant.state == GrantState::Revoked)) {
    out.push_back(SendFrame{promise->reading->session, Revoke{grant.id, code_of(grant.state), grant.why}});
  }
  if (grant.is_of_elements) return add_tombstone(ended_of_elements_, peer_tombstones_max(), grant.id);
  out.push_back(GrantEnded{grant.id, grant.state});
  add_tombstone(tombstones_, limits_.tombstones_max, grant.id);
}

void GrantTable::add_tombstone(std::deque<TransferId>& tombstones, size_t max, const TransferId& id) {
  tombstones.push_back(id);
  while (tombstones.size() > max) {
    grants_.erase(tombstones.front());
    tombstones.pop_front();
  }
}

void GrantTable::set_expiry(Grant& grant, Nanos expiry) {
  expiries_.erase({grant.expiry, grant.id});
  grant.expiry = std::min(expiry, grant.promise->lifetime_end);
  expiries_.insert({grant.expiry, grant.id});
}

void GrantTable::tick(Nanos now, Effects& out) {
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    finish(grants_.at(expiries_.begin()->second), GrantEvent::Expire, out);
  }
  for (const WaitingPull& waited : waiting_.take_if([&](const WaitingPull& waiting) { return waiting.deadline <= now; })) {
    refuse(waited.session, waited.pull, Code::grant_unknown, "no grant came in the time that the pull could wait", out);
  }
  for (const WaitingPull& waited : waiting_.take_if([&](const WaitingPull& waiting) {
         if (waiting.is_away()) return waiting.away_until <= now;
         if (waiting.tell_at > now) return false;
         const bool is_too_long = waiting.unasked_until <= now && !intake_.expects(waiting.pull.id);
         return is_too_long || intake_.is_unknown(waiting.pull.id, waiting.came_at, waiting.rounds_before, now);
       })) {
    refuse(waited.session, waited.pull, Code::grant_unknown, "the source's engine was never asked for this prompt", out);
  }
  waiting_.each([&](WaitingPull& waiting) {
    if (!waiting.is_away() && waiting.tell_at <= now) tell(waiting, now, out);
  });
}

Nanos GrantTable::next_deadline() const { return std::min(expiries_.empty() ? kNever : expiries_.begin()->first, waiting_.next_deadline()); }

}  // namespace kvxfer
