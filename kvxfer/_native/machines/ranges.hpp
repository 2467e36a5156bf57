// Byte ranges of registered regions, as descriptors name them: strided ranges (equal elements at equal distances), and lists of such
// rows seen as one list of elements. No address appears here: a range is an offset into a region, and only the shell knows
// where a region lies.
#pragma once

#include <memory>
#include <vector>

#include "codes.hpp"
#include "ids.hpp"

namespace kvxfer {

constexpr size_t kListBytesMax = 384 * 1024;  // of one list of ranges on the wire
constexpr size_t kRangeBytes = 32;             // of one strided range there; an index takes 4
constexpr uint32_t kElementsMax = 1u << 20;    // of one list that is posted
constexpr uint32_t kUnindexedMax = 65536;      // elements of one list without indices: bounds what so short a frame may cost its receiver
constexpr uint64_t kElementBytesMax = 1u << 30; // of one element: it fits one DATA frame

// Element i is `length` bytes at `offset + i * stride` of region `region`.
struct StridedRange {
  uint32_t region = 0;
  uint64_t offset = 0, stride = 0, length = 0;
  uint32_t count = 0;
  uint64_t end() const { return offset + (count - 1) * stride + length; }  // valid once Ranges has accepted the range
  bool operator==(const StridedRange& o) const {
    return region == o.region && offset == o.offset && stride == o.stride && length == o.length && count == o.count;
  }
};

// Strided ranges in a row, numbered as elements 0 to count() - 1. Immutable, shared between threads.
class Ranges {
 public:
  // Throws Error(invalid_argument): no range, an empty one, elements that overlap within a range, an end past 2^63, more than
  // UINT32_MAX elements.
  explicit Ranges(std::vector<StridedRange> rows);

  const std::vector<StridedRange>& rows() const { return rows_; }
  uint32_t count() const { return count_; }
  uint64_t uniform_bytes() const { return uniform_bytes_; }  // of every element; 0 where they differ
  bool is_table() const { return is_table_; }                // one element a row: element i is row i
  uint32_t row_of(uint32_t element) const;                   // element < count()
  uint32_t first_of(uint32_t row) const { return is_table_ ? row : firsts_[row]; }
  uint64_t bytes_of(uint32_t element) const { return uniform_bytes_ != 0 ? uniform_bytes_ : rows_[row_of(element)].length; }

 private:
  std::vector<StridedRange> rows_;
  std::vector<uint32_t> firsts_;  // of each row; empty where is_table_
  uint32_t count_ = 0;
  uint64_t uniform_bytes_ = 0;
  bool is_table_ = true;
};

using IdList = std::shared_ptr<const std::vector<uint32_t>>;

// Some blocks of a pool, or some elements of ranges, in order: the source or the target of a read. Shared with the shell, never
// changed.
struct Extent {
  uint32_t pool = 0;                      // of the blocks; unused where `ranges` is set
  std::shared_ptr<const Ranges> ranges;
  IdList ids;                             // blocks, or elements of the ranges
  uint32_t first = 0, count = 0;          // the part of `ids`
  uint32_t operator[](uint32_t i) const { return (*ids)[first + i]; }
};

// A list of elements of registered memory, of this agent or of a peer: every one of `ids` is below ranges->count().
struct ElementList {
  std::shared_ptr<const Ranges> ranges;
  IdList ids;
  bool is_whole = false;  // `ids` are known to be all elements, in their order
  uint32_t count() const { return ids ? static_cast<uint32_t>(ids->size()) : 0; }
  Extent part(uint32_t first, uint32_t count) const { return Extent{0, ranges, ids, first, count}; }
  uint64_t bytes(uint32_t first, uint32_t count) const;
  // `visit(range)` of every range that an element lies in, once for each run of neighbours in it.
  template <class F>
  void for_each_range(F&& visit) const {
    const std::vector<StridedRange>& rows = ranges->rows();
    if (is_whole) {
      for (const StridedRange& range : rows) visit(range);
      return;
    }
    uint32_t first = 0, end = 0;
    for (uint32_t i = 0; i < count(); ++i) {
      const uint32_t element = (*ids)[i];
      if (element >= first && element < end) continue;
      const uint32_t row = ranges->row_of(element);
      first = ranges->first_of(row);
      end = first + rows[row].count;
      visit(rows[row]);
    }
  }
};

// The regions that elements of the list lie in, ascending.
std::vector<uint32_t> regions_of(const ElementList& list);
// Throws Error(invalid_argument) unless both name equally many elements, at least one and at most kElementsMax, that exist and
// have at most kElementBytesMax, and element i of one has the length of element i of the other.
void check_alike(const ElementList& local, const ElementList& remote);
// As check_alike, of one list alone.
void check_indices(const ElementList& list);

// An open-ended grant and offer: any proven peer may read (write) any byte of it until it is removed. Its id is never used
// for another region in the same incarnation.
struct RegionInfo {
  uint32_t id = 0;
  uint64_t bytes = 0;
  bool can_read = true, can_write = true;  // by peers
  bool is_shareable = false;               // memory allocated by kvxfer: a same-host reader may map it
  bool is_exposed = true;                  // one-sided lanes other than `mapped` may read it
};

}  // namespace kvxfer
