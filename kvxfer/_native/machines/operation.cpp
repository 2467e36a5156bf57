#include "operation.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer {
namespace {

constexpr Nanos kDialBackoff = 20 * kMillisecond;
constexpr Nanos kDialBackoffMax = 500 * kMillisecond;
constexpr uint32_t kSilencesMax = 4;
constexpr uint32_t kFutileMax = 8;  // sessions lost at once: then the peer counts as unreachable

Nanos backoff(uint32_t before) { return std::min(kDialBackoff << std::min(before, 16u), kDialBackoffMax); }

}  // namespace

Operation::Operation(Route route, TransferLimits limits, Nanos now)
    : route_(std::move(route)), limits_(limits), began_at_(now), heard_at_(now), dial_at_(now), unreachable_since_(now) {
  if (route_.lanes.size() > kLaneMax) throw Error(Code::invalid_argument, "more lanes are named than there are");
  if (route_.lanes.empty()) throw Error(Code::no_lane, "no lane is allowed for this transfer");
  if (route_.deadline <= now) throw Error(Code::invalid_argument, "the deadline has passed already");
}

void Operation::session_up(SessionId session, bool is_mapped, Nanos now, Effects& out) {
  if (is_final(state_)) return;
  session_ = session;
  is_mapped_ = is_mapped;
  dials_failed_ = 0;
  is_plainly_refused_ = false;
  unreachable_code_ = Code::peer_gone;
  unreachable_text_.clear();
  heard_at_ = now;
  up_at_ = now;
  silences_ = 0;
  if (futile_ < kFutileMax) unreachable_since_ = kNever;
  on_session(now, out);
}

void Operation::session_lost(Nanos now, const std::string& why) {
  session_ = 0;
  if (!why.empty()) unreachable_text_ = ": " + why;
  if (is_final(state_)) return;
  on_session_lost();
  if (now - up_at_ >= limits_.reconnect_ns) futile_ = 0;
  if (futile_ < kFutileMax || unreachable_since_ == kNever) unreachable_since_ = now;
  dial_at_ = futile_ == 0 ? now : now + backoff(futile_ - 1);
  if (++futile_ > kFutileMax && why.empty()) unreachable_text_ = ": its sessions end before anything is read";
}

void Operation::dial_failed(Code code, const std::string& text, Nanos now, Effects& out) {
  if (is_final(state_) || session_ != 0) return;
  // A Unix socket that refuses us will go on refusing; an owner that does not know us yet will learn of us.
  const bool is_closed_to_us = session_kind(lane()) == SessionKind::Unix && code != Code::unauthenticated;
  // What a peer says of encryption it says without any. A machine on the way can say it too, or spoil the question, so once proves nothing.
  const bool is_unproven = code == Code::no_lane && session_kind(lane()) == SessionKind::Tcp && !std::exchange(is_plainly_refused_, true);
  const bool has_no_session = code == Code::no_lane && !is_unproven;
  if (has_no_session || (is_closed_to_us && lane_ + 1 < route_.lanes.size())) return next_lane(text, now, out);
  unreachable_code_ = code == Code::unauthenticated ? code : Code::peer_gone;
  unreachable_text_ = ": " + text;
  if (now - unreachable_since_ >= limits_.reconnect_ns) {
    return fail(unreachable_code_, std::string("cannot reach the ") + peer_word() + unreachable_text_, now, out);
  }
  dial_at_ = now + backoff(dials_failed_++);
}

void Operation::note_lane(const std::string& why) {
  if (!lane_notes_.empty()) lane_notes_ += "; ";
  lane_notes_ += why;
}

void Operation::leave_lane(Nanos now, Effects& out) {
  if (session_ != 0) {
    leave(out);
    on_session_lost();
    session_ = 0;
  }
  dial_at_ = now;
  unreachable_since_ = now;
  futile_ = 0;
  is_plainly_refused_ = false;
}

void Operation::next_lane(const std::string& why, Nanos now, Effects& out) {
  note_lane(why);
  if (lane_ + 1 == route_.lanes.size()) return fail(Code::no_lane, "no lane joins this pair: " + lane_notes_, now, out);
  leave_lane(now, out);
  ++lane_;
}

void Operation::tick(Nanos now, Effects& out) {
  if (is_final(state_)) return;
  if (now >= route_.deadline) return fail(Code::deadline, deadline_word(), now, out);
  if (session_ == 0) {
    if (now - unreachable_since_ >= limits_.reconnect_ns && !is_reading()) {
      fail(unreachable_code_, std::string("cannot reach the ") + peer_word() + unreachable_text_, now, out);
    }
    return;
  }
  if (now >= engine_deadline()) return on_engine_silent(now, out);
  if (now >= keep_at()) keep(now, out);
  if (is_final(state_)) return;
  if (!is_reading() && now - heard_at_ >= patience()) {
    ++silences_;
    ask_again(now, out);
  }
}

// A repeated question makes the source send again. On a wire that is only slow, and shared, that would discard the bytes in transit
// for ever: so each unanswered question is given twice as long as the one before.
Nanos Operation::patience() const { return limits_.stall_ns << std::min(silences_, kSilencesMax); }

Nanos Operation::wake_at() const {
  if (is_final(state_)) return kNever;
  Nanos at = route_.deadline;
  if (session_ == 0) {
    if (!is_reading()) at = std::min({at, unreachable_since_ + limits_.reconnect_ns, dial_at_});
    return at;
  }
  at = std::min({at, keep_at(), engine_deadline()});
  if (!is_reading()) at = std::min(at, heard_at_ + patience());
  return at;
}

}  // namespace kvxfer
