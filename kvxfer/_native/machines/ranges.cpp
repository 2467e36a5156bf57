#include "ranges.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

constexpr uint64_t kEndMax = 1ull << 63;  // where a range may end at most

[[noreturn]] void refuse(size_t row, const char* why) {
  throw Error(Code::invalid_argument, "range " + std::to_string(row) + " " + why);
}

// The lengths of a list's elements, in the list's order. If the list is whole, run() lets the caller skip the rest of a row, whose
// elements all have one length.
class LengthWalk {
 public:
  explicit LengthWalk(const ElementList& list) : list_(&list) {}
  uint64_t at(uint32_t i) {
    const uint32_t element = (*list_->ids)[i];
    if (element < first_ || element >= end_) {
      const uint32_t at = list_->ranges->row_of(element);
      const StridedRange& range = list_->ranges->rows()[at];
      first_ = list_->ranges->first_of(at);
      end_ = first_ + range.count;
      length_ = range.length;
    }
    run_ = list_->is_whole ? end_ - element : 1;
    return length_;
  }
  uint32_t run() const { return run_; }  // how many elements, beginning with the last at(i), are known to have its length

 private:
  const ElementList* list_;
  uint32_t first_ = 0, end_ = 0, run_ = 1;
  uint64_t length_ = 0;
};

}  // namespace

Ranges::Ranges(std::vector<StridedRange> rows) : rows_(std::move(rows)) {
  if (rows_.empty()) throw Error(Code::invalid_argument, "a list of ranges needs at least one");
  uint64_t count = 0;
  uniform_bytes_ = rows_.front().length;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const StridedRange& range = rows_[i];
    if (range.count == 0 || range.length == 0) refuse(i, "is empty");
    if (range.count != 1 && range.stride < range.length) refuse(i, "has elements that overlap");
    // Each term is looked at before it is added: nothing wraps.
    const bool is_inside = range.offset <= kEndMax && range.length <= kEndMax - range.offset &&
                           (range.count == 1 || range.stride <= (kEndMax - range.offset - range.length) / (range.count - 1));
    if (!is_inside) refuse(i, "ends past 2^63");
    if (range.length != uniform_bytes_) uniform_bytes_ = 0;
    if (range.count != 1) is_table_ = false;
    count += range.count;
  }
  if (count > UINT32_MAX) throw Error(Code::invalid_argument, "a list of ranges has more elements than 2^32 - 1");
  count_ = static_cast<uint32_t>(count);
  if (is_table_) return;  // each row is one element: row_of() needs no search
  firsts_.reserve(rows_.size());
  uint32_t first = 0;
  for (const StridedRange& range : rows_) {
    firsts_.push_back(first);
    first += range.count;
  }
}

uint32_t Ranges::row_of(uint32_t element) const {
  if (is_table_) return element;
  return static_cast<uint32_t>(std::upper_bound(firsts_.begin(), firsts_.end(), element) - firsts_.begin() - 1);
}

uint64_t ElementList::bytes(uint32_t first, uint32_t count) const {
  if (ranges->uniform_bytes() != 0) return ranges->uniform_bytes() * count;
  uint64_t sum = 0;
  for (uint32_t i = first; i < first + count; ++i) sum += ranges->bytes_of((*ids)[i]);
  return sum;
}

std::vector<uint32_t> regions_of(const ElementList& list) {
  std::vector<uint32_t> regions;
  list.for_each_range([&](const StridedRange& range) {
    // Neighbours in a list mostly lie in the same region: only a change is kept.
    if (regions.empty() || regions.back() != range.region) regions.push_back(range.region);
  });
  std::sort(regions.begin(), regions.end());
  regions.erase(std::unique(regions.begin(), regions.end()), regions.end());
  return regions;
}

void check_indices(const ElementList& list) {
  if (!list.ranges || list.count() == 0) throw Error(Code::invalid_argument, "a list needs at least one element");
  if (list.count() > kElementsMax) throw Error(Code::invalid_argument, "a list has more elements than " + std::to_string(kElementsMax));
  const uint32_t count = list.ranges->count();
  const uint64_t uniform = list.ranges->uniform_bytes();
  if (list.is_whole) {
    const std::vector<StridedRange>& rows = list.ranges->rows();
    const auto large = std::find_if(rows.begin(), rows.end(), [](const StridedRange& range) { return range.length > kElementBytesMax; });
    if (large != rows.end()) refuse(large - rows.begin(), "has elements of more than 2^30 bytes: cut them");
    return;
  }
  for (const uint32_t element : *list.ids) {
    if (element >= count) {
      throw Error(Code::invalid_argument, "element " + std::to_string(element) + " is named of a list of " + std::to_string(count));
    }
    if ((uniform != 0 ? uniform : list.ranges->bytes_of(element)) > kElementBytesMax) {
      throw Error(Code::invalid_argument, "element " + std::to_string(element) + " has more than " + std::to_string(kElementBytesMax) + " bytes: cut it");
    }
  }
}

void check_alike(const ElementList& local, const ElementList& remote) {
  check_indices(local);
  check_indices(remote);
  if (local.count() != remote.count()) {
    throw Error(Code::invalid_argument, std::to_string(local.count()) + " local elements and " + std::to_string(remote.count()) + " remote ones");
  }
  const uint64_t bytes = local.ranges->uniform_bytes();
  if (bytes != 0 && bytes == remote.ranges->uniform_bytes()) return;
  LengthWalk own(local), other(remote);
  uint32_t run = 0;
  for (uint32_t i = 0; i < local.count(); i += run) {
    const uint64_t here = own.at(i), there = other.at(i);
    run = std::min(own.run(), other.run());
    if (here != there) {
      throw Error(Code::invalid_argument, "element " + std::to_string(i) + " has " + std::to_string(here) + " bytes here and " +
                                              std::to_string(there) + " there");
    }
  }
}

}  // namespace kvxfer
