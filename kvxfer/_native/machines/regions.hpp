// The registered regions of one agent: open-ended grants and offers, and the counts of their users.
//
// A region is LIVE from its registration on: any proven peer may read any byte of it (can_read), or ask this agent to fill it
// (can_write), without asking its owner. Each read still is a grant of its own, made when the FETCH comes and judged like every
// other; each write is a transfer of this agent, which holds a claim on the region while it may still land.
//
//              add     withdraw      a claim is given back, the last one that lands here
//   unknown    LIVE    (error)
//   LIVE       (error) WITHDRAWN     LIVE
//   WITHDRAWN  (error) WITHDRAWN     GONE     gone for good: its id is never taken again in this incarnation
//
// Withdrawing ends the promise at once: every grant over the region is revoked before, new requests are refused, and a peer that
// reads on gets no verdict. Memory that this agent fills itself cannot be released while a read into it is in progress: the region
// stays WITHDRAWN until the last of those reads has drained. That is why a peer may read a known region id before the source
// answers: either it is still that region, or the read is not confirmed.
#pragma once

#include <map>
#include <set>

#include "ranges.hpp"

namespace kvxfer {

enum class RegionUse : uint8_t { Own, PeerReads, PeerWrites };

class Regions {
 public:
  // Throws Error(invalid_argument): no bytes, the id is or was taken.
  void add(const RegionInfo& info);
  bool has(uint32_t region) const { return regions_.count(region) != 0; }
  // From here on all new claims are refused, the agent's own too.
  void withdraw(uint32_t region);  // throws Error(invalid_argument) for a region that is not there
  // Forgets a withdrawn region. Throws Error(blocks_busy) while something may land there.
  void remove(uint32_t region);

  // The regions that the list's elements lie in. Throws Error(invalid_argument for Own, else refused) where an element is not
  // inside a live region that allows the use: one comparison a range.
  std::vector<uint32_t> check(const ElementList& list, RegionUse use) const;
  // Why a one-sided lane (mapping or not) must not read them, or null. Such a lane gives the reader the whole of each region, so a
  // push out of a region that is not offered to readers uses a lane whose bytes this agent sends.
  const char* obstacle(const std::vector<uint32_t>& regions, bool is_mapping) const;

  // Counted claims. The caller has checked the regions, and gives each claim back as it took it.
  void claim(const std::vector<uint32_t>& regions, bool is_landing);
  void give_back(const std::vector<uint32_t>& regions, bool is_landing);
  bool is_landing(uint32_t region) const;

  struct RegisteredRegion {
    RegionInfo info;
    bool is_withdrawn = false;
    size_t grants = 0, landings = 0;
  };
  const std::map<uint32_t, RegisteredRegion>& all() const { return regions_; }

 private:
  const RegisteredRegion& at(uint32_t region) const;

  std::map<uint32_t, RegisteredRegion> regions_;
  std::set<uint32_t> used_;  // ids that were used; beyond a limit only the highest are kept, and all below them count as used
  uint32_t floor_ = 0;
};

}  // namespace kvxfer
