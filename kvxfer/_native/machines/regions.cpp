#include "regions.hpp"

#include "bugs.hpp"

namespace kvxfer {
namespace {

constexpr size_t kUsedMax = 65536;

std::string text_of(uint32_t region) { return "region " + std::to_string(region); }

}  // namespace

void Regions::add(const RegionInfo& info) {
  if (info.bytes == 0) throw Error(Code::invalid_argument, "a region needs at least one byte");
  if (info.id < floor_ || used_.count(info.id) != 0) throw Error(Code::invalid_argument, text_of(info.id) + " is or was another region");
  used_.insert(info.id);
  regions_.emplace(info.id, RegisteredRegion{info, false, 0, 0});
  if (used_.size() > kUsedMax) {
    floor_ = *used_.begin() + 1;
    used_.erase(used_.begin());
  }
}

const Regions::RegisteredRegion& Regions::at(uint32_t region) const {
  const auto found = regions_.find(region);
  if (found == regions_.end()) throw Error(Code::invalid_argument, "there is no " + text_of(region));
  return found->second;
}

void Regions::withdraw(uint32_t region) {
  at(region);
  regions_.at(region).is_withdrawn = true;
}

void Regions::remove(uint32_t region) {
  if (at(region).landings != 0) throw Error(Code::blocks_busy, text_of(region) + " may still be written to: a transfer into it has not drained");
  regions_.erase(region);
}

std::vector<uint32_t> Regions::check(const ElementList& list, RegionUse use) const {
  const Code code = use == RegionUse::Own ? Code::invalid_argument : Code::refused;
  const RegisteredRegion* region = nullptr;
  const auto check_range = [&](const StridedRange& range) {
    if (region == nullptr || region->info.id != range.region) {
      const auto found = regions_.find(range.region);
      if (has_bug(Bug::push_without_offer) && use == RegionUse::PeerWrites && found == regions_.end()) return;
      if (found == regions_.end() || found->second.is_withdrawn) throw Error(code, text_of(range.region) + " is not registered");
      region = &found->second;
      if (use == RegionUse::PeerReads && !region->info.can_read) throw Error(code, text_of(range.region) + " is not offered to readers");
      if (use == RegionUse::PeerWrites && !region->info.can_write) throw Error(code, text_of(range.region) + " is not offered to writers");
    }
    if (range.end() > region->info.bytes) {
      throw Error(code, "a range ends at byte " + std::to_string(range.end()) + " of " + text_of(range.region) + ", which has " + std::to_string(region->info.bytes));
    }
  };
  list.for_each_range(check_range);
  return regions_of(list);
}

const char* Regions::obstacle(const std::vector<uint32_t>& regions, bool is_mapping) const {
  for (const uint32_t id : regions) {
    const auto found = regions_.find(id);
    if (found == regions_.end()) return "the source's region is gone";
    // These lanes give the reader the whole region, not only the elements of this transfer.
    if (!found->second.info.can_read) return "the source's region is not offered to readers";
    if (is_mapping && !found->second.info.is_shareable) return "the source's region cannot be mapped (memory not allocated by kvxfer)";
    if (!is_mapping && !found->second.info.is_exposed) return "the source's region is not exposed to one-sided lanes";
  }
  return nullptr;
}

void Regions::claim(const std::vector<uint32_t>& regions, bool is_landing) {
  for (const uint32_t id : regions) {
    if (has_bug(Bug::push_without_offer) && !has(id)) continue;
    RegisteredRegion& region = regions_.at(id);
    ++(is_landing ? region.landings : region.grants);
  }
}

void Regions::give_back(const std::vector<uint32_t>& regions, bool is_landing) {
  for (const uint32_t id : regions) {
    const auto found = regions_.find(id);
    if (has_bug(Bug::push_without_offer) && found == regions_.end()) continue;
    if (found == regions_.end()) throw Error(Code::internal, "a region was removed before its last claim");
    size_t& count = is_landing ? found->second.landings : found->second.grants;
    if (count == 0) throw Error(Code::internal, "a claim on a region was given back twice");
    --count;
  }
}

bool Regions::is_landing(uint32_t region) const {
  const auto found = regions_.find(region);
  return found != regions_.end() && found->second.landings != 0;
}

}  // namespace kvxfer
