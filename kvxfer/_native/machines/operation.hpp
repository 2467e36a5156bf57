// What every operation has in common, a pull, a fetch or a push: a peer that must be reached by the first of some lanes
// that serves, a deadline, and patience with a peer that says nothing. What is said to the peer, and what ends it, is
// the business of Transfer and Push.
//
// An operation holds at most one session and asks its owner, the endpoint, for another where it has none. One that a peer's push
// asked for (is_offered) dials nobody: the peer that wants it comes itself, and the owner is told of its end in other words.
//
// A peer is unreachable where it cannot be dialed, and also where session after session comes up, brings nothing and is lost at
// once: whatever breaks them will break the next one. Those are dialed ever more slowly, and not for ever.
#pragma once

#include "bugs.hpp"
#include "effects.hpp"

namespace kvxfer {

class Transfer;
class PushOperation;

struct TransferLimits {
  Nanos stall_ns = 1'000 * kMillisecond;      // heard nothing of this operation for so long: ask again; then after twice that, up to 16 times
  Nanos reconnect_ns = 3'000 * kMillisecond;  // peer unreachable for so long: peer_gone
  Nanos ttl_ns = 10'000 * kMillisecond;       // asked for with each renewal
  Nanos engine_silent_ns = 10'000 * kMillisecond;  // the source's engine has work and sent no heartbeat for so long: peer_gone
  uint64_t read_bytes_max = 32 << 20;         // of one ReadBlocks, unless a single block is larger
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
  // The peer's regions that a read would go to, where they are known without its word.
  virtual std::vector<uint32_t> remote_regions() const { return {}; }
  // What the owner was told, or would have been.
  const TransferFinal& outcome() const { return outcome_; }

  // Not connected, nothing under way, and the back-off has passed.
  bool can_attach() const { return state_ == TransferState::Connecting && session_ == 0 && has_lane_ && !is_reading(); }
  bool needs_session(Nanos now) const { return can_attach() && now >= dial_at_; }

  void dialing() { dial_at_ = kNever; }  // somebody is on it: do not ask again before it failed
  // `is_mapped`: every one of remote_regions() can be read by the lane on this session already.
  void session_up(SessionId session, bool is_mapped, Nanos now, Effects& out);
  void session_lost(Nanos now);
  void dial_failed(Code code, const std::string& text, Nanos now, Effects& out);
  // There is no way to a session of this lane.
  void lane_closed(const std::string& why, Nanos now, Effects& out) { next_lane(why, now, out); }
  void end(TransferState state, Code code, const std::string& text, Nanos now, Effects& out) {
    if (!is_final(state_)) finish(state, code, text, now, out);
  }
  void tick(Nanos now, Effects& out);
  Nanos wake_at() const;

  // The owner's notes: on which session's list it is (0: on none), and when it is to be looked at again.
  SessionId listed_on = 0;
  SessionId asked_on = 0;  // of a peer's push: where its PUSH came last
  Nanos woken_at = kNever;

 protected:
  virtual const char* peer_word() const = 0;   // in texts
  virtual bool is_reading() const { return false; }
  virtual void on_session(Nanos now, Effects& out) = 0;         // there is one; state_ is Connecting
  virtual void on_session_lost() = 0;                           // sets the state
  virtual void leave(Effects&) {}                               // this lane is given up, and its session is there
  virtual void ask_again(Nanos now, Effects& out) = 0;          // silence
  virtual void keep(Nanos, Effects&) {}                         // connected, at keep_at()
  virtual Nanos keep_at() const { return kNever; }
  virtual Nanos engine_deadline() const { return kNever; }  // connected: on_engine_silent() then
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
  bool has_lane_ = true;  // false: a peer whose push this is has yet to name another
  bool is_mapped_ = false;
  bool is_drained_ = false;
  uint32_t silences_ = 0;  // questions in a row that brought nothing
  Nanos began_at_, heard_at_, dial_at_, unreachable_since_;
  TransferFinal outcome_{};

  // Bytes landed: what sessions brought nothing before counts no more.
  void progressed() { futile_ = 0; }

 private:
  uint32_t dials_failed_ = 0;
  uint32_t futile_ = 0;           // sessions in a row that were lost soon, with nothing landed
  Nanos up_at_ = 0;
  Code unreachable_code_ = Code::peer_gone;  // of the last dial that failed
  std::string unreachable_text_;
};

}  // namespace kvxfer
