// How much of a shared limit one peer may use: at most a quarter of it, and at least kQuotaMin.
#pragma once

#include <algorithm>
#include <map>

#include "ids.hpp"

namespace kvxfer {

constexpr size_t kQuotaMin = 16;

inline size_t quota_of_one(size_t max) { return std::min(max, std::max(max / 4, kQuotaMin)); }

class PeerQuota {
 public:
  explicit PeerQuota(size_t max, uint64_t bytes_max = UINT64_MAX)
      : count_max_(quota_of_one(max)), bytes_max_(bytes_max) {}

  bool has_room(const AgentRef& peer, uint64_t bytes = 0) const {
    const auto found = usage_.find(peer);
    if (found == usage_.end()) return count_max_ != 0 && bytes <= bytes_max_;
    return found->second.count < count_max_ && bytes <= bytes_max_ - std::min(bytes_max_, found->second.bytes);
  }
  void take(const AgentRef& peer, uint64_t bytes = 0) {
    Usage& usage = usage_[peer];
    ++usage.count;
    usage.bytes += bytes;
  }
  void give_back(const AgentRef& peer, uint64_t bytes = 0) {
    const auto found = usage_.find(peer);
    if (found == usage_.end()) return;
    found->second.bytes -= bytes;
    if (--found->second.count == 0) usage_.erase(found);
  }

 private:
  struct Usage {
    size_t count = 0;
    uint64_t bytes = 0;
  };
  size_t count_max_;
  uint64_t bytes_max_;
  std::map<AgentRef, Usage> usage_;
};

}  // namespace kvxfer
