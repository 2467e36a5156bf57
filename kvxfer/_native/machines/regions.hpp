// The registered regions of one agent: open-ended grants and offers, and the count of what leans on each.
//
// A region is LIVE from its registration on: any proven peer may read any byte of it (can_read), or ask this agent to fill
// it (can_write), without a word of its owner. Each read is a grant of its own all the same, made where the FETCH comes and
// judged like every other; each write is a transfer of this agent's own, which holds the region while it may still land.
//
//              add     withdraw      a claim is given back, the last one that lands here
//   unknown    LIVE    (error)
//   LIVE       (error) WITHDRAWN     LIVE
//   WITHDRAWN  (error) WITHDRAWN     GONE     gone for good: its id is never taken again in this incarnation
//
// Withdrawing ends the promise at once: every grant over the region is revoked before, nothing new is let in, and a peer
// that reads on gets no verdict. Memory that this agent fills itself it cannot leave while a read into it is under way:
// the region stays WITHDRAWN, and is forgotten once the last of those has drained. That is why an id, once known to be of
// a region, may be read before the source has said another word: either it is still that region, or nothing is confirmed.
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
  // From here on nothing new is let in; its own reads and writes too are refused.
  void withdraw(uint32_t region);  // throws Error(invalid_argument) for a region that is not there
  // Forgets a withdrawn region. Throws Error(blocks_busy) while something may land there.
  void remove(uint32_t region);

  // The regions that the list's elements lie in. Throws Error(invalid_argument for Own, else refused) where an element is not
  // inside a live region that allows the use: one comparison a range.
  std::vector<uint32_t> check(const ElementList& list, RegionUse use) const;
  // Why a one-sided lane (that maps, or another) must not be given them, or null. It would give the reader all of each: a
  // push out of a region that is not offered to readers goes by a lane whose bytes this agent sends.
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
  std::set<uint32_t> used_;  // ids that were given once; of very many only the highest are kept, and all below are taken
  uint32_t floor_ = 0;
};

}  // namespace kvxfer
