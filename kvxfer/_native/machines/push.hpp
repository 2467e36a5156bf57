// One push: the initiator's side of a write. It owns the bytes and never sends one on its own account: it grants its elements
// to exactly one reader, asks that reader to pull them into its registered memory, and waits to be told how that ended.
//
//                 session_up  session_lost  done        fail    cancel
//   CONNECTING    WAITING     CONNECTING    -           FAILED  CANCELLED
//   WAITING       -           CONNECTING    COMMITTED   FAILED  CANCELLED
//   COMMITTED, FAILED, CANCELLED: nothing moves them.       ("-": impossible, an error)
//
// What the destination does under the grant (pull, read, confirm) goes through the grant table like every other reader's.
// PUSH is asked again where no answer came, and the destination takes it once: to a transfer that is live it does nothing,
// to one that is final it answers DONE again. COMMITTED is believed of a destination that was given a verdict ok.
//
// One id and one grant for all lanes: what landed by the one before stays good, and only the rest is pulled by the next. It is
// the initiator who says which lane comes next, because the destination cannot dial it: PUSH says how many there were before
// (its turn), and whether there is another. DONE no_lane, where there is, ends the turn alone. Once it was given a verdict ok the
// destination may have committed: then it is asked by whatever lane is left, and where none is, the outcome is not known.
//
// Whatever ends the push ends the grant first: a confirm that comes later finds it ended, so a push that was cancelled or
// failed here is never committed there afterwards without a verdict that was given before. Where the destination neither
// pulls nor says how it ended, the end of the grant's lifetime ends the push. The elements are held as every grant holds them;
// once it has ended no send may take another byte of them.
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
  std::optional<std::string> notification;      // goes with what is asked for
  std::optional<std::string> own_notification;  // too long for that: it goes when the destination said that it committed
};

class PushOperation final : public Operation {
 public:
  // `claim` of the local elements is taken by the grant, which is made once the destination was reached. Throws
  // Error(no_lane, invalid_argument).
  PushOperation(PushSpec spec, TransferLimits limits, GrantTable& grants, std::unique_ptr<MemoryClaim> claim, Nanos now);

  PushOperation* as_push() override { return this; }
  void on_done(const Done& done, Nanos now, Effects& out);
  // The destination is at it: it asks for what follows the first `landed` elements.
  void heard(uint32_t landed, Nanos now) {
    heard_at_ = now;
    if (landed <= landed_) return;
    landed_ = landed;
    progressed();
  }
  bool leans_on(uint32_t region) const;
  const std::optional<std::string>& own_notification() const { return spec_.own_notification; }
  // It is over, and the destination was neither told nor said so itself.
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
  std::vector<const char*> obstacles_;  // why a lane cannot read it, or null: of each lane
  bool has_grant_ = false;
  bool is_told_ = false;  // by the destination, that it failed there
  Nanos grant_end_ = kNever;
  uint32_t asked_ = 0, checked_ = 0, landed_ = 0;
  Nanos first_asked_at_ = 0;
};

}  // namespace kvxfer
