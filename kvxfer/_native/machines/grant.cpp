#include "grant.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

constexpr size_t kVerdictsMax = 16;

uint32_t to_ms(Nanos ns) { return static_cast<uint32_t>(std::clamp<Nanos>(ns / kMillisecond, 0, UINT32_MAX)); }

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

void GrantTable::grant(const TransferId& id, Ledger& ledger, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns,
                       Nanos now, Effects& out, const Bytes32& content) {
  if (ttl_ns <= 0 || ttl_ns > limits_.life_max_ns) throw Error(Code::invalid_argument, "grant ttl must be above 0 and at most the maximum life");
  if (blocks.empty()) throw Error(Code::invalid_argument, "a grant needs at least one block");
  if (const auto found = grants_.find(id); found != grants_.end()) {
    if (found->second.is_given_up) {
      throw Error(Code::grant_released, "the reader gave this transfer up before the grant was made");
    }
    throw Error(Code::invalid_argument, "this transfer id was used before; a retry needs a new one");
  }
  if (counts_.alive >= limits_.grants_max) throw Error(Code::limit_exceeded, "grants_max (" + std::to_string(limits_.grants_max) + ") is reached");
  ledger.grant(blocks);

  Grant& grant = grants_[id];
  grant.id = id;
  grant.ledger = &ledger;
  grant.blocks = std::move(blocks);
  grant.reader_id = reader;
  grant.content = content;
  grant.life_end = now + limits_.life_max_ns;
  ++counts_.alive;
  set_expiry(grant, now + ttl_ns);

  // Whoever waited is served in the order it came; all but the bound reader are turned away by accept().
  const auto range = waiting_.equal_range(id);
  const std::vector<std::pair<TransferId, Waiting>> waited(range.first, range.second);
  waiting_.erase(range.first, range.second);
  for (const auto& [_, w] : waited) accept(grant, w.session, w.peer, w.pull, now, out);
}

void GrantTable::decline(const TransferId& id, Effects& out) {
  if (grants_.count(id) != 0) throw Error(Code::invalid_argument, "this transfer id has a grant, or had one");
  Grant& grant = grants_[id];
  grant.id = id;
  grant.state = GrantState::Revoked;
  const auto range = waiting_.equal_range(id);
  for (auto it = range.first; it != range.second; ++it) {
    refuse(it->second.session, it->second.pull, Code::grant_revoked, "the source will not make this grant", out);
  }
  waiting_.erase(range.first, range.second);
  bury(id);
}

void GrantTable::ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete, Nanos now, Effects& out) {
  const auto found = grants_.find(id);
  if (found == grants_.end()) throw Error(Code::grant_unknown, "no such grant");
  Grant& grant = found->second;
  // An error drops the effects of its call, so this must not be the call that ends the grant: tick will.
  if (!is_alive(grant, now)) throw Error(code_of(grant.state == GrantState::Alive ? GrantState::Expired : grant.state), "the grant has ended");
  if (blocks > grant.blocks.size()) throw Error(Code::invalid_argument, "more blocks are ready than the grant has");
  if (complete && blocks != grant.blocks.size()) throw Error(Code::invalid_argument, "complete, but not all blocks are ready");
  if (blocks < grant.ready_blocks || (grant.is_complete && !complete)) throw Error(Code::invalid_argument, "ready never takes back");
  grant.state = next_state(grant.state, GrantEvent::Ready);
  grant.ready_blocks = blocks;
  grant.layers = layers;
  grant.is_complete = complete;
  ++grant.seq;
  serve(grant, now, out);
}

GrantState GrantTable::end(const TransferId& id, GrantEvent event, Nanos now, Effects& out) {
  if (event != GrantEvent::Revoke && event != GrantEvent::Release) throw Error(Code::internal, "an owner ends a grant by revoke or release");
  const auto found = grants_.find(id);
  if (found == grants_.end()) throw Error(Code::grant_unknown, "no such grant");
  Grant& grant = found->second;
  lapse(grant, now, out);
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

void GrantTable::refuse(SessionId session, const Pull& pull, Code code, const std::string& text, Effects& out) {
  out.push_back(SendFrame{session, ErrorFrame{pull.id, pull.attempt, code, text}});
}

void GrantTable::on_pull(SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out) {
  if (const auto found = grants_.find(pull.id); found != grants_.end()) {
    lapse(found->second, now, out);
    accept(found->second, session, peer, pull, now, out);
    return;
  }
  const Nanos wait = std::min<Nanos>(Nanos{pull.wait_ms} * kMillisecond, limits_.wait_max_ns);
  if (wait <= 0) return refuse(session, pull, Code::grant_unknown, "no grant for this transfer", out);
  const auto range = waiting_.equal_range(pull.id);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second.peer != peer) continue;
    if (pull.attempt >= it->second.pull.attempt) {  // the same reader asks again: one place in the queue, first deadline kept
      it->second.session = session;
      it->second.pull = pull;
    }
    return;
  }
  if (waiting_.size() >= limits_.waiting_max) return refuse(session, pull, Code::overloaded, "too many pulls wait for their grants", out);
  waiting_.emplace(pull.id, Waiting{session, peer, pull, now + wait});
}

void GrantTable::accept(Grant& grant, SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out) {
  const bool is_stranger = grant.reader ? *grant.reader != peer : (!grant.reader_id.empty() && grant.reader_id != peer.agent_id);
  if (is_stranger) return refuse(session, pull, Code::refused, "this transfer is promised to another reader", out);
  if (!is_alive(grant, now)) return refuse(session, pull, code_of(grant.state), "the grant has ended", out);
  const PoolInfo& pool = grant.ledger->info();
  if (pull.digest != pool.digest || pull.block_bytes != pool.block_bytes) {
    return refuse(session, pull, Code::incompatible, "compatibility records of the two pools differ", out);
  }
  if (pull.content != grant.content && pull.content != Bytes32{} && grant.content != Bytes32{}) {
    return refuse(session, pull, Code::incompatible, "content differs: the two sides do not mean the same tokens", out);
  }
  if (pull.count == 0 || uint64_t{pull.first} + pull.count > grant.blocks.size()) {
    return refuse(session, pull, Code::refused,
                  "blocks " + std::to_string(pull.first) + " to " + std::to_string(uint64_t{pull.first} + pull.count) + " asked of a grant of " +
                      std::to_string(grant.blocks.size()),
                  out);
  }
  if (pull.lane == Lane::Mapped && !pool.is_shareable) {
    return refuse(session, pull, Code::no_lane, "the source pool cannot be mapped (memory not allocated by kvxfer, or exposure is grant)", out);
  }
  if (pull.attempt <= grant.attempt) return;  // a repeat, or of an attempt that was given up
  grant.attempt = pull.attempt;
  grant.reader = peer;
  grant.state = next_state(grant.state, GrantEvent::Pull);
  grant.reading = Reading{};
  grant.reading->session = session;
  grant.reading->pull = pull;
  if (pull.lane == Lane::Mapped) out.push_back(SendMap{session, pool.id});
  serve(grant, now, out);
}

// Tells the reader what is new and, on stream, sends what may be sent; one SendData under way at a time keeps what lies in
// front of a control frame small. Called after every event that can change the answer.
void GrantTable::serve(Grant& grant, Nanos now, Effects& out) {
  if (!grant.reading) return;
  Reading& reading = *grant.reading;
  const Pull& pull = reading.pull;
  const uint32_t end = pull.first + pull.count;
  const uint32_t can_read = std::clamp(grant.ready_blocks, pull.first, end) - pull.first;

  if (!reading.is_told || reading.told_seq != grant.seq) {
    do {
      Ready ready{pull.id, pull.attempt, grant.seq, grant.ready_blocks, grant.layers, static_cast<uint32_t>(grant.blocks.size()),
                  grant.is_complete, to_ms(grant.expiry - now), grant.ledger->info().id, pull.first + reading.ids_told, {}};
      if (is_one_sided(pull.lane)) {
        const uint32_t count = std::min<uint32_t>(can_read - reading.ids_told, kIdsMax);
        const auto from = grant.blocks.begin() + pull.first + reading.ids_told;
        ready.ids.assign(from, from + count);
        reading.ids_told += count;
      }
      out.push_back(SendFrame{reading.session, std::move(ready)});
    } while (is_one_sided(pull.lane) && reading.ids_told < can_read);
    reading.is_told = true;
    reading.told_seq = grant.seq;
  }
  if (is_one_sided(pull.lane)) return;

  if (reading.sending == 0 && reading.sent < can_read) {
    const uint64_t block_bytes = grant.ledger->info().block_bytes;
    const auto limit = static_cast<uint32_t>(std::max<uint64_t>(1, std::min<uint64_t>(limits_.data_bytes_max / block_bytes, UINT32_MAX)));
    const uint32_t count = std::min(can_read - reading.sent, limit);
    const uint32_t first = pull.first + reading.sent;
    reading.sending = count;
    const auto from = grant.blocks.begin() + first;
    out.push_back(SendData{reading.session, Data{pull.id, pull.attempt, first, count, grant.is_complete, count * block_bytes},
                           grant.ledger->info().id, std::vector<uint32_t>(from, from + count)});
  }
  const uint32_t out_of_hands = has_bug(Bug::verdict_before_last_byte) ? reading.sent + reading.sending : reading.sent;
  if (out_of_hands == pull.count && !reading.is_judged) {
    reading.is_judged = true;
    const SessionId session = reading.session;
    const uint64_t nonce = pull.nonce;
    const Code code = judge(grant, nonce, now, out);  // may end the grant, and with it `reading`
    out.push_back(SendFrame{session, Verdict{grant.id, nonce, code}});
  }
}

void GrantTable::data_sent(SessionId session, const TransferId& id, uint32_t attempt, uint32_t count, Nanos now, Effects& out) {
  const auto found = grants_.find(id);
  if (found == grants_.end() || !found->second.reading) return;
  Grant& grant = found->second;
  Reading& reading = *grant.reading;
  if (reading.session != session || reading.pull.attempt != attempt) return;  // of an attempt that was given up
  if (reading.sending != count) throw Error(Code::internal, "data_sent does not match what was to be sent");
  reading.sending = 0;
  reading.sent += count;
  lapse(grant, now, out);
  if (grant.reading) serve(grant, now, out);
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
    // The named reader may give a grant up before it ever asked for a block of it.
    const bool is_reader = grant.reader ? *grant.reader == peer : !grant.reader_id.empty() && grant.reader_id == peer.agent_id;
    if (is_reader) finish(grant, GrantEvent::Release, out);
    return;
  }
  const auto range = waiting_.equal_range(id);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second.peer != peer) continue;
    waiting_.erase(it);
    break;
  }
  if (waiting_.count(id) != 0) return;  // somebody else still wants it
  Grant& grant = grants_[id];           // nobody will read it: the owner learns that when it comes to grant
  grant.id = id;
  grant.state = GrantState::Released;
  grant.is_given_up = true;
  grant.reader = peer;
  bury(id);
}

void GrantTable::on_renew(const AgentRef& peer, const Renew& renew, Nanos now) {
  const auto found = grants_.find(renew.id);
  if (found == grants_.end()) return;
  Grant& grant = found->second;
  if (!grant.reader || *grant.reader != peer || renew.seq <= grant.renew_seq) return;
  if (has_bug(Bug::renew_revives) && !is_alive(grant, now)) {
    if (grant.state != GrantState::Alive) ++counts_.alive;
    grant.state = GrantState::Alive;
    set_expiry(grant, now + limits_.ttl_ns);
    return;
  }
  if (!is_alive(grant, now)) return;
  grant.renew_seq = renew.seq;
  const Nanos ttl = std::min<Nanos>(Nanos{renew.ttl_ms} * kMillisecond, limits_.ttl_ns);
  grant.state = next_state(grant.state, GrantEvent::Renew);
  set_expiry(grant, std::max(grant.expiry, std::min(now + ttl, grant.life_end)));
}

void GrantTable::on_cancel(SessionId session, const Cancel& cancel) {
  const auto found = grants_.find(cancel.id);
  if (found == grants_.end() || !found->second.reading) return;
  const Reading& reading = *found->second.reading;
  if (reading.session == session && reading.pull.attempt <= cancel.attempt) found->second.reading.reset();
}

void GrantTable::session_closed(SessionId session) {
  for (auto it = waiting_.begin(); it != waiting_.end();) it = it->second.session == session ? waiting_.erase(it) : std::next(it);
  for (auto& [_, grant] : grants_) {
    if (grant.reading && grant.reading->session == session) grant.reading.reset();  // the grant itself lives on: the reader may come back
  }
}

void GrantTable::reader_dead(const AgentRef& reader, Nanos now, Effects& out) {
  for (auto it = waiting_.begin(); it != waiting_.end();) it = it->second.peer == reader ? waiting_.erase(it) : std::next(it);
  std::vector<TransferId> dead;
  for (const auto& [id, grant] : grants_) {
    if (grant.state == GrantState::Alive && grant.reader && *grant.reader == reader) dead.push_back(id);
  }
  std::sort(dead.begin(), dead.end());  // the same order whatever the table's hashing: runs replay
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
  grant.ledger->end_grant(grant.blocks);
  grant.blocks = {};
  --counts_.alive;
  switch (grant.state) {
    case GrantState::Released: ++counts_.released; break;
    case GrantState::Expired: ++counts_.expired; break;
    case GrantState::Revoked: ++counts_.revoked; break;
    default: ++counts_.reader_gone; break;
  }
  // A notice that spares the reader useless work; its safety never depends on it arriving.
  if (grant.reading && (grant.state == GrantState::Expired || grant.state == GrantState::Revoked)) {
    out.push_back(SendFrame{grant.reading->session, Revoke{grant.id, code_of(grant.state)}});
  }
  grant.reading.reset();
  out.push_back(GrantEnded{grant.id, grant.state});
  bury(grant.id);
}

void GrantTable::bury(const TransferId& id) {
  tombstones_.push_back(id);
  while (tombstones_.size() > limits_.tombstones_max) {
    grants_.erase(tombstones_.front());
    tombstones_.pop_front();
  }
}

void GrantTable::set_expiry(Grant& grant, Nanos expiry) {
  expiries_.erase({grant.expiry, grant.id});
  grant.expiry = std::min(expiry, grant.life_end);
  expiries_.insert({grant.expiry, grant.id});
}

void GrantTable::tick(Nanos now, Effects& out) {
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    finish(grants_.at(expiries_.begin()->second), GrantEvent::Expire, out);
  }
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (it->second.deadline > now) {
      ++it;
      continue;
    }
    refuse(it->second.session, it->second.pull, Code::grant_unknown, "no grant came in the time that the pull could wait", out);
    it = waiting_.erase(it);
  }
}

Nanos GrantTable::next_deadline() const {
  Nanos next = expiries_.empty() ? kNever : expiries_.begin()->first;
  for (const auto& [_, waiting] : waiting_) next = std::min(next, waiting.deadline);
  return next;
}

GrantCounts GrantTable::counts() const {
  GrantCounts counts = counts_;
  counts.waiting_pulls = waiting_.size();
  return counts;
}

bool GrantTable::has_pool(uint32_t pool) const {
  for (const auto& [_, grant] : grants_) {
    if (grant.state == GrantState::Alive && grant.ledger->info().id == pool) return true;
  }
  return false;
}

}  // namespace kvxfer
