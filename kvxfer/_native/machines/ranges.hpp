// Byte ranges of registered regions, as descriptors name them: equal pieces at equal distances (a grid), and lists of such
// grids seen as one list of pieces. No address appears here: a range is an offset into a region, and only the shell knows
// where a region lies.
#pragma once

#include <memory>
#include <vector>

#include "codes.hpp"
#include "ids.hpp"

namespace kvxfer {

constexpr size_t kListBytesMax = 384 * 1024;  // of one list of ranges on the wire
constexpr size_t kGridBytes = 32;             // of one grid there; 4 a pick
constexpr uint32_t kPiecesMax = 1u << 20;     // of one list that is posted
constexpr uint32_t kUnpickedMax = 65536;      // pieces of one list that goes without picks: what so short a frame may cost its receiver
constexpr uint64_t kPieceBytesMax = 1u << 30; // of one piece of it: it goes in one DATA frame

// Piece i is `length` bytes at `offset + i * stride` of region `region`.
struct Grid {
  uint32_t region = 0;
  uint64_t offset = 0, stride = 0, length = 0;
  uint32_t count = 0;
  uint64_t end() const { return offset + (count - 1) * stride + length; }  // valid once Ranges has accepted the grid
  bool operator==(const Grid& o) const {
    return region == o.region && offset == o.offset && stride == o.stride && length == o.length && count == o.count;
  }
};

// Grids, one after the other, as pieces 0 to count() - 1. Immutable, shared between threads.
class Ranges {
 public:
  // Throws Error(invalid_argument): no grid, an empty one, pieces that overlap within a grid, an end past 2^63, more than
  // UINT32_MAX pieces.
  explicit Ranges(std::vector<Grid> grids);

  const std::vector<Grid>& grids() const { return grids_; }
  uint32_t count() const { return count_; }
  uint64_t uniform_bytes() const { return uniform_bytes_; }  // of every piece; 0 where they differ
  bool is_table() const { return is_table_; }                // one piece a grid: piece i is grid i
  uint32_t grid_of(uint32_t piece) const;                    // piece < count()
  uint32_t first_of(uint32_t grid) const { return is_table_ ? grid : firsts_[grid]; }
  uint64_t bytes_of(uint32_t piece) const { return uniform_bytes_ != 0 ? uniform_bytes_ : grids_[grid_of(piece)].length; }

 private:
  std::vector<Grid> grids_;
  std::vector<uint32_t> firsts_;  // of each grid; empty where is_table_
  uint32_t count_ = 0;
  uint64_t uniform_bytes_ = 0;
  bool is_table_ = true;
};

using IdList = std::shared_ptr<const std::vector<uint32_t>>;

// Some blocks of a pool, or some pieces of ranges: what is read, sent or filled, in order. Shared with the shell, never changed.
struct Extent {
  uint32_t pool = 0;                      // of the blocks; unused where `ranges` is set
  std::shared_ptr<const Ranges> ranges;
  IdList ids;                             // blocks, or pieces of the ranges
  uint32_t first = 0, count = 0;          // which of `ids` are meant
  uint32_t operator[](uint32_t i) const { return (*ids)[first + i]; }
};

// A list of pieces of registered memory, of this agent or of a peer: every one of `ids` is below ranges->count().
struct PieceList {
  std::shared_ptr<const Ranges> ranges;
  IdList ids;
  bool is_whole = false;  // `ids` are known to be all pieces, as they come
  uint32_t count() const { return ids ? static_cast<uint32_t>(ids->size()) : 0; }
  Extent part(uint32_t first, uint32_t count) const { return Extent{0, ranges, ids, first, count}; }
  uint64_t bytes(uint32_t first, uint32_t count) const;
  // `visit(grid)` of every grid that a piece lies in, once for each run of neighbours in it.
  template <class F>
  void for_each_grid(F&& visit) const {
    const std::vector<Grid>& grids = ranges->grids();
    if (is_whole) {
      for (const Grid& grid : grids) visit(grid);
      return;
    }
    uint32_t first = 0, end = 0;
    for (uint32_t i = 0; i < count(); ++i) {
      const uint32_t piece = (*ids)[i];
      if (piece >= first && piece < end) continue;
      const uint32_t grid = ranges->grid_of(piece);
      first = ranges->first_of(grid);
      end = first + grids[grid].count;
      visit(grids[grid]);
    }
  }
};

// The regions that pieces of the list lie in, ascending.
std::vector<uint32_t> regions_of(const PieceList& list);
// Throws Error(invalid_argument) unless both name equally many pieces, at least one and at most kPiecesMax, that exist and
// have at most kPieceBytesMax, and piece i of one has the length of piece i of the other.
void check_alike(const PieceList& local, const PieceList& remote);
// As check_alike, of one list alone.
void check_picks(const PieceList& list);

// An open-ended grant and offer: any proven peer may read (write) any byte of it until it is removed. Its id is never used
// for another region in the same life.
struct RegionInfo {
  uint32_t id = 0;
  uint64_t bytes = 0;
  bool can_read = true, can_write = true;  // by peers
  bool is_shareable = false;               // memory allocated by kvxfer: a same-host reader may map it
  bool is_exposed = true;                  // one-sided lanes other than `mapped` may read it
};

}  // namespace kvxfer
