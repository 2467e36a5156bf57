#include "transfer.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer {
namespace {

constexpr Nanos kRenewGapMin = 10 * kMillisecond;
constexpr size_t kAskedMax = 16;    // nonces of questions for a verdict, of which one may still be answered
constexpr uint32_t kReasksMax = 4;  // a source that never knows the question would make us ask for ever

Operation::Route route_of(const TransferSpec& spec) { return {spec.id, spec.source, spec.lanes, spec.deadline, spec.is_offered}; }

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
    case E::Granted:
      if (state == S::Waiting || state == S::Granted) return S::Granted;
      break;
    case E::Reserved:
      if (state == S::Connecting) return state;
      if (state == S::Waiting || state == S::Granted) return S::Waiting;
      break;
    case E::Known:
      if (state == S::Waiting || state == S::Reading) return S::Reading;
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

Transfer::Transfer(TransferSpec spec, TransferLimits limits, std::unique_ptr<MemoryClaim> into, Nanos now)
    : Operation(route_of(spec), limits, now), spec_(std::move(spec)), into_(std::move(into)), nonce_state_(spec_.nonce_seed) {
  if (total() == 0) throw Error(Code::invalid_argument, "a transfer needs at least one block");
  if (needs_checksums()) spec_.wants_checksums = true;
  is_complete_ = knows_elements();
  into_->take();
}

// splitmix64: distinct for every step of one seed, which is all that a nonce needs beside an unguessable start.
uint64_t Transfer::draw_nonce() {
  uint64_t z = (nonce_state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

void Transfer::on_session(Nanos now, Effects& out) {
  if (done_ == total()) {
    move(TransferEvent::SessionUpLanded);
    // All elements landed before the source said that it knows the fetch, and FETCH may have been lost. It is sent again, so that the
    // source can confirm. On a one-sided lane the source only registers the fetch. On the others the source sends what FETCH names,
    // which is at least one element: the last.
    if (is_fetch() && !is_granted_) ask(is_one_sided(lane()) ? 0 : total() - 1, now, out);
    return ask_verdict(false, now, out);
  }
  move(TransferEvent::SessionUp);
  engine_lived_at_ = now;  // until its agent reports; a lost session does not change it
  has_heard_of_engine_ = false;
  ask(done_, now, out);
}

// Begins a new attempt: asks the source for the positions from `first` on. What the source announced to earlier attempts is dropped,
// because it announces everything again.
void Transfer::ask(uint32_t first, Nanos now, Effects& out) {
  ++attempt_;
  attempt_nonce_ = draw_nonce();
  has_zero_copy_ = false;
  known_base_ = done_;
  known_.clear();
  known_checksums_.clear();
  heard_at_ = now;
  const uint32_t count = into_->has_memory() ? total() - first : 0;
  Pull pull{spec_.id, attempt_, attempt_nonce_, lane(), spec_.first + first, count, 0, {}, 0, spec_.content_digest, spec_.wants_checksums};
  if (!knows_elements()) {
    pull.block_bytes = into_->pool()->block_bytes;
    pull.digest = into_->pool()->digest;
    // A little more than it will wait: the reader itself ends the wait.
    const Nanos wait = route_.deadline == kNever ? kNever : route_.deadline - now + limits_.stall_ns;
    pull.wait_ms = static_cast<uint32_t>(std::clamp<Nanos>(wait / kMillisecond, 1, UINT32_MAX));
  }
  if (is_fetch()) {
    send(Fetch{pull, to_wire(spec_.remote)}, out);
  } else {
    send(pull, out);
  }
  if (!knows_elements() || !is_one_sided(lane()) || !is_mapped_ || state_ == TransferState::Confirming) return;
  move(TransferEvent::Known);
  read_on(now, out);
}

void Transfer::ask_again(Nanos now, Effects& out) {
  if (!gone_text_.empty()) return on_gone(now, out);
  if (state_ == TransferState::Confirming) {
    ask_verdict(false, now, out);
  } else {
    ask(done_, now, out);
  }
}

void Transfer::on_ready(const Ready& ready, Nanos now, Effects& out) {
  if (is_final(state_) || state_ == TransferState::Connecting || ready.attempt != attempt_) return;
  heard_at_ = now;
  if (uint64_t{spec_.first} + total() > ready.total) {
    return fail(Code::refused, "the grant has " + std::to_string(ready.total) + " blocks, fewer than were asked for", now, out);
  }
  if (!into_->has_memory()) silences_ = 0;  // a pull without blocks asked only whether the grant exists: this is the whole answer
  const bool is_news = state_ == TransferState::Waiting && (!into_->has_memory() || (spec_.tells_granted && !is_granted_));
  move(into_->has_memory() ? TransferEvent::Heard : TransferEvent::Granted);
  const Nanos left = Nanos{ready.ttl_ms} * kMillisecond;
  source_ttl_ = std::max(source_ttl_, left);
  renew_at_ = std::min(is_granted_ ? renew_at_ : kNever, now + left / 3);
  if (!is_granted_ && spec_.granted_ns != 0) route_.deadline = now + spec_.granted_ns;
  is_granted_ = true;
  is_complete_ = is_complete_ || ready.complete;
  if (is_news) tell(TransferGranted{spec_.id}, out);
  if (!into_->has_memory()) return;
  if (!is_one_sided(lane())) return;
  if (!knows_elements()) {
    remote_pool_ = ready.pool;
    const uint64_t next = uint64_t{spec_.first} + known_base_ + known_.size();
    if (ready.ids_first <= next) {  // a gap would mean a lost frame: the next attempt gets all ids again
      for (uint64_t i = next - ready.ids_first; i < ready.ids.size() && known_base_ + known_.size() < total(); ++i) {
        known_.push_back(ready.ids[i]);
        known_checksums_.push_back(i < ready.checksums.size() ? std::optional(ready.checksums[i]) : std::nullopt);
      }
    }
  }
  read_on(now, out);
}

void Transfer::on_queued(const Queued& queued, Nanos now, Effects& out) {
  if (state_ != TransferState::Waiting || queued.attempt != attempt_ || is_granted_ || knows_elements()) return;
  heard_at_ = now;
  silences_ = 0;
  is_queued_ = queued.is_known;
  const Nanos age = queued.has_work ? Nanos{queued.age_ms} * kMillisecond : 0;
  engine_lived_at_ = has_heard_of_engine_ ? std::max(engine_lived_at_, now - age) : now - age;
  has_heard_of_engine_ = true;
  if (now >= engine_deadline()) on_engine_silent(now, out);
}

Nanos Transfer::engine_deadline() const {
  const bool is_waiting = state_ == TransferState::Waiting && !is_granted_ && !knows_elements();
  return is_waiting ? engine_lived_at_ + limits_.engine_silent_ns : kNever;
}

void Transfer::on_engine_silent(Nanos now, Effects& out) {
  fail(Code::peer_gone, "the source's engine has work and sent no heartbeat for " + std::to_string((now - engine_lived_at_) / kMillisecond) + " ms", now, out);
}

const char* Transfer::deadline_word() const {
  if (knows_elements() || spec_.granted_ns == 0 || is_granted_) return "the deadline passed";
  return "no grant came in the time that the request allows";
}

void Transfer::reserve(std::unique_ptr<MemoryClaim> blocks, uint32_t first, Nanos now, Effects& out) {
  if (is_final(state_) || into_->has_memory()) throw Error(Code::invalid_argument, "this transfer has ended, or has blocks");
  blocks->take();
  into_ = std::move(blocks);
  spec_.first = first;
  move(TransferEvent::Reserved);
  if (session_ != 0) ask(done_, now, out);
}

bool Transfer::can_unreserve() const {
  const bool is_early = state_ == TransferState::Connecting || state_ == TransferState::Waiting;
  return is_early && !is_granted_ && !knows_elements() && into_->has_memory() && reading_ == 0 && done_ == 0;
}

void Transfer::unreserve(std::unique_ptr<MemoryClaim> none, Nanos now, Effects& out) {
  into_->quarantine();
  into_->give_back();
  into_ = std::move(none);
  if (session_ != 0) ask(done_, now, out);
}

Extent Transfer::begin_read(uint32_t count, bool is_checked, Nanos now) {
  reading_ = count;
  // Nonces made before this read are void: their answers say nothing of it, because memory may have been unmapped since.
  if (!has_bug(Bug::verdict_of_before)) asked_.clear();
  reading_is_checked_ = is_checked;
  ++token_;
  read_began_at_ = now;
  if (first_read_at_ == 0) first_read_at_ = now;
  return into_->part(done_, count);
}

uint32_t Transfer::end_read(Nanos now) {
  const uint32_t count = reading_;
  reading_ = 0;
  reading_ns_ += now - read_began_at_;
  return count;
}

void Transfer::read_on(Nanos now, Effects& out) {
  if (!is_one_sided(lane()) || state_ != TransferState::Reading || reading_ != 0 || !gone_text_.empty()) return;
  const auto known_end = knows_elements() ? total() : static_cast<uint32_t>(known_base_ + known_.size());
  if (known_end <= done_) return;
  const uint32_t count = into_->fitting(done_, known_end - done_, limits_.read_bytes_max);
  std::vector<uint32_t> checksums;
  Extent from;
  if (knows_elements()) {
    from = spec_.remote.part(spec_.first + done_, count);
  } else {
    const auto ids = known_.begin() + (done_ - known_base_);
    from = Extent{remote_pool_, nullptr, std::make_shared<const std::vector<uint32_t>>(ids, ids + count), 0, count};
    const auto known = known_checksums_.begin() + (done_ - known_base_);
    for (auto sum = known; sum != known + count && *sum; ++sum) checksums.push_back(**sum);
    if (checksums.size() != count) checksums.clear();
  }
  if (checksums.empty() && needs_checksums()) return next_lane("the pool requires checksums, and the source has no checksums of blocks that are read this way", now, out);
  const Extent to = begin_read(count, !checksums.empty(), now);
  out.push_back(ReadBlocks{spec_.id, token_, session_, lane(), std::move(from), to, std::move(checksums)});
}

Extent Transfer::on_data(const Data& data, Nanos now, uint64_t& token) {
  if (is_final(state_) || is_one_sided(lane()) || data.attempt != attempt_ || reading_ != 0 || !into_->has_memory()) return {};
  if (state_ != TransferState::Waiting && state_ != TransferState::Reading) return {};
  if (data.first != spec_.first + done_ || data.count == 0 || data.count > total() - done_) return {};
  const uint64_t sum_bytes = data.has_checksums ? uint64_t{data.count} * 4 : 0;
  if (data.payload_bytes != into_->bytes(done_, data.count) + sum_bytes) return {};
  if (spec_.wants_checksums && !data.has_checksums) return {};  // bytes without a checksum are not accepted
  move(TransferEvent::Heard);
  heard_at_ = now;
  silences_ = 0;
  reading_is_complete_ = data.complete;
  reading_is_zero_copy_ = data.is_zero_copy;
  const Extent to = begin_read(data.count, data.has_checksums, now);
  token = token_;
  return to;
}

void Transfer::landed(uint64_t token, Nanos now, Effects& out) {
  if (reading_ == 0 || token != token_) throw Error(Code::internal, "a read landed that was not in progress");
  const uint32_t count = end_read(now);
  if (is_final(state_)) return drain(out);
  if (session_ == 0) dial_at_ = now;
  heard_at_ = now;
  silences_ = 0;
  reasked_ = 0;
  progressed();
  last_landed_at_ = now;
  has_zero_copy_ |= !is_one_sided(lane()) && reading_is_zero_copy_;
  const bool is_after = is_one_sided(lane()) ? is_complete_ : reading_is_complete_;
  if (!is_after) before_complete_ += count;
  if (reading_is_checked_) checked_ += count;
  done_ += count;
  move(done_ == total() ? TransferEvent::LandedAll : TransferEvent::Landed);
  tell(TransferProgress{spec_.id, state_, done_, total()}, out);
  if (has_bug(Bug::skip_confirm) && done_ == total()) {
    state_ = TransferState::Confirming;
    return finish(TransferState::Committed, Code::ok, "", now, out);
  }
  if (has_turn_) return change_turn(now, out);
  if (state_ == TransferState::Confirming && (is_one_sided(lane()) || has_zero_copy_)) return ask_verdict(true, now, out);
  read_on(now, out);
}

// A peer's push tries its lanes in turns (push.hpp). A new turn waits for the read in progress, because that read fills the same
// blocks.
void Transfer::take_turn(uint8_t turn, std::optional<Lane> lane, bool is_last, Nanos now, Effects& out) {
  if (is_final(state_)) return;
  spec_.turn = turn;
  spec_.is_last = is_last;
  has_turn_ = true;
  turn_lane_ = lane;
  if (reading_ == 0) change_turn(now, out);
}

void Transfer::change_turn(Nanos now, Effects& out) {
  has_turn_ = false;
  if (has_lane_) note_lane("the writer went on by another lane");
  leave_lane(now, out);
  if (!turn_lane_) return next_lane("the destination does not read by this lane", now, out);
  route_.lanes[lane_] = *turn_lane_;
  has_lane_ = true;
}

void Transfer::next_lane(const std::string& why, Nanos now, Effects& out) {
  if (!is_offered()) return Operation::next_lane(why, now, out);
  note_lane(why);
  if (spec_.is_last) return fail(Code::no_lane, why, now, out);
  if (session_ != 0) send(Done{spec_.id, Code::no_lane, why, spec_.turn}, out);  // without a session: when the peer repeats its PUSH
  leave_lane(now, out);
  has_lane_ = false;
  dial_at_ = kNever;
  no_lane_text_ = why;
}

void Transfer::stopped(uint64_t token, Code code, const std::string& text, Nanos now, Effects& out) {
  if (reading_ == 0 || token != token_) throw Error(Code::internal, "a read stopped that was not in progress");
  end_read(now);
  if (is_final(state_)) return drain(out);
  if (code == Code::checksum) return fail(code, text, now, out);
  if (has_turn_) return change_turn(now, out);
  if (code == Code::memory_gone && !is_one_sided(lane())) return fail(code, text, now, out);
  // A REVOKE may be on its way, and the verdict comes after it (transfer.hpp). Without a session the next attempt finds out.
  if (code == Code::memory_gone && session_ != 0) {
    gone_text_ = text;
    return ask_verdict(true, now, out);
  }
  if (code == Code::no_lane) return next_lane(text, now, out);
  heard_at_ = now;
  if (session_ == 0 && dial_at_ == kNever) dial_at_ = now;
  // The session is lost or about to be; the next attempt asks for these blocks again.
}

// A fresh nonce is made after the last read. If the answer was lost, the question is repeated with the same nonce.
void Transfer::ask_verdict(bool is_fresh, Nanos now, Effects& out) {
  if (is_fresh || asked_.empty()) asked_.push_back(draw_nonce());
  if (asked_.size() > kAskedMax) asked_.erase(asked_.begin());
  heard_at_ = now;
  send(Confirm{spec_.id, asked_.back()}, out);
}

void Transfer::on_verdict(const Verdict& verdict, Nanos now, Effects& out) {
  if (is_final(state_)) return;
  const bool is_trailer = !is_one_sided(lane()) && verdict.nonce == attempt_nonce_ && (!has_zero_copy_ || has_bug(Bug::verdict_of_zero_copy));
  const bool is_asked = std::find(asked_.begin(), asked_.end(), verdict.nonce) != asked_.end();
  if (!is_trailer && !is_asked) return;  // of an earlier attempt
  heard_at_ = now;
  if (!gone_text_.empty()) return verdict.code == Code::ok ? on_gone(now, out) : fail(verdict.code, "the source did not confirm", now, out);
  // The source does not know a fetch whose question was lost or is still on its way: ask again. The bytes stay valid, because the
  // region that was read still has its id, or nothing will be confirmed. Not for lanes on which the source sends: it knew the
  // question, and sent zeros after the end.
  if (verdict.code == Code::grant_unknown && is_fetch() && is_one_sided(lane()) && state_ == TransferState::Confirming) {
    if (!is_asked || verdict.nonce != asked_.back()) return;
    if (++reasked_ > kReasksMax) return fail(verdict.code, "the source never knew of this fetch", now, out);
    ask(0, now, out);
    return ask_verdict(true, now, out);
  }
  if (verdict.code != Code::ok) return fail(verdict.code, "the source did not confirm", now, out);
  if (state_ == TransferState::Confirming) end(TransferState::Committed, Code::ok, "", now, out);
}

// A read found memory gone, and the source has not ended the grant: its verdict is ok, or it does not answer. The next lane may read
// what this one cannot.
void Transfer::on_gone(Nanos now, Effects& out) {
  const std::string text = std::exchange(gone_text_, {});
  const bool has_next = is_offered() ? !spec_.is_last : lane_ + 1 < route_.lanes.size();
  if (has_next) return next_lane(text, now, out);
  fail(Code::memory_gone, text, now, out);
}

void Transfer::on_error(const ErrorFrame& error, Nanos now, Effects& out) {
  if (is_final(state_) || state_ == TransferState::Connecting || error.attempt != attempt_) return;
  if (error.code == Code::no_lane && reading_ == 0) return next_lane(printable(error.text), now, out);
  const bool is_violation = error.code == Code::ok || error.code == Code::no_lane;  // no ERROR carries ok; and a lane that reads exists
  fail(is_violation ? Code::protocol : error.code, printable(error.text), now, out);
}

void Transfer::on_revoke(const Revoke& revoke, Nanos now, Effects& out) {
  const std::string why = revoke.text.empty() ? "" : ": " + printable(revoke.text);
  fail(revoke.code == Code::ok ? Code::protocol : revoke.code, "the source ended the grant" + why, now, out);
}

void Transfer::keep(Nanos now, Effects& out) {
  renew_at_ = now + std::max(std::min(limits_.ttl_ns, source_ttl_) / 3, kRenewGapMin);
  send(Renew{spec_.id, ++renew_seq_, static_cast<uint32_t>(limits_.ttl_ns / kMillisecond)}, out);
}

void Transfer::finish(TransferState state, Code code, const std::string& text, Nanos now, Effects& out) {
  move(state == TransferState::Committed ? TransferEvent::VerdictOk : state == TransferState::Cancelled ? TransferEvent::Cancel : TransferEvent::Fail);
  if (state_ == TransferState::Committed && !has_bug(Bug::skip_confirm) && (done_ != total() || reading_ != 0)) {
    throw Error(Code::internal, "commit of a transfer that has not landed");
  }
  // A fetch reads memory that stays granted: its release only ends bookkeeping.
  if (session_ != 0) out.push_back(SendFrame{session_, Release{spec_.id}});
  if (reading_ != 0) out.push_back(StopRead{spec_.id});
  into_->quarantine();
  const Nanos first = first_read_at_ == 0 ? now : first_read_at_;
  const Nanos last = last_landed_at_ == 0 ? first : last_landed_at_;
  outcome_ = TransferFinal{spec_.id, state_, code, text, lane(), lane_notes_, attempt_, done_, before_complete_, first - began_at_,
                           reading_ns_, now - last, checked_, session_};
  tell(outcome_, out);
  if (reading_ == 0 || has_bug(Bug::free_before_drain)) drain(out);
}

void Transfer::drain(Effects& out) {
  is_drained_ = reading_ == 0;
  if (is_given_back_) return;  // only the seeded bug gives back early
  is_given_back_ = true;
  into_->give_back();
  tell(TransferDrained{spec_.id}, out);
}

}  // namespace kvxfer
