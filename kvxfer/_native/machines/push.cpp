#include "push.hpp"

#include <algorithm>

namespace kvxfer {

TransferState next_state(TransferState state, PushEvent event) {
  using S = TransferState;
  using E = PushEvent;
  if (is_final(state)) return state;
  if (state == S::Connecting || state == S::Waiting) {
    switch (event) {
      case E::SessionLost: return S::Connecting;
      case E::Fail: return S::Failed;
      case E::Cancel: return S::Cancelled;
      case E::SessionUp:
        if (state == S::Connecting) return S::Waiting;
        break;
      case E::Done:
        if (state == S::Waiting) return S::Committed;
        break;
    }
  }
  throw Error(Code::internal, "impossible push event " + std::to_string(static_cast<int>(event)) + " in state " + std::to_string(static_cast<int>(state)));
}

PushOperation::PushOperation(PushSpec spec, TransferLimits limits, GrantTable& grants, std::unique_ptr<MemoryClaim> claim, Nanos now)
    : Operation(spec.route, limits, now), spec_(std::move(spec)), grants_(&grants), claim_(std::move(claim)) {
  for (const Lane lane : route_.lanes) obstacles_.push_back(claim_->obstacle(lane));
}

void PushOperation::on_session(Nanos now, Effects& out) {
  try {
    if (!has_grant_) {
      grant_end_ = grants_->grant_elements(route_.id, std::move(claim_), route_.peer, route_.peer, kNever, 0, now);
      has_grant_ = true;
    }
    if (now >= grant_end_) return keep(now, out);
    const char* why = obstacles_[lane_];
    if (why != nullptr && !may_be_committed()) return next_lane(why, now, out);
  } catch (const Error& error) {  // grants_max is reached: no fault of this session
    return fail(error.code(), error.what(), now, out);
  }
  state_ = next_state(state_, PushEvent::SessionUp);
  ask(now, out);
}

// Whether no later lane can work.
bool PushOperation::is_last() const {
  return std::all_of(obstacles_.begin() + static_cast<std::ptrdiff_t>(lane_) + 1, obstacles_.end(), [](const char* why) { return why != nullptr; });
}

void PushOperation::ask(Nanos now, Effects& out) {
  ++asked_;
  heard_at_ = now;
  if (first_asked_at_ == 0) first_asked_at_ = now;
  const Nanos left = route_.deadline == kNever ? 0 : std::max<Nanos>((route_.deadline - now) / kMillisecond, 1);
  send(Push{route_.id, lane(), spec_.wants_checksums, static_cast<uint32_t>(std::min<Nanos>(left, UINT32_MAX)), to_wire(spec_.local),
                 to_wire(spec_.remote), spec_.notification.has_value(), spec_.notification.value_or(std::string()),
                 static_cast<uint8_t>(lane_), is_last()},
       out);
}

void PushOperation::ask_again(Nanos now, Effects& out) { ask(now, out); }

// A grant past its lifetime confirms nothing, so no further question helps.
void PushOperation::keep(Nanos now, Effects& out) {
  const GrantState state = grants_->state(route_.id, now).value_or(GrantState::Expired);
  fail(code_of(state), "the lifetime of the push's grant is over", now, out);
}

void PushOperation::on_done(const Done& done, Nanos now, Effects& out) {
  if (is_final(state_) || state_ != TransferState::Waiting) return;
  if (done.code == Code::no_lane && done.turn < lane_) return;  // a repeat: that lane was left already
  heard_at_ = now;
  if (done.code == Code::no_lane) return next_lane(printable(done.text), now, out);
  is_told_ = done.code != Code::ok;
  if (is_told_) return fail(done.code, printable(done.text), now, out);
  if (!grants_->has_confirmed(route_.id)) return fail(Code::protocol, "the destination reports a commit without a verdict ok", now, out);
  if (done.turn < lane_) lane_ = done.turn;  // it finished before it heard of the next lane
  checked_ = std::min(done.checked, spec_.local.count());
  end(TransferState::Committed, Code::ok, "", now, out);
}

void PushOperation::end_grant(Nanos now, Effects& out) {
  if (has_grant_ && grants_->knows(route_.id)) grants_->end(route_.id, GrantEvent::Revoke, now, out);
  has_grant_ = false;
}

void PushOperation::next_lane(const std::string& why, Nanos now, Effects& out) {
  if (lane_ + 1 != route_.lanes.size() || !may_be_committed()) return Operation::next_lane(why, now, out);
  fail(Code::peer_gone, "the destination cannot be asked: " + why, now, out);
}

void PushOperation::finish(TransferState state, Code code, const std::string& text, Nanos now, Effects& out) {
  const bool is_unknown = state != TransferState::Committed && !is_told_ && may_be_committed();
  end_grant(now, out);
  state_ = next_state(state_, state == TransferState::Committed ? PushEvent::Done : state == TransferState::Cancelled ? PushEvent::Cancel : PushEvent::Fail);
  const Nanos asked = first_asked_at_ == 0 ? now : first_asked_at_;
  const uint32_t done = state_ == TransferState::Committed ? spec_.local.count() : 0;
  const std::string said = is_unknown ? text + "; the destination may have committed" : text;
  outcome_ = TransferFinal{route_.id, state_, code, said, lane(), lane_notes_, asked_, done, 0, asked - began_at_, now - asked, 0, checked_, session_};
  tell(outcome_, out);
  is_drained_ = true;
  tell(TransferDrained{route_.id}, out);
}

bool PushOperation::leans_on(uint32_t region) const {
  const std::vector<uint32_t> regions = regions_of(spec_.local);
  return std::binary_search(regions.begin(), regions.end(), region);
}

}  // namespace kvxfer
