// Our own memory as the core knows it: pools of blocks, registered regions, and what keeps them alive while they are used.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "layout.hpp"
#include "machines/ledger.hpp"
#include "region.hpp"

namespace kvxfer {

class UcxMemory;  // lanes/ucx.hpp

namespace cuda {
class Context;  // lanes/cuda_api.hpp
}

struct Pool {
  PoolInfo info;
  Layout layout;
  uint64_t region_bytes = 0;
  std::shared_ptr<Region> region;  // null: memory of somebody else
  uint64_t serial = 0;             // never used twice, unlike the id
  std::shared_ptr<UcxMemory> ucx;  // null: not readable by that lane, nor filled by it
  std::shared_ptr<cuda::Context> device;  // null: the host's memory
};

// A registered region of our own.
struct OwnRegion {
  static constexpr uint64_t kSerial = 1;  // every region's: its id never comes back
  RegionInfo info;
  uint8_t* base = nullptr;
  std::shared_ptr<Region> region;
  std::shared_ptr<UcxMemory> ucx;
  std::shared_ptr<cuda::Context> device;
};

// A pool or region that is not there any more. Its id may be a new pool's already.
struct Withdrawn {
  uint32_t id = 0;
  uint64_t serial = 0;
};

// All of them at one moment.
struct RegionTable {
  explicit RegionTable(const std::map<uint32_t, std::shared_ptr<const OwnRegion>>& regions);
  // Those that `extent` names, each once; empty where one of them is not known.
  std::vector<std::shared_ptr<const OwnRegion>> of(const Extent& extent) const;

  std::shared_ptr<const Bases> bases;  // keeps no region there

 private:
  std::vector<std::shared_ptr<const OwnRegion>> regions_;  // as they stand in `bases`
};

// Own memory that an extent names, found, and what keeps it there while it is used. Whether it may be used is another question.
struct OwnMemory {
  std::shared_ptr<const Layout> layout;
  std::shared_ptr<const Pool> pool;                        // of blocks
  std::vector<std::shared_ptr<const OwnRegion>> regions;  // of pieces, and no other
  std::shared_ptr<cuda::Context> device;       // some of it is there: nobody else may touch it
  bool is_exposed = false;                     // one-sided lanes may read it
  bool is_ours = false;                        // kvxfer allocated all of it: it is there as long as this is
  explicit operator bool() const { return layout != nullptr; }
};

}  // namespace kvxfer
