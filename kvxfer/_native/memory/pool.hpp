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
  std::shared_ptr<Region> region;  // null: memory that kvxfer did not allocate
  uint64_t serial = 0;             // never used twice, unlike the id
  std::shared_ptr<UcxMemory> ucx;  // null: the lane `ucx` neither reads nor fills this pool
  std::shared_ptr<cuda::Context> device;  // null: the host's memory
};

// A registered region of our own.
struct OwnRegion {
  static constexpr uint64_t kSerial = 1;  // one serial for all regions: a region's id is never used twice
  RegionInfo info;
  uint8_t* base = nullptr;
  std::shared_ptr<Region> region;
  std::shared_ptr<UcxMemory> ucx;
  std::shared_ptr<cuda::Context> device;
};

// A pool or region that was removed. A new pool may have its id already.
struct Withdrawn {
  uint32_t id = 0;
  uint64_t serial = 0;
};

// All registered regions at one moment.
struct RegionTable {
  explicit RegionTable(const std::map<uint32_t, std::shared_ptr<const OwnRegion>>& regions);
  // Those that `extent` names, each once; empty where one of them is not known.
  std::vector<std::shared_ptr<const OwnRegion>> of(const Extent& extent) const;

  std::shared_ptr<const Bases> bases;  // keeps no region alive

 private:
  std::vector<std::shared_ptr<const OwnRegion>> regions_;  // by the region's slot in `bases`
};

// Our memory that an extent names, and what keeps it alive while it is used. Whether it may be used is for the endpoint to say.
struct OwnMemory {
  std::shared_ptr<const Layout> layout;
  std::shared_ptr<const Pool> pool;            // if the extent names blocks
  std::vector<std::shared_ptr<const OwnRegion>> regions;  // if it names elements: those that they lie in
  std::shared_ptr<cuda::Context> device;       // not null: some of it is device memory, which only this driver may touch
  bool is_exposed = false;                     // one-sided lanes may read it
  bool is_ours = false;                        // kvxfer allocated all of it: it is mapped as long as this object
  explicit operator bool() const { return layout != nullptr; }
};

}  // namespace kvxfer
