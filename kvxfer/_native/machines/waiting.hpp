// Pulls that came before their grants: bounded in count, for all and for each peer, and in time. Each is told from time to
// time how it stands.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "frames.hpp"
#include "shares.hpp"

namespace kvxfer {

struct WaitingPull {
  SessionId session;
  AgentRef peer;
  Pull pull;
  Nanos deadline;              // its reader's own
  Nanos unasked_until = kNever;  // as long as the engine here has not said that it knows the prompt
  Nanos came_at = 0;
  uint64_t rounds_before = 0;  // of the engine's intake, when it came
  Nanos tell_at = 0;
};

class WaitingPulls {
 public:
  explicit WaitingPulls(size_t max) : max_(max), shares_(max) {}

  size_t size() const { return pulls_.size(); }
  bool has(const TransferId& id) const { return pulls_.count(id) != 0; }
  // Null where there is no room. The same reader that asks again keeps its place and its first deadline.
  WaitingPull* add(SessionId session, const AgentRef& peer, const Pull& pull, Nanos deadline, Nanos unasked_until, Nanos now, uint64_t rounds) {
    const auto range = pulls_.equal_range(pull.id);
    for (auto it = range.first; it != range.second; ++it) {
      if (it->second.peer != peer) continue;
      if (pull.attempt >= it->second.pull.attempt) {
        it->second.session = session;
        it->second.pull = pull;
      }
      return &it->second;
    }
    if (pulls_.size() >= max_ || !shares_.has_room(peer)) return nullptr;
    shares_.take(peer);
    return &pulls_.emplace(pull.id, WaitingPull{session, peer, pull, deadline, unasked_until, now, rounds})->second;
  }
  template <class F>
  void each(F&& visit) {
    for (auto& [_, waiting] : pulls_) visit(waiting);
  }
  // All that wait for `id`, in the order in which they came.
  std::vector<WaitingPull> take(const TransferId& id) {
    const auto range = pulls_.equal_range(id);
    return take_if([](const WaitingPull&) { return true; }, range.first, range.second);
  }
  void drop(const TransferId& id, const AgentRef& peer) {
    const auto range = pulls_.equal_range(id);
    take_if([&](const WaitingPull& waiting) { return waiting.peer == peer; }, range.first, range.second);
  }
  template <class F>
  std::vector<WaitingPull> take_if(F&& is_taken) {
    return take_if(is_taken, pulls_.begin(), pulls_.end());
  }
  Nanos next_deadline() const {
    Nanos next = kNever;
    for (const auto& [_, waiting] : pulls_) next = std::min({next, waiting.deadline, waiting.tell_at});
    return next;
  }

 private:
  using Pulls = std::multimap<TransferId, WaitingPull>;

  template <class F>
  std::vector<WaitingPull> take_if(F&& is_taken, Pulls::iterator begin, Pulls::iterator end) {
    std::vector<WaitingPull> taken;
    while (begin != end) {
      const auto current = begin++;
      if (!is_taken(current->second)) continue;
      shares_.give_back(current->second.peer);
      taken.push_back(std::move(current->second));
      pulls_.erase(current);
    }
    return taken;
  }

  size_t max_;
  Shares shares_;
  Pulls pulls_;
};

}  // namespace kvxfer
