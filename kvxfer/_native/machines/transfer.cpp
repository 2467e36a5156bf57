#include "transfer.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

constexpr Nanos kDialBackoff = 20 * kMillisecond;
constexpr Nanos kDialBackoffMax = 500 * kMillisecond;
constexpr Nanos kRenewGapMin = 10 * kMillisecond;
constexpr uint32_t kSilencesMax = 4;

}  // namespace

TransferState next_state(TransferState state, TransferEvent event) {
  using S = TransferState;
  using E = TransferEvent;
  if (is_final(state)) return state;
  switch (event) {
    case E::SessionLost: return S::Connecting;
    case E::Fail: return S::Failed;
    case E::Cancel: return S::Cancelled;
    case E::SessionUp:
      if (state == S::Connecting) return S::Waiting;
      break;
    case E::SessionUpLanded:
      if (state == S::Connecting) return S::Confirming;
      break;
    case E::Heard:
      if (state == S::Waiting) return S::Reading;
      if (state == S::Reading || state == S::Confirming) return state;
      break;
    case E::Landed:
      if (state == S::Reading || state == S::Connecting) return state;
      break;
    case E::LandedAll:
      if (state == S::Reading) return S::Confirming;
      if (state == S::Connecting) return state;
      break;
    case E::VerdictOk:
      if (state == S::Confirming) return S::Committed;
      break;
  }
  throw Error(Code::internal, "impossible transfer event " + std::to_string(static_cast<int>(event)) + " in state " +
                                  std::to_string(static_cast<int>(state)));
}

Transfer::Transfer(TransferSpec spec, TransferLimits limits, Ledger& ledger, Nanos now)
    : spec_(std::move(spec)), limits_(limits), ledger_(&ledger), nonce_state_(spec_.nonce_seed), heard_at_(now), dial_at_(now),
      unreachable_since_(now), posted_at_(now) {
  if (spec_.blocks.empty()) throw Error(Code::invalid_argument, "a pull needs at least one block");
  if (spec_.lanes.empty()) throw Error(Code::no_lane, "no lane is allowed for this pull");
  if (spec_.deadline <= now) throw Error(Code::invalid_argument, "the deadline has passed already");
  ledger_->reserve(spec_.blocks);
}

// splitmix64: distinct for every step of one seed, which is all that a nonce needs beside an unguessable start.
uint64_t Transfer::draw_nonce() {
  uint64_t z = (nonce_state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

void Transfer::session_up(SessionId session, Nanos now, Effects& out) {
  if (is_final(state_)) return;
  session_ = session;
  dials_failed_ = 0;
  unreachable_code_ = Code::peer_gone;
  unreachable_text_.clear();
  heard_at_ = now;
  silences_ = 0;
  unreachable_since_ = kNever;
  if (done_ == total()) {
    move(TransferEvent::SessionUpLanded);
    return ask_verdict(false, now, out);
  }
  move(TransferEvent::SessionUp);
  ask(now, out);
}

// A new attempt: asks for what has not landed.
void Transfer::ask(Nanos now, Effects& out) {
  ++attempt_;
  attempt_nonce_ = draw_nonce();
  known_base_ = done_;
  known_.clear();
  heard_at_ = now;
  const PoolInfo& pool = ledger_->info();
  send(Pull{spec_.id, attempt_, attempt_nonce_, lane(), spec_.first + done_, total() - done_, pool.block_bytes, pool.digest, limits_.wait_ms, spec_.content}, out);
}

void Transfer::session_lost(Nanos now, Effects&) {
  if (is_final(state_)) {
    session_ = 0;
    return;
  }
  move(TransferEvent::SessionLost);
  session_ = 0;
  if (unreachable_since_ == kNever) unreachable_since_ = now;
  dial_at_ = now;
}

void Transfer::dial_failed(Code code, const std::string& text, Nanos now, Effects& out) {
  if (is_final(state_) || session_ != 0) return;
  // A Unix socket that is not there for us stays away; an owner that does not know us yet will hear of us.
  const bool is_closed_to_us = session_kind(lane()) == SessionKind::Unix && code != Code::unauthenticated;
  if (is_closed_to_us && (code == Code::no_lane || lane_ + 1 < spec_.lanes.size())) return next_lane(text, now, out);
  unreachable_code_ = code == Code::unauthenticated ? code : Code::peer_gone;
  unreachable_text_ = ": " + text;
  if (now - unreachable_since_ >= limits_.reconnect_ns) return fail(unreachable_code_, "cannot reach the source" + unreachable_text_, now, out);
  dial_at_ = now + std::min(kDialBackoff << std::min(dials_failed_++, 16u), kDialBackoffMax);
}

void Transfer::next_lane(const std::string& why, Nanos now, Effects& out) {
  if (!lane_notes_.empty()) lane_notes_ += "; ";
  lane_notes_ += why;
  if (lane_ + 1 == spec_.lanes.size()) return fail(Code::no_lane, "no lane joins this pair: " + lane_notes_, now, out);
  if (session_ != 0) {
    send(Cancel{spec_.id, attempt_}, out);
    move(TransferEvent::SessionLost);
    session_ = 0;
  }
  ++lane_;
  dial_at_ = now;
  unreachable_since_ = now;
}

void Transfer::on_ready(const Ready& ready, Nanos now, Effects& out) {
  if (is_final(state_) || state_ == TransferState::Connecting || ready.attempt != attempt_) return;
  heard_at_ = now;
  if (uint64_t{spec_.first} + total() > ready.total) {
    return fail(Code::refused, "the grant has " + std::to_string(ready.total) + " blocks, fewer than were asked for", now, out);
  }
  move(TransferEvent::Heard);
  const Nanos left = Nanos{ready.ttl_ms} * kMillisecond;
  source_ttl_ = std::max(source_ttl_, left);
  renew_at_ = std::min(is_granted_ ? renew_at_ : kNever, now + left / 3);
  is_granted_ = true;
  is_complete_ = is_complete_ || ready.complete;
  remote_pool_ = ready.pool;
  if (is_one_sided(lane())) {
    const uint64_t next = uint64_t{spec_.first} + known_base_ + known_.size();
    if (ready.ids_first <= next) {  // a gap would mean a lost frame: the next attempt tells everything again
      const uint64_t skip = next - ready.ids_first;
      for (uint64_t i = skip; i < ready.ids.size() && known_base_ + known_.size() < total(); ++i) known_.push_back(ready.ids[i]);
    }
    read_on(now, out);
  }
}

void Transfer::begin_read(uint32_t count, Nanos now) {
  reading_ = count;
  ++token_;
  read_began_at_ = now;
  if (first_read_at_ == 0) first_read_at_ = now;
}

uint32_t Transfer::end_read(Nanos now) {
  const uint32_t count = reading_;
  reading_ = 0;
  reading_ns_ += now - read_began_at_;
  return count;
}

void Transfer::read_on(Nanos now, Effects& out) {
  if (!is_one_sided(lane()) || state_ != TransferState::Reading || reading_ != 0) return;
  const auto known_end = static_cast<uint32_t>(known_base_ + known_.size());
  if (known_end <= done_) return;
  const uint64_t block_bytes = ledger_->info().block_bytes;
  const auto limit = static_cast<uint32_t>(std::max<uint64_t>(1, std::min<uint64_t>(limits_.read_bytes_max / block_bytes, UINT32_MAX)));
  begin_read(std::min(known_end - done_, limit), now);
  const auto from = known_.begin() + (done_ - known_base_);
  const auto to = spec_.blocks.begin() + done_;
  out.push_back(ReadBlocks{spec_.id, token_, session_, remote_pool_, std::vector<uint32_t>(from, from + reading_), ledger_->info().id,
                           std::vector<uint32_t>(to, to + reading_)});
}

std::vector<uint32_t> Transfer::on_data(const Data& data, Nanos now, uint64_t& token) {
  if (is_final(state_) || is_one_sided(lane()) || data.attempt != attempt_ || reading_ != 0) return {};
  if (state_ != TransferState::Waiting && state_ != TransferState::Reading) return {};
  if (data.first != spec_.first + done_ || data.count == 0 || data.count > total() - done_) return {};
  if (data.payload_bytes != data.count * ledger_->info().block_bytes) return {};
  move(TransferEvent::Heard);
  heard_at_ = now;
  silences_ = 0;
  begin_read(data.count, now);
  reading_is_complete_ = data.complete;
  token = token_;
  const auto to = spec_.blocks.begin() + done_;
  return std::vector<uint32_t>(to, to + reading_);
}

void Transfer::landed(uint64_t token, Nanos now, Effects& out) {
  if (reading_ == 0 || token != token_) throw Error(Code::internal, "a read landed that was not under way");
  const uint32_t count = end_read(now);
  if (is_final(state_)) return drain(out);
  if (session_ == 0) dial_at_ = now;
  heard_at_ = now;
  silences_ = 0;
  last_landed_at_ = now;
  const bool is_after = is_one_sided(lane()) ? is_complete_ : reading_is_complete_;
  if (!is_after) before_complete_ += count;
  done_ += count;
  move(done_ == total() ? TransferEvent::LandedAll : TransferEvent::Landed);
  out.push_back(TransferProgress{spec_.id, state_, done_, total()});
  if (has_bug(Bug::skip_confirm) && done_ == total()) {
    state_ = TransferState::Confirming;
    return finish(TransferEvent::VerdictOk, Code::ok, "", now, out);
  }
  if (state_ == TransferState::Confirming && is_one_sided(lane())) return ask_verdict(true, now, out);
  read_on(now, out);
}

void Transfer::stopped(uint64_t token, Code code, const std::string& text, Nanos now, Effects& out) {
  if (reading_ == 0 || token != token_) throw Error(Code::internal, "a read stopped that was not under way");
  end_read(now);
  if (is_final(state_)) return drain(out);
  if (code == Code::no_lane) return next_lane(text, now, out);
  heard_at_ = now;
  if (session_ == 0) dial_at_ = now;
  // The session is gone or about to go; the attempt after it asks for these blocks again.
}

// A nonce made now is made after the last read. A question whose answer was lost is asked again with the same nonce.
void Transfer::ask_verdict(bool is_fresh, Nanos now, Effects& out) {
  if (is_fresh || asked_.empty()) asked_.push_back(draw_nonce());
  heard_at_ = now;
  send(Confirm{spec_.id, asked_.back()}, out);
}

void Transfer::on_verdict(const Verdict& verdict, Nanos now, Effects& out) {
  if (is_final(state_)) return;
  const bool is_trailer = !is_one_sided(lane()) && verdict.nonce == attempt_nonce_;
  const bool is_asked = std::find(asked_.begin(), asked_.end(), verdict.nonce) != asked_.end();
  if (!is_trailer && !is_asked) return;  // of an attempt that was given up
  heard_at_ = now;
  if (verdict.code != Code::ok) return fail(verdict.code, "the source did not confirm", now, out);
  if (state_ == TransferState::Confirming) finish(TransferEvent::VerdictOk, Code::ok, "", now, out);
}

void Transfer::on_error(const ErrorFrame& error, Nanos now, Effects& out) {
  if (is_final(state_) || state_ == TransferState::Connecting || error.attempt != attempt_) return;
  if (error.code == Code::no_lane && reading_ == 0) return next_lane(printable(error.text), now, out);
  fail(error.code == Code::ok ? Code::protocol : error.code, printable(error.text), now, out);
}

void Transfer::on_revoke(const Revoke& revoke, Nanos now, Effects& out) {
  fail(revoke.code == Code::ok ? Code::protocol : revoke.code, "the source ended the grant", now, out);
}

void Transfer::cancel(Nanos now, Effects& out) { finish(TransferEvent::Cancel, Code::cancelled, "cancelled", now, out); }

void Transfer::fail(Code code, const std::string& text, Nanos now, Effects& out) { finish(TransferEvent::Fail, code, text, now, out); }

void Transfer::finish(TransferEvent event, Code code, const std::string& text, Nanos now, Effects& out) {
  if (is_final(state_)) return;
  move(event);
  if (state_ == TransferState::Committed && !has_bug(Bug::skip_confirm) && (done_ != total() || reading_ != 0)) {
    throw Error(Code::internal, "commit of a transfer that has not landed");
  }
  if (session_ != 0) send(Release{spec_.id}, out);
  ledger_->quarantine(spec_.blocks);
  const Nanos first = first_read_at_ == 0 ? now : first_read_at_;
  const Nanos last = last_landed_at_ == 0 ? first : last_landed_at_;
  out.push_back(TransferFinal{spec_.id, state_, code, text, lane(), lane_notes_, attempt_, done_, before_complete_, first - posted_at_,
                              reading_ns_, now - last});
  if (reading_ == 0 || has_bug(Bug::free_before_drain)) drain(out);
}

void Transfer::drain(Effects& out) {
  if (is_given_back_) {  // only the bug gives back early
    is_drained_ = reading_ == 0;
    return;
  }
  is_given_back_ = true;
  is_drained_ = reading_ == 0;
  ledger_->give_back(spec_.blocks);
  out.push_back(TransferDrained{spec_.id});
}

void Transfer::tick(Nanos now, Effects& out) {
  if (is_final(state_)) return;
  if (now >= spec_.deadline) return fail(Code::deadline, "the deadline passed", now, out);
  if (session_ == 0) {
    if (now - unreachable_since_ >= limits_.reconnect_ns && reading_ == 0) {
      fail(unreachable_code_, "cannot reach the source" + unreachable_text_, now, out);
    }
    return;
  }
  if (is_granted_ && now >= renew_at_) {
    renew_at_ = now + std::max(std::min(limits_.ttl_ns, source_ttl_) / 3, kRenewGapMin);
    send(Renew{spec_.id, ++renew_seq_, static_cast<uint32_t>(limits_.ttl_ns / kMillisecond)}, out);
  }
  if (reading_ == 0 && now - heard_at_ >= patience()) {
    ++silences_;
    if (state_ == TransferState::Confirming) {
      ask_verdict(false, now, out);
    } else {
      ask(now, out);
    }
  }
}

// Asking again makes the source send again. On a wire that is only slow, and shared with others, that would throw away
// what is under way, for ever: so each question that brought no bytes is given twice as long as the one before.
Nanos Transfer::patience() const { return limits_.stall_ns << std::min(silences_, kSilencesMax); }

Nanos Transfer::wake_at() const {
  if (is_final(state_)) return kNever;
  Nanos at = spec_.deadline;
  if (session_ == 0) {
    if (reading_ == 0) at = std::min({at, unreachable_since_ + limits_.reconnect_ns, dial_at_});
    return at;
  }
  if (is_granted_) at = std::min(at, renew_at_);
  if (reading_ == 0) at = std::min(at, heard_at_ + patience());
  return at;
}

}  // namespace kvxfer
