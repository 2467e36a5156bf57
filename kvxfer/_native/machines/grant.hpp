// The grant table: the source's side, and the judge.
//
// A grant promises one reader that some blocks stay unchanged until it ends. It is ALIVE while its state says so AND now < expiry;
// both are checked at the moment of the question, so a late sweeper changes nothing. Every other state is final; repeated events
// are harmless and change nothing.
//
//            ready pull confirm renew        release      revoke      expire      reader_dead
//   ALIVE    ALIVE                           RELEASED     REVOKED     EXPIRED     READER_GONE
//   ended    (the owner's `ready` is an error; everything else leaves the state as it is)
//
// The owner may overwrite blocks only after the state left ALIVE. That, with the verdict, is the whole safety argument: a verdict
// `ok` is given only while ALIVE, at a moment after the reader's last byte was read. On one-sided lanes, and for bytes that
// `stream` or `unix` sent zero-copy, the reader asks after its last read; otherwise the source judges once the kernel has a copy of
// the last byte. So the reader read all bytes before the owner could have overwritten them.
//
// The table remembers a verdict by its nonce: asked again (the reply was lost) the answer is the same, also after the grant ended,
// because the verdict holds for the moment it was given. Ended grants leave a tombstone, so that a late reader learns how the grant
// ended, and no id is used twice.
//
// The layout of blocks must be equal on both sides (the record's digest), and so must their meaning: owner and reader may each give
// a digest of the content, such as the tokens. If both do and the digests differ, the pull is refused.
//
// A pull may come before its grant. It waits, bounded in time and in count (in total and per peer), and gets QUEUED frames about
// its state (intake.hpp says what the source knows of prompts without a grant). A pull of no blocks only asks whether the grant
// exists: its reader has reserved nothing, and has not begun to read. The first reader that presents the id binds the grant to its
// exact incarnation; if the owner named an agent, only that agent can. Frames of other peers about the id (pull, confirm, release,
// renew, cancel) have no effect, before the grant is made and after.
//
// A grant of registered memory is made without its owner (by a peer's FETCH, or by this agent's own push) and is bound to one exact
// reader from the start; its owner is not told how it ends. All other rules are the same.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>

#include "bugs.hpp"
#include "effects.hpp"
#include "intake.hpp"
#include "memory_claim.hpp"
#include "waiting.hpp"

namespace kvxfer {

enum class GrantEvent : uint8_t { Ready, Pull, Confirm, Renew, Release, Revoke, Expire, ReaderDead };

// The table above. Throws Error(internal) for a pair that is not in it.
GrantState next_state(GrantState state, GrantEvent event);
Code code_of(GrantState state);  // the code that a reader gets; ok while alive

struct GrantLimits {
  size_t grants_max = 65536;
  size_t tombstones_max = 65536;
  size_t waiting_max = 1024;
  Nanos ttl_ns = 10'000 * kMillisecond;
  Nanos lifetime_max_ns = 600'000 * kMillisecond;
  Nanos wait_max_ns = 600'000 * kMillisecond;     // of a pull of a prompt that the engine here does not know, whatever its reader asks for
  Nanos unknown_wait_ns = 2'000 * kMillisecond;   // before an id that the engine does not know counts as unknown
  Nanos queued_every_ns = 250 * kMillisecond;     // between two QUEUED frames to a waiting pull
  Nanos away_max_ns = 60'000 * kMillisecond;      // how long a waiting pull is kept without a session: its reader dials again
  uint64_t data_bytes_max = 1 << 20;  // of one DATA frame, unless a single block is larger
};

struct GrantCounts {
  size_t alive = 0, waiting_pulls = 0, expected = 0;
  size_t unread = 0;         // alive, and their readers have not begun to read
  size_t unread_blocks = 0;  // of those
  uint64_t released = 0, expired = 0, revoked = 0, reader_gone = 0, verdicts_ok = 0, verdicts_refused = 0;
  uint64_t refused = 0;  // requests for another reader's grant, or out of range
};

class GrantTable {
 public:
  explicit GrantTable(GrantLimits limits);
  GrantTable(const GrantTable&) = delete;
  GrantTable& operator=(const GrantTable&) = delete;

  // --- the owner's acts ---
  // The engine here accepted the prompt of this id, for the agent `reader` (empty: the first to come), and will grant or abort it.
  // Throws Error as grant() for an id that was used before or that its reader aborted, and limit_exceeded.
  void expect(const TransferId& id, const std::string& reader);
  // A heartbeat of the engine here, which has work or has none. `took_in`: it has taken in everything that had reached it at its
  // last such pulse. If the owner never calls pulse(), early pulls wait as long as their readers want.
  void pulse(bool has_work, bool took_in, Nanos now) { intake_.pulse(has_work, took_in, now); }
  // Whether the reader of a grant has asked for blocks of it. False for unknown grants and grants of elements.
  bool has_begun(const TransferId& id) const;
  // Throws Error: invalid_argument (id used before, ttl), limit_exceeded, blocks_busy (from the ledger), grant_released (the reader
  // that is named here aborted the transfer before this grant was made).
  void grant(const TransferId& id, Ledger& ledger, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns, Nanos now,
             Effects& out, const Bytes32& content_digest = {});
  // The owner will never make this grant: readers that wait for it, or ask for it later, get grant_revoked.
  void abort_grant(const TransferId& id, Effects& out);
  // The first `blocks` blocks are written and stay unchanged. Cumulative: never less than before. Throws Error(grant_*) once ended,
  // grant_unknown, invalid_argument. `checksums`: CRC-32C of each block that becomes ready by this call, or none.
  void ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete, Nanos now, Effects& out,
             const std::vector<uint32_t>& checksums = {});
  // The pool and the blocks that ready(id, blocks) would newly make ready; none if that would throw or the pool has no checksums.
  std::pair<uint32_t, std::vector<uint32_t>> becoming_ready(const TransferId& id, uint32_t blocks) const;
  // `event` is Revoke or Release. Returns the state of the grant afterwards, which is never Alive. Its reader gets `why`, now or
  // when it asks.
  GrantState end(const TransferId& id, GrantEvent event, Nanos now, Effects& out, const std::string& why = {});
  std::optional<GrantState> state(const TransferId& id, Nanos now) const;
  // From now on only the agent `reader` may read it (empty: leave it open), unless a reader is bound or named already, or the grant
  // has ended. Returns the agent id that it is bound to or named for; empty: none yet, or never. Throws Error(grant_unknown).
  std::string bind(const TransferId& id, const std::string& reader, Nanos now);
  // Whether exactly that grant is alive; `serial` 0: the one that has the id now.
  bool is_alive(const TransferId& id, uint64_t serial, Nanos now) const;

  // --- registered memory ---
  // A grant to exactly `reader`, all of it ready; returns when it ends in spite of all renewals. `cost`: bytes of memory that the
  // list of a peer's FETCH takes, counted against the quota of `charged`; 0: our own push. Throws
  // Error(invalid_argument, limit_exceeded, overloaded).
  Nanos grant_elements(const TransferId& id, std::unique_ptr<MemoryClaim> claim, const AgentRef& reader, const AgentRef& charged, Nanos ttl_ns, uint64_t cost,
                     Nanos now);
  // Whether grant_elements would find room, before a list is made; throws as it does.
  void check_room(const AgentRef& charged, uint64_t cost) const;
  bool knows(const TransferId& id) const { return grants_.count(id) != 0; }  // live, or ended not long ago
  bool is_of_elements(const TransferId& id) const;
  bool has_reader(const AgentRef& reader) const;  // of a grant that is alive, or with a pull that waits
  bool is_bound_to(const TransferId& id, const AgentRef& peer) const;
  // Aborted before there was a grant, by a peer that may not have been the intended reader.
  bool is_aborted_by_another(const TransferId& id, const AgentRef& peer) const;
  // False if the grant is known and never had a verdict ok.
  bool has_confirmed(const TransferId& id) const;
  // Ends every grant over the region.
  void revoke_over(uint32_t region, Nanos now, Effects& out);
  void count_refusal() { ++counts_.refused; }
  uint64_t refusals() const { return counts_.refused; }

  // --- from a session whose peer is proven ---
  void on_pull(SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out);
  void on_confirm(SessionId session, const AgentRef& peer, const Confirm& confirm, Nanos now, Effects& out);
  void on_release(const AgentRef& peer, const TransferId& id, Nanos now, Effects& out);
  void on_renew(const AgentRef& peer, const Renew& renew, Nanos now);
  void on_cancel(SessionId session, const Cancel& cancel);
  // The kernel accepted the whole of the last SendData of this attempt. `is_zero_copy`: it will read the blocks when the reader
  // does. `serial`: of that SendData's grant; 0: of the grant that has the id now.
  void data_sent(SessionId session, const TransferId& id, uint32_t attempt, uint32_t count, bool is_zero_copy, Nanos now, Effects& out,
                 uint64_t serial = 0);
  // The bytes of a SendData of this grant cannot be read: its memory is gone, and the zeros sent in their place must never be
  // confirmed, over this session or another. So the grant ends (revoked), and its reader gets `code`.
  void data_failed(const TransferId& id, uint64_t serial, Code code, const std::string& text, Nanos now, Effects& out);
  void session_closed(SessionId session, Nanos now);
  void reader_dead(const AgentRef& reader, Nanos now, Effects& out);

  void tick(Nanos now, Effects& out);
  Nanos next_deadline() const;
  GrantCounts counts() const;

 private:
  struct Reading {  // the current attempt of a grant's reader, on one session
    SessionId session = 0;
    Pull pull;
    uint32_t ids_told = 0;
    bool is_told = false;      // a READY of this attempt went out
    uint32_t told_seq = 0;
    uint32_t sent = 0;         // blocks that the kernel accepted (stream)
    uint32_t sending = 0;      // blocks of the SendData in progress
    bool is_judged = false;
    bool has_zero_copy = false;     // the kernel may not have read all sent bytes: the reader asks for the verdict
  };
  struct Promise {  // what a grant needs only while it is alive
    std::unique_ptr<MemoryClaim> claim;
    std::vector<std::optional<uint32_t>> checksums;  // of the ready blocks, if the owner gave them
    AgentRef charged;                    // the peer whose quota it uses, where it has a cost
    uint64_t cost = 0;
    Bytes32 content_digest{};            // zero: the owner does not say
    Nanos lifetime_end = 0;
    uint32_t seq = 0, ready_blocks = 0, layers = 0;
    bool is_complete = false;
    std::optional<Reading> reading;
  };
  struct Grant {
    TransferId id;
    uint64_t serial = 0;                 // unique to this grant
    GrantState state = GrantState::Alive;
    bool is_of_elements = false;         // of registered memory: the owner does not know it
    bool is_open = false;                // made for the first to come
    bool is_aborted = false;             // released by its reader before the grant was made
    bool has_begun = false;              // the reader's last pull asked for at least one block
    std::unique_ptr<Promise> promise;    // while alive: tens of thousands of tombstones stay without one
    std::string reader_id;               // empty: the first to come
    std::optional<AgentRef> reader;      // bound
    Nanos expiry = 0;
    uint32_t renew_seq = 0;
    uint32_t attempt = 0;                // the last one that was served; the reader counts from 1 over all its sessions
    std::string why;                     // the owner's reason for ending it
    std::vector<std::pair<uint64_t, Code>> verdicts;  // by nonce, oldest first
  };
  static Reading* reading_of(const Grant& grant) { return grant.promise && grant.promise->reading ? &*grant.promise->reading : nullptr; }
  bool is_alive(const Grant& grant, Nanos now) const { return grant.state == GrantState::Alive && now < grant.expiry; }
  void finish(Grant& grant, GrantEvent event, Effects& out);
  void lapse(Grant& grant, Nanos now, Effects& out);  // updates the state after its expiry
  void accept(Grant& grant, SessionId session, const AgentRef& peer, const Pull& pull, Nanos now, Effects& out);
  void serve(Grant& grant, Nanos now, Effects& out);
  Ready announcement(const Grant& grant, Reading& reading, uint32_t can_read, Nanos now);
  static std::vector<uint32_t> checksums_of(const Promise& promise, uint32_t first, uint32_t count);
  void send_next(Grant& grant, Reading& reading, uint32_t can_read, Effects& out);
  Code judge(Grant& grant, uint64_t nonce, Nanos now, Effects& out);
  void check_new(const TransferId& id, const std::string& reader, Nanos ttl_ns) const;
  Grant& add(const TransferId& id);
  Grant& add_alive(const TransferId& id, std::unique_ptr<MemoryClaim> claim, Nanos now);
  void check_count() const;
  void add_tombstone(std::deque<TransferId>& tombstones, size_t max, const TransferId& id);
  size_t peer_tombstones_max() const { return std::max<size_t>(limits_.tombstones_max / 4, 1); }
  void set_expiry(Grant& grant, Nanos expiry);
  void refuse(SessionId session, const Pull& pull, Code code, const std::string& text, Effects& out);
  void tell(WaitingPull& waiting, Nanos now, Effects& out);
  void count_unread(const Grant& grant, bool is_unread);
  void check_unused(const TransferId& id, const std::string& reader) const;

  GrantLimits limits_;
  uint64_t next_serial_ = 1;
  std::unordered_map<TransferId, Grant, TransferIdHash> grants_;  // live grants and tombstones
  std::deque<TransferId> tombstones_;  // oldest first
  // Of aborted pulls without a grant, and of elements: any peer can make those, so they evict only each other.
  std::deque<TransferId> aborted_, ended_of_elements_;
  std::set<std::pair<Nanos, TransferId>> expiries_;
  WaitingPulls waiting_;
  Intake intake_;
  PeerQuota fetches_;
  GrantCounts counts_;
};

}  // namespace kvxfer
