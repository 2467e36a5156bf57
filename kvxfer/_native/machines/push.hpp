// One push: the initiator's side of a write. It owns the bytes but sends them only as a source: it grants its elements to exactly
// one reader, asks that reader to pull them into its registered memory, and waits for the reader's report of the end.
//
//                 session_up  session_lost  done        fail    cancel
//   CONNECTING    WAITING     CONNECTING    -           FAILED  CANCELLED
//   WAITING       -           CONNECTING    COMMITTED   FAILED  CANCELLED
//   COMMITTED, FAILED, CANCELLED: nothing moves them.       ("-": impossible, an error)
//
// What the destination does under the grant (pull, read, confirm) goes through the grant table like every other reader's. PUSH is
// repeated if no answer comes, and the destination accepts it once: for a live transfer a repeat does nothing, for a final one the
// destination sends DONE again. The initiator believes COMMITTED only if the destination got a verdict ok.
//
// One id and one grant serve all lanes: bytes that landed by one lane stay valid, and the next lane pulls only the rest. The
// initiator chooses the next lane, because the destination cannot dial it: PUSH says how many lanes came before (its turn), and
// whether another follows. If one follows, DONE no_lane ends only the turn. After a verdict ok the destination may have committed:
// then the initiator asks it by the remaining lanes, and if none is left, the outcome is unknown.
//
// The grant ends before the push does, whatever ends the push: a later CONFIRM finds the grant ended. So a push that was cancelled
// or failed here never commits there, unless this agent has sent a VERDICT ok before. If the destination neither pulls nor reports an
// end, the end of the grant's lifetime ends the push. The grant holds the claim on the elements; once it has ended, no send may read
// another byte of them.
#pragma once

#include <memory>

#include "grant.hpp"
#include "operation.hpp"

namespace kvxfer {

enum class PushEvent : uint8_t { SessionUp, SessionLost, Done, Fail, Cancel };

// The table above. Throws Error(internal) for an impossible pair.
TransferState next_state(TransferState state, PushEvent event);

struct PushSpec {
  Operation::Route route;
  ElementList local, remote;
  bool wants_checksums = false;
  std::optional<std::string> notification;      // sent inside PUSH
  std::optional<std::string> own_notification;  // too long for PUSH: sent after the destination reported its commit
};

class PushOperation final : public Operation {
 public:
  // The grant takes `claim`, the claim on the local elements; it is made once the destination was reached. Throws Error(no_lane,
  // invalid_argument).
  PushOperation(PushSpec spec, TransferLimits limits, GrantTable& grants, std::unique_ptr<MemoryClaim> claim, Nanos now);

  PushOperation* as_push() override { return this; }
  void on_done(const Done& done, Nanos now, Effects& out);
  // The destination works on it: it asks for the elements after the first `landed`.
  void heard(uint32_t landed, Nanos now) {
    heard_at_ = now;
    if (landed <= landed_) return;
    landed_ = landed;
    progressed();
  }
  bool leans_on(uint32_t region) const;  // whether an own element lies in that region
  const std::optional<std::string>& own_notification() const { return spec_.own_notification; }
  // For a push that has ended here: whether the destination may still be reading, because it has not reported an end.
  bool may_be_read() const { return asked_ != 0 && !is_told_ && state_ != TransferState::Committed; }

 protected:
  const char* peer_word() const override { return "destination"; }
  void on_session(Nanos now, Effects& out) override;
  void on_session_lost() override { state_ = next_state(state_, PushEvent::SessionLost); }
  void ask_again(Nanos now, Effects& out) override;
  void keep(Nanos now, Effects& out) override;
  Nanos keep_at() const override { return has_grant_ ? grant_end_ : kNever; }
  void next_lane(const std::string& why, Nanos now, Effects& out) override;
  void finish(TransferState state, Code code, const std::string& text, Nanos now, Effects& out) override;

 private:
  bool may_be_committed() const { return has_grant_ && grants_->has_confirmed(route_.id); }
  bool is_last() const;
  void ask(Nanos now, Effects& out);
  void end_grant(Nanos now, Effects& out);

  PushSpec spec_;
  GrantTable* grants_;
  std::unique_ptr<MemoryClaim> claim_;  // until there is a grant
  std::vector<const char*> obstacles_;  // for each lane: why it cannot be read by it, or null
  bool has_grant_ = false;
  bool is_told_ = false;  // the destination has reported that its transfer failed: it needs no REVOKE
  Nanos grant_end_ = kNever;
  uint32_t asked_ = 0, checked_ = 0, landed_ = 0;
  Nanos first_asked_at_ = 0;
};

}  // namespace kvxfer
