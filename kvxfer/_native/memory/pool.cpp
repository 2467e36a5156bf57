#include "pool.hpp"

namespace kvxfer {

RegionTable::RegionTable(const std::map<uint32_t, std::shared_ptr<const OwnRegion>>& regions) {
  auto all = std::make_shared<Bases>();
  for (const auto& [id, region] : regions) all->add(id, region->base);
  regions_.resize(all->slot_count());
  for (const auto& [id, region] : regions) regions_[all->slot_of(id)] = region;
  bases = std::move(all);
}

std::vector<std::shared_ptr<const OwnRegion>> RegionTable::of(const Extent& extent) const {
  const std::vector<StridedRange>& rows = extent.ranges->rows();
  const bool is_table = extent.ranges->is_table();
  std::vector<std::shared_ptr<const OwnRegion>> found;
  std::vector<bool> is_found(regions_.size());
  bool has_last = false;
  uint32_t last = 0;
  for (uint32_t i = 0; i < extent.count; ++i) {
    const uint32_t region = rows[is_table ? extent[i] : extent.ranges->row_of(extent[i])].region;
    if (has_last && region == last) continue;  // neighbours mostly lie in one region: no look-up for those
    const size_t slot = bases->slot_of(region);
    if (slot == Bases::kNoSlot) return {};
    if (!is_found[slot]) found.push_back(regions_[slot]);
    is_found[slot] = true;
    last = region;
    has_last = true;
  }
  return found;
}

}  // namespace kvxfer
