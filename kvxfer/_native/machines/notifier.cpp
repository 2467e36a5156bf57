#include "notifier.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer {
namespace {

constexpr size_t kDeadMax = 4096;
constexpr uint64_t kSeqMax = uint64_t{1} << 62;

}  // namespace

uint64_t Notifier::post(const AgentRef& to, std::string payload, Nanos now) {
  if (payload.size() > bytes_max_) throw Error(Code::invalid_argument, "notification is over notification_bytes_max (" + std::to_string(bytes_max_) + ")");
  Peer& box = alive(to);
  if (box.pending.size() >= pending_max_) {
    throw Error(Code::limit_exceeded, "notifications_max (" + std::to_string(pending_max_) + ") wait for " + to.agent_id);
  }
  if (box.pending.empty()) box.sent_at = now;
  box.pending.emplace_back(box.next_seq, std::move(payload));
  return box.next_seq++;
}

bool Notifier::has_pending(const AgentRef& to) const {
  const auto found = peers_.find(to);
  return found != peers_.end() && !found->second.pending.empty();
}

void Notifier::flush(const AgentRef& to, SessionId session, bool is_again, Nanos now, Effects& out) {
  const auto found = peers_.find(to);
  if (found == peers_.end()) return;
  Peer& box = found->second;
  for (const auto& [seq, payload] : box.pending) {
    if (!is_again && seq < box.unsent_seq) continue;
    out.push_back(SendFrame{session, Notif{NotifKind::Deliver, seq, box.pending.front().first, payload}});
    box.unsent_seq = std::max(box.unsent_seq, seq + 1);
    box.sent_at = now;
  }
}

void Notifier::on_notif(SessionId session, const AgentRef& from, const Notif& notif, Nanos now, Effects& out) {
  if (notif.kind == NotifKind::Ack) {
    const auto found = peers_.find(from);
    if (found == peers_.end()) return;
    Peer& box = found->second;
    if (notif.seq >= box.next_seq) return skip_to(box, from, notif.seq, out);
    while (!box.pending.empty() && box.pending.front().first <= notif.seq) {
      out.push_back(NotifDelivered{from, box.pending.front().first});
      box.pending.pop_front();
      box.sent_at = now;
    }
    return;
  }
  uint64_t& last = alive(from).delivered;
  if (notif.oldest <= notif.seq && notif.oldest > last + 1) last = notif.oldest - 1;
  if (notif.seq == last + 1) {
    last = notif.seq;
    out.push_back(NotifReceived{from, notif.seq, notif.payload});
  }
  out.push_back(SendFrame{session, Notif{NotifKind::Ack, last, 0, {}}});
}

void Notifier::peer_dead(const AgentRef& peer, Effects& out) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return;
  Peer& box = found->second;
  for (const auto& [seq, _] : box.pending) out.push_back(NotifFailed{peer, seq, Code::peer_gone});
  box.pending.clear();
  box.unsent_seq = box.next_seq;
  dead_.erase(box.death);
  dead_.emplace(box.death = ++deaths_, peer);
  if (dead_.size() <= kDeadMax) return;
  peers_.erase(dead_.begin()->second);
  dead_.erase(dead_.begin());
}

// It has taken more from us than we know of: our numbers for it were forgotten, and what went out since was dropped for old.
void Notifier::skip_to(Peer& box, const AgentRef& peer, uint64_t last, Effects& out) {
  if (last > kSeqMax) throw Error(Code::protocol, "an acknowledgement of a number that no notification has");
  for (const auto& [seq, _] : box.pending) out.push_back(NotifFailed{peer, seq, Code::transport});
  box.pending.clear();
  box.unsent_seq = box.next_seq = last + 1;
}

void Notifier::peer_lives(const AgentRef& peer) {
  if (const auto found = peers_.find(peer); found != peers_.end()) dead_.erase(std::exchange(found->second.death, 0));
}

Notifier::Peer& Notifier::alive(const AgentRef& peer) {
  Peer& found = peers_[peer];
  dead_.erase(std::exchange(found.death, 0));
  return found;
}

std::vector<AgentRef> Notifier::overdue(Nanos now, Nanos patience_ns) const {
  std::vector<AgentRef> peers;
  for (const auto& [peer, box] : peers_) {
    if (!box.pending.empty() && now - box.sent_at >= patience_ns) peers.push_back(peer);
  }
  return peers;
}

void Notifier::postpone(const AgentRef& to, Nanos now) {
  if (const auto found = peers_.find(to); found != peers_.end()) found->second.sent_at = now;
}

Nanos Notifier::next_deadline(Nanos patience_ns) const {
  Nanos next = kNever;
  for (const auto& [_, box] : peers_) {
    if (!box.pending.empty()) next = std::min(next, box.sent_at + patience_ns);
  }
  return next;
}

size_t Notifier::pending_count() const {
  size_t count = 0;
  for (const auto& [_, box] : peers_) count += box.pending.size();
  return count;
}

}  // namespace kvxfer
