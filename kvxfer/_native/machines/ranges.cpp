#include "ranges.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

constexpr uint64_t kEndMax = 1ull << 63;

[[noreturn]] void refuse(size_t grid, const char* why) {
  throw Error(Code::invalid_argument, "range " + std::to_string(grid) + " " + why);
}

// The lengths of a list's pieces, in its order; where the list is whole, grid by grid.
class LengthWalk {
 public:
  explicit LengthWalk(const PieceList& list) : list_(&list) {}
  uint64_t at(uint32_t i) {
    const uint32_t piece = (*list_->ids)[i];
    if (piece < first_ || piece >= end_) {
      const uint32_t at = list_->ranges->grid_of(piece);
      const Grid& grid = list_->ranges->grids()[at];
      first_ = list_->ranges->first_of(at);
      end_ = first_ + grid.count;
      length_ = grid.length;
    }
    run_ = list_->is_whole ? end_ - piece : 1;
    return length_;
  }
  uint32_t run() const { return run_; }  // for how many pieces from the last one on this length holds

 private:
  const PieceList* list_;
  uint32_t first_ = 0, end_ = 0, run_ = 1;
  uint64_t length_ = 0;
};

}  // namespace

Ranges::Ranges(std::vector<Grid> grids) : grids_(std::move(grids)) {
  if (grids_.empty()) throw Error(Code::invalid_argument, "a list of ranges needs at least one");
  uint64_t count = 0;
  uniform_bytes_ = grids_.front().length;
  for (size_t i = 0; i < grids_.size(); ++i) {
    const Grid& grid = grids_[i];
    if (grid.count == 0 || grid.length == 0) refuse(i, "is empty");
    if (grid.count != 1 && grid.stride < grid.length) refuse(i, "has pieces that overlap");
    // Each term is looked at before it is added: nothing wraps.
    const bool is_inside = grid.offset <= kEndMax && grid.length <= kEndMax - grid.offset &&
                           (grid.count == 1 || grid.stride <= (kEndMax - grid.offset - grid.length) / (grid.count - 1));
    if (!is_inside) refuse(i, "ends past 2^63");
    if (grid.length != uniform_bytes_) uniform_bytes_ = 0;
    if (grid.count != 1) is_table_ = false;
    count += grid.count;
  }
  if (count > UINT32_MAX) throw Error(Code::invalid_argument, "a list of ranges has more pieces than 2^32 - 1");
  count_ = static_cast<uint32_t>(count);
  if (is_table_) return;
  firsts_.reserve(grids_.size());
  uint32_t first = 0;
  for (const Grid& grid : grids_) {
    firsts_.push_back(first);
    first += grid.count;
  }
}

uint32_t Ranges::grid_of(uint32_t piece) const {
  if (is_table_) return piece;
  return static_cast<uint32_t>(std::upper_bound(firsts_.begin(), firsts_.end(), piece) - firsts_.begin() - 1);
}

uint64_t PieceList::bytes(uint32_t first, uint32_t count) const {
  if (ranges->uniform_bytes() != 0) return ranges->uniform_bytes() * count;
  uint64_t sum = 0;
  for (uint32_t i = first; i < first + count; ++i) sum += ranges->bytes_of((*ids)[i]);
  return sum;
}

std::vector<uint32_t> regions_of(const PieceList& list) {
  std::vector<uint32_t> regions;
  list.for_each_grid([&](const Grid& grid) {
    // Neighbours in a list mostly lie in the same region: only a change is kept.
    if (regions.empty() || regions.back() != grid.region) regions.push_back(grid.region);
  });
  std::sort(regions.begin(), regions.end());
  regions.erase(std::unique(regions.begin(), regions.end()), regions.end());
  return regions;
}

void check_picks(const PieceList& list) {
  if (!list.ranges || list.count() == 0) throw Error(Code::invalid_argument, "no piece is named");
  if (list.count() > kPiecesMax) throw Error(Code::invalid_argument, "a list has more pieces than " + std::to_string(kPiecesMax));
  const uint32_t count = list.ranges->count();
  const uint64_t uniform = list.ranges->uniform_bytes();
  if (list.is_whole) {
    const std::vector<Grid>& grids = list.ranges->grids();
    const auto large = std::find_if(grids.begin(), grids.end(), [](const Grid& grid) { return grid.length > kPieceBytesMax; });
    if (large != grids.end()) refuse(large - grids.begin(), "has pieces of more than 2^30 bytes: cut them");
    return;
  }
  for (const uint32_t piece : *list.ids) {
    if (piece >= count) {
      throw Error(Code::invalid_argument, "piece " + std::to_string(piece) + " is named of a list of " + std::to_string(count));
    }
    if ((uniform != 0 ? uniform : list.ranges->bytes_of(piece)) > kPieceBytesMax) {
      throw Error(Code::invalid_argument, "piece " + std::to_string(piece) + " has more than " + std::to_string(kPieceBytesMax) + " bytes: cut it");
    }
  }
}

void check_alike(const PieceList& local, const PieceList& remote) {
  check_picks(local);
  check_picks(remote);
  if (local.count() != remote.count()) {
    throw Error(Code::invalid_argument, std::to_string(local.count()) + " local pieces and " + std::to_string(remote.count()) + " remote ones");
  }
  const uint64_t bytes = local.ranges->uniform_bytes();
  if (bytes != 0 && bytes == remote.ranges->uniform_bytes()) return;
  LengthWalk own(local), other(remote);
  uint32_t run = 0;
  for (uint32_t i = 0; i < local.count(); i += run) {
    const uint64_t here = own.at(i), there = other.at(i);
    run = std::min(own.run(), other.run());
    if (here != there) {
      throw Error(Code::invalid_argument, "piece " + std::to_string(i) + " has " + std::to_string(here) + " bytes here and " +
                                              std::to_string(there) + " there");
    }
  }
}

}  // namespace kvxfer
