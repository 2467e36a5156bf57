// What a pull, a fetch and a push have in common: a peer that must be reached by the first of some lanes that works, a deadline,
// and a limit on the peer's silence. The derived classes Transfer and PushOperation decide which frames the peer gets and what ends
// the operation.
//
// An operation holds at most one session and asks its owner, the endpoint, for another when it has none. An operation that a peer's
// push asked for (is_offered) never dials: that peer dials, and the owner learns of the end by OfferEnded.
//
// A peer counts as unreachable if it cannot be dialed, and also if session after session comes up, lands nothing and is lost at
// once, because the same cause will break the next one. Such peers are dialed at growing intervals and for a limited time.
#pragma once

#include "bugs.hpp"
#include "effects.hpp"

namespace kvxfer {

class Transfer;
class PushOperation;

struct TransferLimits {
  Nanos stall_ns = 1'000 * kMillisecond;      // silence for so long on this operation: ask again; then after twice that, up to 16 times
  Nanos reconnect_ns = 3'000 * kMillisecond;  // peer unreachable for so long: peer_gone
  Nanos ttl_ns = 10'000 * kMillisecond;       // asked for with each renewal
  Nanos engine_silent_ns = 10'000 * kMillisecond;  // the source's engine has work and sent no heartbeat for so long: peer_gone
  uint64_t read_bytes_max = 32 << 20;         // in one ReadBlocks, unless a single block is larger
};

class Operation {
 public:
  struct Route {
    TransferId id;
    AgentRef peer;
    std::vector<Lane> lanes;  // allowed, best first
    Nanos deadline = kNever;
    bool is_offered = false;
  };

  // Throws Error(no_lane, invalid_argument).
  Operation(Route route, TransferLimits limits, Nanos now);
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  virtual Transfer* as_transfer() { return nullptr; }
  virtual PushOperation* as_push() { return nullptr; }

  const TransferId& id() const { return route_.id; }
  const AgentRef& peer() const { return route_.peer; }
  bool is_offered() const { return route_.is_offered; }
  TransferState state() const { return state_; }
  Lane lane() const { return route_.lanes[lane_]; }
  SessionId session() const { return session_; }
  bool is_over() const { return is_final(state_) && is_drained_; }
  // The peer's regions that a read would use, if they are known before the peer answers.
  virtual std::vector<uint32_t> remote_regions() const { return {}; }
  // What TransferFinal told the owner, or would have told.
  const TransferFinal& outcome() const { return outcome_; }

  // Not connected, nothing in progress, and the back-off has passed.
  bool can_attach() const { return state_ == TransferState::Connecting && session_ == 0 && has_lane_ && !is_reading(); }
  bool needs_session(Nanos now) const { return can_attach() && now >= dial_at_; }

  void dialing() { dial_at_ = kNever; }  // a dial is in progress: ask for no other until it failed
  // `is_mapped`: the lane can read every one of remote_regions() on this session already.
  void session_up(SessionId session, bool is_mapped, Nanos now, Effects& out);
  void session_lost(Nanos now, const std::string& why = {});
  void dial_failed(Code code, const std::string& text, Nanos now, Effects& out);
  // No session for this lane can be opened.
  void lane_closed(const std::string& why, Nanos now, Effects& out) { next_lane(why, now, out); }
  void end(TransferState state, Code code, const std::string& text, Nanos now, Effects& out) {
    if (!is_final(state_)) finish(state, code, text, now, out);
  }
  void tick(Nanos now, Effects& out);
  Nanos wake_at() const;

  // The endpoint's notes: the session that lists this operation (0: none), and the time of the next tick().
  SessionId listed_on = 0;
  SessionId asked_on = 0;  // of a peer's push: the session that its last PUSH came by
  Nanos woken_at = kNever;

 protected:
  virtual const char* peer_word() const = 0;   // the peer's role, for error texts
  virtual bool is_reading() const { return false; }
  virtual void on_session(Nanos now, Effects& out) = 0;         // a session is there; state_ is Connecting
  virtual void on_session_lost() = 0;                           // sets the state
  virtual void leave(Effects&) {}                               // leaves this lane, whose session is still there
  virtual void ask_again(Nanos now, Effects& out) = 0;          // the peer was silent
  virtual void keep(Nanos, Effects&) {}                         // runs at keep_at(), while connected
  virtual Nanos keep_at() const { return kNever; }
  virtual Nanos engine_deadline() const { return kNever; }  // while connected: on_engine_silent() runs then
  virtual void on_engine_silent(Nanos, Effects&) {}
  virtual const char* deadline_word() const { return "the deadline passed"; }
  virtual void finish(TransferState state, Code code, const std::string& text, Nanos now, Effects& out) = 0;

  void fail(Code code, const std::string& text, Nanos now, Effects& out) { end(TransferState::Failed, code, text, now, out); }
  void send(Frame frame, Effects& out) const { out.push_back(SendFrame{session_, std::move(frame)}); }
  void tell(Effect effect, Effects& out) const {
    if (!route_.is_offered) out.push_back(std::move(effect));
  }
  virtual void next_lane(const std::string& why, Nanos now, Effects& out);
  void note_lane(const std::string& why);
  void leave_lane(Nanos now, Effects& out);
  Nanos patience() const;

  Route route_;
  TransferLimits limits_;
  TransferState state_ = TransferState::Connecting;
  size_t lane_ = 0;
  std::string lane_notes_;
  SessionId session_ = 0;
  bool has_lane_ = true;  // false: the peer that pushes has yet to name another lane
  bool is_mapped_ = false;
  bool is_drained_ = false;
  uint32_t silences_ = 0;  // questions in a row without an answer
  Nanos began_at_, heard_at_, dial_at_, unreachable_since_;
  TransferFinal outcome_{};

  // Bytes landed, so earlier sessions without any no longer count.
  void progressed() { futile_ = 0; }

 private:
  uint32_t dials_failed_ = 0;
  bool is_plainly_refused_ = false;  // the last dial ended with no_lane
  uint32_t futile_ = 0;           // sessions in a row that were lost early, with nothing landed
  Nanos up_at_ = 0;
  Code unreachable_code_ = Code::peer_gone;  // of the last dial that failed
  std::string unreachable_text_;
};

}  // namespace kvxfer
