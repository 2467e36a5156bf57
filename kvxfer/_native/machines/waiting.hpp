// Pulls that came before their grants: bounded in time and in count (in total and per peer). The grant table answers each with a
// QUEUED frame at `tell_at`.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "frames.hpp"
#include "peer_quota.hpp"

namespace kvxfer {

struct WaitingPull {
  SessionId session;
  AgentRef peer;
  Pull pull;
  Nanos deadline;                // the reader's limit on the wait
  Nanos unasked_until = kNever;  // the pull is refused then, unless the engine here has accepted the prompt
  Nanos came_at = 0;
  uint64_t rounds_before = 0;    // Intake::rounds() when the pull came
  Nanos tell_at = 0;             // when the next QUEUED is due
  Nanos away_until = 0;          // not 0: its session has ended, and it is kept until then; the other limits do not change meanwhile

  bool is_away() const { return away_until != 0; }
};

class WaitingPulls {
 public:
  explicit WaitingPulls(size_t max) : max_(max), quota_(max) {}

  size_t size() const { return pulls_.size(); }
  bool has(const TransferId& id) const { return pulls_.count(id) != 0; }
  bool has_peer(const AgentRef& peer) const {
    return std::any_of(pulls_.begin(), pulls_.end(), [&](const auto& pull) { return pull.second.peer == peer; });
  }
  // Null if there is no room. A reader that asks again keeps its place and its first deadline.
  WaitingPull* add(SessionId session, const AgentRef& peer, const Pull& pull, Nanos deadline, Nanos unasked_until, Nanos now, uint64_t rounds) {
    const auto range = pulls_.equal_range(pull.id);
    for (auto it = range.first; it != range.second; ++it) {
      if (it->second.peer != peer) continue;
      if (it->second.is_away() || pull.attempt >= it->second.pull.attempt) {
        it->second.session = session;
        it->second.pull = pull;
        it->second.away_until = 0;
      }
      return &it->second;
    }
    if (pulls_.size() >= max_) drop_away(nullptr);
    if (!quota_.has_room(peer)) drop_away(&peer);
    if (pulls_.size() >= max_ || !quota_.has_room(peer)) return nullptr;
    quota_.take(peer);
    return &pulls_.emplace(pull.id, WaitingPull{session, peer, pull, deadline, unasked_until, now, rounds})->second;
  }
  template <class F>
  void each(F&& visit) {
    for (auto& [_, waiting] : pulls_) visit(waiting);
  }
  // The pulls of this session are away until their reader returns or `away_until`.
  void session_closed(SessionId session, Nanos away_until) {
    for (auto& [_, waiting] : pulls_) {
      if (waiting.session == session && !waiting.is_away()) waiting.away_until = away_until;
    }
  }
  // Takes all pulls that wait for `id`, in the order of their arrival, as take_if() does.
  std::vector<WaitingPull> take(const TransferId& id) {
    const auto range = pulls_.equal_range(id);
    return take_if([](const WaitingPull&) { return true; }, range.first, range.second);
  }
  void drop(const TransferId& id, const AgentRef& peer) {
    const auto range = pulls_.equal_range(id);
    take_if([&](const WaitingPull& waiting) { return waiting.peer == peer; }, range.first, range.second);
  }
  // Removes the pulls that `is_taken` selects, and returns those that can be answered. The reader of a pull that is away gets its
  // answer when it asks again.
  template <class F>
  std::vector<WaitingPull> take_if(F&& is_taken) {
    return take_if(is_taken, pulls_.begin(), pulls_.end());
  }
  Nanos next_deadline() const {
    Nanos next = kNever;
    for (const auto& [_, waiting] : pulls_) next = std::min({next, waiting.deadline, waiting.is_away() ? waiting.away_until : waiting.tell_at});
    return next;
  }

 private:
  using Pulls = std::multimap<TransferId, WaitingPull>;

  // Drops pulls of `peer`, or of any peer, that are away, so that they never keep others out.
  void drop_away(const AgentRef* peer) {
    take_if([&](const WaitingPull& waiting) { return waiting.is_away() && (peer == nullptr || waiting.peer == *peer); });
  }

  template <class F>
  std::vector<WaitingPull> take_if(F&& is_taken, Pulls::iterator begin, Pulls::iterator end) {
    std::vector<WaitingPull> taken;
    while (begin != end) {
      const auto current = begin++;
      if (!is_taken(current->second)) continue;
      quota_.give_back(current->second.peer);
      if (!current->second.is_away()) taken.push_back(std::move(current->second));
      pulls_.erase(current);
    }
    return taken;
  }

  size_t max_;
  PeerQuota quota_;
  Pulls pulls_;
};

}  // namespace kvxfer
