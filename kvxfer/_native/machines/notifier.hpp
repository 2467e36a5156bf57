// Notifications: small messages beside the transfers, numbered from 1 per (sender, receiver incarnation).
//
// On the wire a notification may go out again (no acknowledgement came); the receiver delivers each number once and in
// order, because it takes only the number that follows the last and answers everything with that last number. When the
// receiver's incarnation ends, what it has not acknowledged is reported as failed: it may or may not have been delivered, and
// only the sender's owner can know what that means.
//
// A long notification goes out in parts, and the receiver delivers it when all are there. So many bytes at most are under way
// before it says how much came, so that neither side queues more: what waits behind them is bounded a peer, and told by name.
//
// An incarnation that was reported dead may come back (it was only cut off), and then neither side may begin at 1 again: the other
// would take new messages for old ones. So the numbers of a dead incarnation are kept, bounded, and each message says which
// number is the oldest that its sender still holds, so that the receiver does not wait for those that failed.
#pragma once

#include <algorithm>
#include <deque>
#include <map>

#include "effects.hpp"

namespace kvxfer {

class Notifier {
 public:
  Notifier(size_t pending_max, size_t bytes_max, size_t queue_bytes_max, size_t piece_bytes)
      : pending_max_(pending_max), bytes_max_(bytes_max), queue_bytes_max_(queue_bytes_max), piece_bytes_(std::min(piece_bytes, kNotifPieceMax)) {}

  // Returns its number. Throws Error(limit_exceeded, invalid_argument).
  uint64_t post(const AgentRef& to, std::string payload, Nanos now);
  // Whether one of so many bytes could be posted now. Throws as post() does.
  void check_room(const AgentRef& to, size_t bytes) { check_room(alive(to), to, bytes); }
  // Room for one that is to be posted later, if at all. Throws as post() does.
  void promise(const AgentRef& to, size_t bytes);
  void take_promise_back(const AgentRef& to, size_t bytes);
  bool has_pending(const AgentRef& to) const;
  // Sends what is not yet acknowledged, all of it or from the first unsent on, as far as the window goes.
  void flush(const AgentRef& to, SessionId session, bool is_again, Nanos now, Effects& out);
  void on_notif(SessionId session, const AgentRef& from, const Notif& notif, Nanos now, Effects& out);
  void peer_dead(const AgentRef& peer, Effects& out);
  void peer_alive(const AgentRef& peer);  // it is known, or here, again: its numbers are kept, whoever else dies
  // Peers with notifications that went unacknowledged for `patience_ns`.
  std::vector<AgentRef> overdue(Nanos now, Nanos patience_ns) const;
  void postpone(const AgentRef& to, Nanos now);  // nothing could be sent just now: look again a patience later
  Nanos next_deadline(Nanos patience_ns) const;
  size_t pending_count() const;

 private:
  struct Mailbox {
    uint64_t next_seq = 1, unsent_seq = 1;
    std::deque<std::pair<uint64_t, std::string>> pending;  // to it
    size_t queued = 0, promised = 0;  // bytes, those of the pending and those of posts under way
    size_t unsent_at = 0;             // where in unsent_seq
    size_t sent = 0;                  // bytes from the beginning of the oldest pending to there
    size_t taken = 0;                 // how much of the oldest pending it has, as it said last
    Nanos sent_at = 0;
    uint64_t delivered = 0;  // last number delivered from it
    std::string part;        // of the next one: what came
    uint64_t part_seq = 0, part_total = 0;
    Nanos part_at = 0;
    uint64_t death = 0;  // the number of its death; 0: it is alive, as far as is known
  };
  Mailbox& alive(const AgentRef& peer);
  void check_room(const Mailbox& box, const AgentRef& to, size_t bytes) const;
  void send(Mailbox& box, SessionId session, Nanos now, Effects& out) const;
  static void send_from(Mailbox& box, size_t taken);
  void on_ack(Mailbox& box, const AgentRef& from, const Notif& ack, Nanos now, Effects& out);
  void on_part(Mailbox& box, const AgentRef& from, const Notif& part, Nanos now, Effects& out);
  bool make_room(size_t bytes, Nanos now);
  void drop_part(Mailbox& box);
  void drop_pending(Mailbox& box, const AgentRef& peer, Code code, Effects& out);
  void skip_to(Mailbox& box, const AgentRef& peer, uint64_t last, Effects& out);

  size_t pending_max_, bytes_max_, queue_bytes_max_, piece_bytes_;
  size_t parts_bytes_ = 0;  // of all peers
  std::map<AgentRef, Mailbox> mailboxes_;
  std::map<uint64_t, AgentRef> dead_;  // by death; their numbers are kept
  uint64_t deaths_ = 0;
};

}  // namespace kvxfer
