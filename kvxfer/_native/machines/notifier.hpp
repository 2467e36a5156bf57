// Notifications: small messages beside the transfers, numbered from 1 per (sender, receiver incarnation).
//
// The sender may send a notification several times (no acknowledgement came). The receiver delivers each number once and in order:
// it accepts only the number after the last one, and answers every notification with the last number. When the receiver's
// incarnation ends, notifications without acknowledgement are reported as failed: they may or may not have been delivered, and only
// the sender's owner can know what that means.
//
// A long notification goes out in parts, and the receiver delivers it when all parts are there. A window bounds the bytes in
// transit until the receiver reports how much it has, so neither side queues more; the queue behind the window is bounded per peer,
// and the error names the bound.
//
// An incarnation that was reported dead may return (it was only cut off). Then neither side may begin at 1 again, because the other
// side would take new notifications for old ones. So the numbers of a bounded count of dead incarnations are kept, and each frame
// carries the oldest number that its sender still holds, so that the receiver does not wait for failed ones.
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
  // Whether a notification of so many bytes could be posted now. Throws as post() does.
  void check_room(const AgentRef& to, size_t bytes) { check_room(alive(to), to, bytes); }
  // Reserves room for one that may be posted later. Throws as post() does.
  void promise(const AgentRef& to, size_t bytes);
  void take_promise_back(const AgentRef& to, size_t bytes);
  bool has_pending(const AgentRef& to) const;
  // Sends all unacknowledged notifications, or those from the first unsent one on, as far as the window allows.
  void flush(const AgentRef& to, SessionId session, bool is_again, Nanos now, Effects& out);
  void on_notif(SessionId session, const AgentRef& from, const Notif& notif, Nanos now, Effects& out);
  void peer_dead(const AgentRef& peer, Effects& out);
  void peer_alive(const AgentRef& peer);  // The peer is known or here again: its numbers are kept, whatever other peers die
  // Peers with notifications that went unacknowledged for `patience_ns`.
  std::vector<AgentRef> overdue(Nanos now, Nanos patience_ns) const;
  void postpone(const AgentRef& to, Nanos now);  // nothing could be sent just now: retry after the same patience
  Nanos next_deadline(Nanos patience_ns) const;
  size_t pending_count() const;

 private:
  struct Mailbox {
    uint64_t next_seq = 1, unsent_seq = 1;
    std::deque<std::pair<uint64_t, std::string>> pending;  // waiting for this peer
    size_t queued = 0, promised = 0;  // bytes of the pending, and of notifications promised to operations in progress
    size_t unsent_at = 0;             // offset in unsent_seq
    size_t sent = 0;                  // bytes from the start of the oldest pending up to there
    size_t taken = 0;                 // how much of the oldest pending the peer reported to have
    Nanos sent_at = 0;
    uint64_t delivered = 0;  // last number delivered from it
    std::string part;                 // the received parts of the next one
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
  std::map<uint64_t, AgentRef> dead_;  // by number of death; their sequence numbers are kept
  uint64_t deaths_ = 0;
};

}  // namespace kvxfer
