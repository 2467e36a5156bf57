// One transfer: the destination's side of one pull, fetch or offered push, from its start until its memory is the owner's again.
// Its MemoryClaim knows where the bytes go: blocks, or elements of regions. The bytes come from positions of a grant, which the
// source announces, or from a list of elements that is known from the start.
//
// The table lists the events of a transfer. One more event is a flag, not a state: a final transfer is *drained* once no read into
// its blocks can still be in progress. Until then its blocks are quarantined.
//
//                 session_up  session_up_landed  granted  reserved    known    heard    landed   landed_all  session_lost  verdict_ok  fail    cancel
//   CONNECTING    WAITING     CONFIRMING         -        CONNECTING  -        -        CONN.    CONN.       CONNECTING    -           FAILED  CANCELLED
//   WAITING       -           -                  GRANTED  WAITING     READING  READING  -        -           CONNECTING    -           FAILED  CANCELLED
//   GRANTED       -           -                  GRANTED  WAITING     -        -        -        -           CONNECTING    -           FAILED  CANCELLED
//   READING       -           -                  -        -           READING  READING  READING  CONFIRMING  CONNECTING    -           FAILED  CANCELLED
//   CONFIRMING    -           -                  -        -           -        CONF.    -        -           CONNECTING    COMMITTED   FAILED  CANCELLED
//   COMMITTED, FAILED, CANCELLED: nothing moves them; a late landing only drains.      ("-": impossible, an error)
//
// A pull may start without blocks: it asks whether its grant exists (a PULL of no blocks), the source answers how that stands
// (QUEUED), and the pull is GRANTED once the grant exists. Then the owner gives it all its blocks at once (reserved), and the pull
// asks for them. The owner can take blocks back until the source has said that the grant exists, because nothing can have landed in
// them.
//
// Before the grant three limits bound the wait: the deadline, the source's report that its engine does not know the prompt, and
// that engine's silence. The deadline of the transfer itself counts from the grant.
//
// The reads of one transfer follow the order of the grant's positions, one at a time, so the landed blocks are always a prefix: a
// cut loses only the read in progress, and the next attempt asks for the rest. Bytes that landed under one grant stay valid across
// attempts, because the source promised them for the lifetime of the grant, and the verdict, asked after the last read, says that
// this lifetime had not ended. An attempt is bound to exactly the incarnation of the source that the transfer names; another
// incarnation is another source, and ends the transfer.
//
// Elements of a peer's region can be read before the source answers (known), if this session already has the region's map: the
// region is an open-ended grant and its id is never reused, so it held from the map to the verdict, or the verdict is not ok. The
// question and the read then cross on the wire: the verdict may come before the announcement, or say that the grant is unknown
// because the question was lost. Then the question is sent again.
//
// The reader chooses the next lane, except for a peer's push: its destination cannot dial, so it reports that a lane does not work,
// and waits (CONNECTING, without a lane) until the pushing peer names another.
//
// Memory that a read finds gone (memory_gone) was unmapped, and no second try will find it. But the source may have ended the grant
// first, as it should, and its REVOKE may still be on the way. So a one-sided lane asks the source for a verdict, which arrives
// after the REVOKE. A verdict that is not ok names the reason. After ok the next lane is tried, because one lane may be unable to
// read what another can (pages of a driver); after the last lane the transfer fails. `stream` and `unix` detect only that this
// agent's own memory is gone; the source reports its own.
//
// Only a verdict `ok` for a nonce of this transfer, taken while every block has landed, commits.
#pragma once

#include <memory>

#include "memory_claim.hpp"
#include "operation.hpp"

namespace kvxfer {

enum class TransferEvent : uint8_t { SessionUp, SessionUpLanded, Granted, Reserved, Known, Heard, Landed, LandedAll, SessionLost, VerdictOk, Fail, Cancel };

// The table above. Throws Error(internal) for an impossible pair.
TransferState next_state(TransferState state, TransferEvent event);

struct TransferSpec {
  TransferId id;
  AgentRef source;
  std::vector<uint32_t> blocks;  // destination blocks of a pull, for grant positions first, first + 1, ...
  uint32_t count = 0;       // while there are no blocks: how many there will be
  uint32_t first = 0;
  std::vector<Lane> lanes;  // allowed, best first
  Nanos deadline = kNever;  // of a pull: its grant must exist by then
  bool tells_granted = false;  // send TransferGranted also to a pull that has blocks
  Nanos granted_ns = 0;     // of a pull: its time limit from the moment it hears of its grant; 0: `deadline` stays
  uint64_t nonce_seed = 0;  // random; nonces of this transfer are drawn from it
  Bytes32 content_digest{};        // zero: not given
  bool wants_checksums = false;  // if the source has them; a pool with checksums requires them
  ElementList remote;       // the elements to read, if known: of a fetch, of a peer's push
  bool is_offered = false;  // a peer's push asked for it: the source has the grant, and knows the elements
  uint8_t turn = 0;         // of that push: how many lanes were tried before
  bool is_last = true;      // and whether no other lane follows
  std::optional<std::string> notification;  // after the commit: of a fetch to the source's owner, of a push to our own
};

class Transfer final : public Operation {
 public:
  // Takes `into`; throws Error(invalid_argument, no_lane, blocks_busy).
  Transfer(TransferSpec spec, TransferLimits limits, std::unique_ptr<MemoryClaim> into, Nanos now);

  Transfer* as_transfer() override { return this; }
  const TransferSpec& spec() const { return spec_; }
  uint32_t done() const { return done_; }
  uint32_t total() const { return into_->count(); }
  uint64_t bytes() const { return into_->bytes(0, total()); }
  const MemoryClaim& into() const { return *into_; }
  std::vector<uint32_t> remote_regions() const override { return spec_.remote.ranges ? regions_of(spec_.remote) : std::vector<uint32_t>{}; }

  void on_ready(const Ready& ready, Nanos now, Effects& out);
  void on_queued(const Queued& queued, Nanos now, Effects& out);
  // See Endpoint; throws Error(invalid_argument) if it has blocks or is final, and what taking the blocks throws.
  void reserve(std::unique_ptr<MemoryClaim> blocks, uint32_t first, Nanos now, Effects& out);
  // Reads blocks under a grant: not registered memory, and not for a peer's push.
  bool is_pull() const { return !knows_elements() && !is_offered(); }
  bool can_unreserve() const;
  void unreserve(std::unique_ptr<MemoryClaim> none, Nanos now, Effects& out);
  // A pull that has read nothing, and reads nothing now.
  bool is_waiting() const { return !knows_elements() && (state_ == TransferState::Connecting || state_ == TransferState::Waiting || state_ == TransferState::Granted) && done_ == 0; }
  bool is_granted() const { return is_granted_; }
  bool is_queued() const { return is_queued_; }
  // Stream: blocks are about to arrive. Returns the target and sets `token`, or (token 0) an empty one: throw the bytes away.
  Extent on_data(const Data& data, Nanos now, uint64_t& token);
  void on_verdict(const Verdict& verdict, Nanos now, Effects& out);
  void on_error(const ErrorFrame& error, Nanos now, Effects& out);
  void on_revoke(const Revoke& revoke, Nanos now, Effects& out);

  // For a peer's push: continue by `lane` (none: a lane that this agent does not read by) once the read in progress, if any, has
  // ended. Landed bytes stay.
  void take_turn(uint8_t turn, std::optional<Lane> lane, bool is_last, Nanos now, Effects& out);
  uint8_t turn() const { return spec_.turn; }
  bool has_lane() const { return has_lane_; }
  const std::string& no_lane_text() const { return no_lane_text_; }

  // The read named by `token` has ended: its bytes are in place, or it stopped and will write no more.
  void landed(uint64_t token, Nanos now, Effects& out);
  void stopped(uint64_t token, Code code, const std::string& text, Nanos now, Effects& out);
  bool is_landing(uint64_t token) const { return reading_ != 0 && token == token_ && !is_final(state_); }

 protected:
  const char* peer_word() const override { return "source"; }
  bool is_reading() const override { return reading_ != 0; }
  void on_session(Nanos now, Effects& out) override;
  void on_session_lost() override {
    move(TransferEvent::SessionLost);
    gone_text_.clear();
  }
  void leave(Effects& out) override { send(Cancel{spec_.id, attempt_}, out); }
  void ask_again(Nanos now, Effects& out) override;
  void keep(Nanos now, Effects& out) override;
  void next_lane(const std::string& why, Nanos now, Effects& out) override;
  Nanos keep_at() const override { return is_granted_ ? renew_at_ : kNever; }
  Nanos engine_deadline() const override;
  void on_engine_silent(Nanos now, Effects& out) override;
  const char* deadline_word() const override;
  void finish(TransferState state, Code code, const std::string& text, Nanos now, Effects& out) override;

 private:
  bool needs_checksums() const { return into_->pool() != nullptr && into_->pool()->has_checksums; }
  bool knows_elements() const { return spec_.remote.ranges != nullptr; }
  bool is_fetch() const { return knows_elements() && !is_offered(); }
  void move(TransferEvent event) { state_ = next_state(state_, event); }
  void ask(uint32_t first, Nanos now, Effects& out);
  void ask_verdict(bool is_fresh, Nanos now, Effects& out);
  void read_on(Nanos now, Effects& out);
  Extent begin_read(uint32_t count, bool is_checked, Nanos now);
  uint32_t end_read(Nanos now);
  void change_turn(Nanos now, Effects& out);
  void on_gone(Nanos now, Effects& out);
  void drain(Effects& out);
  uint64_t draw_nonce();

  TransferSpec spec_;
  std::unique_ptr<MemoryClaim> into_;
  bool has_turn_ = false;           // to change to turn_lane_ after the read in progress
  std::optional<Lane> turn_lane_;
  std::string no_lane_text_;        // why there is no lane in this turn
  uint32_t attempt_ = 0;
  uint64_t attempt_nonce_ = 0;
  uint64_t nonce_state_;
  std::vector<uint64_t> asked_;     // nonces made after the last read: the latest few
  std::string gone_text_;           // memory was gone: the source's verdict is awaited
  uint32_t reasked_ = 0;            // how often the source did not know the question, since the last bytes landed
  uint32_t done_ = 0;               // landed, always a prefix
  uint32_t reading_ = 0;            // blocks of the read in progress
  bool reading_is_complete_ = false, reading_is_checked_ = false, reading_is_zero_copy_ = false;
  bool has_zero_copy_ = false;  // of this attempt, or landed in it: the source's trailer verdict predates the reads of these bytes
  uint64_t token_ = 0;
  uint32_t known_base_ = 0;         // position of known_[0], relative to spec_.first
  std::vector<uint32_t> known_;     // source block ids (one-sided lanes)
  std::vector<std::optional<uint32_t>> known_checksums_;  // of the same blocks
  uint32_t remote_pool_ = 0;
  bool is_complete_ = false;
  bool is_queued_ = false;          // the source's engine has accepted the prompt
  Nanos engine_lived_at_ = 0;       // the last heartbeat of the source's engine that its agent reported
  bool has_heard_of_engine_ = false;  // over this session
  bool is_granted_ = false;         // a READY came: the grant exists, renew it
  bool is_given_back_ = false;
  uint32_t before_complete_ = 0, checked_ = 0;
  uint32_t renew_seq_ = 0;
  Nanos source_ttl_ = 0;            // the longest remaining lifetime that was announced: the source may grant for less than we ask
  Nanos renew_at_ = kNever;
  Nanos first_read_at_ = 0, read_began_at_ = 0, reading_ns_ = 0, last_landed_at_ = 0;
};

}  // namespace kvxfer
