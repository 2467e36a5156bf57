// What peers may hold of something that all of them share: one of them at most a quarter, and yet never fewer than a few.
#pragma once

#include <algorithm>
#include <map>

#include "ids.hpp"

namespace kvxfer {

constexpr size_t kShareMin = 16;

inline size_t share_of_one(size_t max) { return std::min(max, std::max(max / 4, kShareMin)); }

class Shares {
 public:
  explicit Shares(size_t max, uint64_t bytes_max = UINT64_MAX)
      : count_max_(share_of_one(max)), bytes_max_(bytes_max) {}

  bool has_room(const AgentRef& peer, uint64_t bytes = 0) const {
    const auto found = held_.find(peer);
    if (found == held_.end()) return count_max_ != 0 && bytes <= bytes_max_;
    return found->second.count < count_max_ && bytes <= bytes_max_ - std::min(bytes_max_, found->second.bytes);
  }
  void take(const AgentRef& peer, uint64_t bytes = 0) {
    Held& held = held_[peer];
    ++held.count;
    held.bytes += bytes;
  }
  void give_back(const AgentRef& peer, uint64_t bytes = 0) {
    const auto found = held_.find(peer);
    if (found == held_.end()) return;
    found->second.bytes -= bytes;
    if (--found->second.count == 0) held_.erase(found);
  }

 private:
  struct Held {
    size_t count = 0;
    uint64_t bytes = 0;
  };
  size_t count_max_;
  uint64_t bytes_max_;
  std::map<AgentRef, Held> held_;
};

}  // namespace kvxfer
