#include "notifier.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer {
namespace {

constexpr size_t kDeadMax = 4096;
constexpr uint64_t kSeqMax = uint64_t{1} << 62;
constexpr size_t kEachBytes = 64;           // what one costs apart from its payload
constexpr size_t kWindowPieces = 16;        // sent to one peer and not acknowledged
constexpr size_t kPartsBytesMax = 64 << 20;  // of incomplete notifications, of all peers
constexpr Nanos kPartPatience = 2000 * kMillisecond;  // an incomplete one without news for so long may be dropped

size_t cost_of(const std::string& payload) { return payload.size() + kEachBytes; }

}  // namespace

void Notifier::check_room(const Mailbox& box, const AgentRef& to, size_t bytes) const {
  if (bytes > bytes_max_) throw Error(Code::invalid_argument, "notification is over notification_bytes_max (" + std::to_string(bytes_max_) + ")");
  if (box.pending.size() >= pending_max_) {
    throw Error(Code::limit_exceeded, "notifications_max (" + std::to_string(pending_max_) + ") wait for " + to.agent_id);
  }
  if (box.queued + box.promised + bytes + kEachBytes > queue_bytes_max_ && box.queued + box.promised != 0) {
    throw Error(Code::limit_exceeded, "notification_queue_bytes_max (" + std::to_string(queue_bytes_max_) + ") is reached by what waits for " + to.agent_id);
  }
}

uint64_t Notifier::post(const AgentRef& to, std::string payload, Nanos now) {
  Mailbox& box = alive(to);
  check_room(box, to, payload.size());
  if (box.pending.empty()) box.sent_at = now;
  box.queued += cost_of(payload);
  box.pending.emplace_back(box.next_seq, std::move(payload));
  return box.next_seq++;
}

void Notifier::promise(const AgentRef& to, size_t bytes) {
  Mailbox& box = alive(to);
  check_room(box, to, bytes);
  box.promised += bytes + kEachBytes;
}

void Notifier::take_promise_back(const AgentRef& to, size_t bytes) {
  if (const auto found = mailboxes_.find(to); found != mailboxes_.end()) found->second.promised -= std::min(found->second.promised, bytes + kEachBytes);
}

bool Notifier::has_pending(const AgentRef& to) const {
  const auto found = mailboxes_.find(to);
  return found != mailboxes_.end() && !found->second.pending.empty();
}

void Notifier::flush(const AgentRef& to, SessionId session, bool is_again, Nanos now, Effects& out) {
  const auto found = mailboxes_.find(to);
  if (found == mailboxes_.end()) return;
  if (is_again && !found->second.pending.empty()) send_from(found->second, found->second.taken);
  send(found->second, session, now, out);
}

// Restarts sending at this offset of the oldest pending one.
void Notifier::send_from(Mailbox& box, size_t taken) {
  box.unsent_seq = box.pending.front().first;
  box.unsent_at = box.sent = box.taken = taken;
}

void Notifier::send(Mailbox& box, SessionId session, Nanos now, Effects& out) const {
  if (box.pending.empty()) return;
  const uint64_t oldest = box.pending.front().first;
  while (box.unsent_seq < box.next_seq && box.sent - std::min(box.sent, box.taken) < kWindowPieces * piece_bytes_) {
    const auto& [seq, payload] = box.pending[box.unsent_seq - oldest];
    const size_t left = payload.size() - box.unsent_at, piece = std::min(left, piece_bytes_);
    if (payload.size() <= piece_bytes_) {
      out.push_back(SendFrame{session, Notif{NotifKind::Deliver, seq, oldest, payload}});
    } else {
      out.push_back(SendFrame{session, Notif{NotifKind::Part, seq, oldest, payload.substr(box.unsent_at, piece), static_cast<uint32_t>(box.unsent_at),
                                             static_cast<uint32_t>(payload.size())}});
    }
    box.sent += piece;
    box.unsent_at += piece;
    if (piece == left) {
      box.sent += kEachBytes;
      box.unsent_at = 0;
      ++box.unsent_seq;
    }
    box.sent_at = now;
  }
}

void Notifier::on_notif(SessionId session, const AgentRef& from, const Notif& notif, Nanos now, Effects& out) {
  if (notif.kind == NotifKind::Ack) {
    const auto found = mailboxes_.find(from);
    if (found == mailboxes_.end()) return;
    if (notif.seq >= found->second.next_seq) return skip_to(found->second, from, notif.seq, out);
    on_ack(found->second, from, notif, now, out);
    return send(found->second, session, now, out);
  }
  Mailbox& box = alive(from);
  uint64_t& last = box.delivered;
  if (notif.oldest <= notif.seq && notif.oldest > last + 1) last = notif.oldest - 1;
  if (notif.seq == last + 1) {
    if (notif.kind == NotifKind::Part) {
      on_part(box, from, notif, now, out);
    } else {
      last = notif.seq;
      out.push_back(NotifReceived{from, notif.seq, notif.payload});
    }
  }
  if (box.part_seq <= last) drop_part(box);
  out.push_back(SendFrame{session, Notif{NotifKind::Ack, last, 0, {}, static_cast<uint32_t>(box.part_seq == last + 1 ? box.part.size() : 0)}});
}

void Notifier::on_ack(Mailbox& box, const AgentRef& from, const Notif& ack, Nanos now, Effects& out) {
  while (!box.pending.empty() && box.pending.front().first <= ack.seq) {
    const auto& [seq, payload] = box.pending.front();
    const size_t cost = cost_of(payload);
    box.queued -= cost;
    box.taken = 0;
    if (seq < box.unsent_seq) {
      box.sent -= cost;
    } else {  // the peer has it from before
      box.sent = box.unsent_at = 0;
      box.unsent_seq = seq + 1;
    }
    out.push_back(NotifDelivered{from, seq});
    box.pending.pop_front();
    box.sent_at = now;
  }
  if (box.pending.empty() || box.pending.front().first != ack.seq + 1 || ack.begin >= box.pending.front().second.size()) return;
  box.sent_at = now;
  if (ack.begin < box.taken || (box.unsent_seq == ack.seq + 1 && box.unsent_at < ack.begin)) {
    send_from(box, ack.begin);  // the peer dropped what it had, or has it from before
  }
  box.taken = ack.begin;
}

void Notifier::on_part(Mailbox& box, const AgentRef& from, const Notif& part, Nanos now, Effects& out) {
  if (part.total > bytes_max_) throw Error(Code::protocol, "a notification is over this agent's notification_bytes_max");
  if (part.begin == 0 && (box.part_seq != part.seq || box.part_total != part.total)) {
    drop_part(box);
    box.part_seq = part.seq;
    box.part_total = part.total;
  }
  if (box.part_seq != part.seq || box.part_total != part.total || box.part.size() != part.begin) return;
  if (!make_room(part.payload.size(), now)) return;
  if (box.part_seq != part.seq) return;  // making room dropped this one
  box.part_at = now;
  box.part += part.payload;
  parts_bytes_ += part.payload.size();
  if (box.part.size() != box.part_total) return;
  parts_bytes_ -= box.part.size();
  box.delivered = part.seq;
  out.push_back(NotifReceived{from, part.seq, std::exchange(box.part, {})});
}

// Drops the stalest incomplete notification, so that a peer that stops in the middle of one keeps no other out.
bool Notifier::make_room(size_t bytes, Nanos now) {
  while (parts_bytes_ + bytes > kPartsBytesMax) {
    Mailbox* stalest = nullptr;
    for (auto& [_, box] : mailboxes_) {
      if (!box.part.empty() && (stalest == nullptr || box.part_at < stalest->part_at)) stalest = &box;
    }
    if (stalest == nullptr || now - stalest->part_at < kPartPatience) return false;
    drop_part(*stalest);
  }
  return true;
}

void Notifier::drop_part(Mailbox& box) {
  parts_bytes_ -= box.part.size();
  std::string().swap(box.part);
  box.part_seq = box.part_total = 0;
}

void Notifier::drop_pending(Mailbox& box, const AgentRef& peer, Code code, Effects& out) {
  for (const auto& [seq, _] : box.pending) out.push_back(NotifFailed{peer, seq, code});
  box.pending.clear();
  box.queued = box.sent = box.taken = box.unsent_at = 0;
}

void Notifier::peer_dead(const AgentRef& peer, Effects& out) {
  const auto found = mailboxes_.find(peer);
  if (found == mailboxes_.end()) return;
  Mailbox& box = found->second;
  drop_pending(box, peer, Code::peer_gone, out);
  drop_part(box);
  box.unsent_seq = box.next_seq;
  dead_.erase(box.death);
  dead_.emplace(box.death = ++deaths_, peer);
  if (dead_.size() <= kDeadMax) return;
  mailboxes_.erase(dead_.begin()->second);
  dead_.erase(dead_.begin());
}

// The peer acknowledges more than we sent: our numbers for it were forgotten, and it dropped the latest ones as old.
void Notifier::skip_to(Mailbox& box, const AgentRef& peer, uint64_t last, Effects& out) {
  if (last > kSeqMax) throw Error(Code::protocol, "an acknowledgement of an unused number");
  drop_pending(box, peer, Code::transport, out);
  box.unsent_seq = box.next_seq = last + 1;
}

void Notifier::peer_alive(const AgentRef& peer) {
  if (const auto found = mailboxes_.find(peer); found != mailboxes_.end()) dead_.erase(std::exchange(found->second.death, 0));
}

Notifier::Mailbox& Notifier::alive(const AgentRef& peer) {
  Mailbox& found = mailboxes_[peer];
  dead_.erase(std::exchange(found.death, 0));
  return found;
}

std::vector<AgentRef> Notifier::overdue(Nanos now, Nanos patience_ns) const {
  std::vector<AgentRef> peers;
  for (const auto& [peer, box] : mailboxes_) {
    if (!box.pending.empty() && now - box.sent_at >= patience_ns) peers.push_back(peer);
  }
  return peers;
}

void Notifier::postpone(const AgentRef& to, Nanos now) {
  if (const auto found = mailboxes_.find(to); found != mailboxes_.end()) found->second.sent_at = now;
}

Nanos Notifier::next_deadline(Nanos patience_ns) const {
  Nanos next = kNever;
  for (const auto& [_, box] : mailboxes_) {
    if (!box.pending.empty()) next = std::min(next, box.sent_at + patience_ns);
  }
  return next;
}

size_t Notifier::pending_count() const {
  size_t count = 0;
  for (const auto& [_, box] : mailboxes_) count += box.pending.size();
  return count;
}

}  // namespace kvxfer
