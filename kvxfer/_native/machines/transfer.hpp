// One transfer: the destination's side of one pull, from the wish to the moment its blocks are the owner's again.
//
// Five things can happen to a pull, and the table below is about those; the sixth, that its last read ends after it was
// already over, is not a state but a flag: a transfer that is final is *drained* once no read into its blocks can still be
// under way. Until then its blocks are quarantined.
//
//                 session_up  session_up_landed  heard    landed   landed_all  session_lost  verdict_ok  fail    cancel
//   CONNECTING    WAITING     CONFIRMING         -        CONN.    CONN.       CONNECTING    -           FAILED  CANCELLED
//   WAITING       -           -                  READING  -        -           CONNECTING    -           FAILED  CANCELLED
//   READING       -           -                  READING  READING  CONFIRMING  CONNECTING    -           FAILED  CANCELLED
//   CONFIRMING    -           -                  CONF.    -        -           CONNECTING    COMMITTED   FAILED  CANCELLED
//   COMMITTED, FAILED, CANCELLED: nothing moves them; a late landing only drains.      ("-": impossible, an error)
//
// The reads of one transfer go in the order of the grant's positions, one at a time, so that what has landed is always a
// prefix: a cut costs only what was under way, and an attempt that follows asks for the rest. Everything that landed under
// one grant stays good across attempts, because the source promised those bytes for the life of the grant and the verdict,
// asked after the last read, says that this life had not ended. An attempt is bound to the very incarnation of the source
// that the transfer names; another life of it is another source, and ends the transfer.
//
// Only a verdict `ok` for a nonce of this transfer, taken while every block has landed, commits.
#pragma once

#include <memory>

#include "bugs.hpp"
#include "effects.hpp"
#include "ledger.hpp"

namespace kvxfer {

enum class TransferEvent : uint8_t { SessionUp, SessionUpLanded, Heard, Landed, LandedAll, SessionLost, VerdictOk, Fail, Cancel };

// The table above. Throws Error(internal) for an impossible pair.
TransferState next_state(TransferState state, TransferEvent event);

struct TransferLimits {
  Nanos stall_ns = 1'000 * kMillisecond;      // heard nothing of this transfer for so long: ask again; then after twice that, up to 16 times
  Nanos reconnect_ns = 3'000 * kMillisecond;  // source unreachable for so long: peer_gone
  Nanos ttl_ns = 10'000 * kMillisecond;       // asked for with each renewal
  uint32_t wait_ms = 60'000;                  // how long the pull may wait at the source for its grant
  uint64_t read_bytes_max = 4 << 20;          // of one ReadBlocks, unless a single block is larger
};

struct TransferSpec {
  TransferId id;
  AgentRef source;
  std::vector<uint32_t> blocks;  // destination blocks, for grant positions first, first + 1, ...
  uint32_t first = 0;
  std::vector<Lane> lanes;  // allowed, best first
  Nanos deadline = kNever;
  uint64_t nonce_seed = 0;  // random; nonces of this transfer are drawn from it
  Bytes32 content{};        // of what the blocks are taken to hold; zero: not said
};

class Transfer {
 public:
  // Reserves the destination blocks; throws Error(invalid_argument, blocks_busy).
  Transfer(TransferSpec spec, TransferLimits limits, Ledger& ledger, Nanos now);

  const TransferId& id() const { return spec_.id; }
  const AgentRef& source() const { return spec_.source; }
  TransferState state() const { return state_; }
  Lane lane() const { return spec_.lanes[lane_]; }
  SessionId session() const { return session_; }
  bool is_over() const { return is_final(state_) && is_drained_; }
  uint32_t done() const { return done_; }
  uint32_t total() const { return static_cast<uint32_t>(spec_.blocks.size()); }
  uint32_t pool() const { return ledger_->info().id; }
  // Not connected, nothing under way, and the back-off has passed.
  bool can_attach() const { return state_ == TransferState::Connecting && session_ == 0 && reading_ == 0; }
  bool needs_session(Nanos now) const { return can_attach() && now >= dial_at_; }

  void dialing() { dial_at_ = kNever; }  // somebody is on it: do not ask again before it failed
  void session_up(SessionId session, Nanos now, Effects& out);
  void session_lost(Nanos now, Effects& out);
  void dial_failed(Code code, const std::string& text, Nanos now, Effects& out);
  void source_dead(Nanos now, Effects& out) { fail(Code::peer_gone, "the source is gone", now, out); }

  void on_ready(const Ready& ready, Nanos now, Effects& out);
  // Stream: blocks are about to arrive. Returns the own blocks to fill and sets `token`, or nothing: throw the bytes away.
  std::vector<uint32_t> on_data(const Data& data, Nanos now, uint64_t& token);
  void on_verdict(const Verdict& verdict, Nanos now, Effects& out);
  void on_error(const ErrorFrame& error, Nanos now, Effects& out);
  void on_revoke(const Revoke& revoke, Nanos now, Effects& out);

  // The read named by `token` is over: its bytes are in place, or it stopped and will write no more.
  void landed(uint64_t token, Nanos now, Effects& out);
  void stopped(uint64_t token, Code code, const std::string& text, Nanos now, Effects& out);
  bool is_landing(uint64_t token) const { return reading_ != 0 && token == token_ && !is_final(state_); }

  void cancel(Nanos now, Effects& out);
  void tick(Nanos now, Effects& out);
  Nanos wake_at() const;

 private:
  void move(TransferEvent event) { state_ = next_state(state_, event); }
  void send(Frame frame, Effects& out) const { out.push_back(SendFrame{session_, std::move(frame)}); }
  void ask(Nanos now, Effects& out);
  void ask_verdict(bool is_fresh, Nanos now, Effects& out);
  void read_on(Nanos now, Effects& out);
  void begin_read(uint32_t count, Nanos now);
  uint32_t end_read(Nanos now);
  void next_lane(const std::string& why, Nanos now, Effects& out);
  void fail(Code code, const std::string& text, Nanos now, Effects& out);
  void finish(TransferEvent event, Code code, const std::string& text, Nanos now, Effects& out);
  void drain(Effects& out);
  uint64_t draw_nonce();
  Nanos patience() const;

  TransferSpec spec_;
  TransferLimits limits_;
  Ledger* ledger_;
  TransferState state_ = TransferState::Connecting;
  size_t lane_ = 0;
  std::string lane_notes_;
  SessionId session_ = 0;
  uint32_t attempt_ = 0;
  uint64_t attempt_nonce_ = 0;
  uint64_t nonce_state_;
  std::vector<uint64_t> asked_;     // nonces made after the last read
  uint32_t done_ = 0;               // landed, always a prefix
  uint32_t reading_ = 0;            // blocks of the read under way
  bool reading_is_complete_ = false;
  uint64_t token_ = 0;
  uint32_t known_base_ = 0;         // position of known_[0], relative to spec_.first
  std::vector<uint32_t> known_;     // source block ids (one-sided lanes)
  uint32_t remote_pool_ = 0;
  bool is_complete_ = false;
  bool is_granted_ = false;         // a READY came: the grant exists, renew it
  bool is_drained_ = false;
  bool is_given_back_ = false;
  uint32_t before_complete_ = 0;
  uint32_t renew_seq_ = 0;
  Nanos source_ttl_ = 0;            // the longest rest of the grant's life that was told: the source may grant for less than we ask
  uint32_t dials_failed_ = 0;
  Code unreachable_code_ = Code::peer_gone;  // of the last dial that failed
  std::string unreachable_text_;
  uint32_t silences_ = 0;           // questions in a row that brought no bytes
  Nanos heard_at_, renew_at_ = kNever, dial_at_, unreachable_since_;
  Nanos posted_at_, first_read_at_ = 0, read_began_at_ = 0, reading_ns_ = 0, last_landed_at_ = 0;
};

}  // namespace kvxfer
