// Where blocks and elements lie in memory, and a walk over their bytes, in order, in contiguous spans that are as long as possible.
//
// A layout describes memory in one of two ways. As blocks: block b is the concatenation of its segments, segment s being
// `length` bytes at `offset + b * stride`; that order goes over the wire, so two pools whose segments are cut differently
// can still exchange blocks. As elements of ranges, which name regions: a table says at which address each region begins. No
// list of addresses is made from either form: the walk computes the next element when it reaches it, and joins elements that
// touch.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "machines/frames.hpp"
#include "machines/ranges.hpp"

namespace kvxfer {

// Throws Error(code) unless every segment of every block lies inside `bytes`, and, where `block_bytes` is not 0, the
// lengths add up to it. Returns the bytes of one block.
uint64_t check_segments(const std::vector<Segment>& segments, uint32_t block_count, uint64_t bytes, uint64_t block_bytes, Code code);

// Region ids to addresses. Does not change once it is shared.
class Bases {
 public:
  void add(uint32_t region, uint8_t* base);  // replaces an earlier address of the same region
  uint8_t* find(uint32_t region) const {     // null: not known
    const size_t slot = slot_of(region);
    return slot == kNoSlot ? nullptr : slots_[slot].base;
  }
  static constexpr size_t kNoSlot = ~size_t{0};
  // The index of a region's slot, below slot_count(); kNoSlot: not known. It may change when another region is added.
  size_t slot_of(uint32_t region) const {
    for (size_t i = hash(region) & mask_; !slots_.empty() && slots_[i].base != nullptr; i = (i + 1) & mask_) {
      if (slots_[i].region == region) return i;
    }
    return kNoSlot;
  }
  size_t slot_count() const { return slots_.size(); }

 private:
  struct Slot {
    uint32_t region = 0;
    uint8_t* base = nullptr;
  };
  static size_t hash(uint32_t region) { return (region * 0x9e3779b9u) >> 7; }
  void place(const Slot& slot);

  std::vector<Slot> slots_;  // open addressing, at most half full
  size_t mask_ = 0, used_ = 0;
};

// Memory seen as blocks or, where `ranges` is set, as elements. Written only where it is our own.
struct Layout {
  uint8_t* base = nullptr;
  std::vector<Segment> segments;
  std::shared_ptr<const Ranges> ranges;
  std::shared_ptr<const Bases> bases;
};

// Where byte `at` of some blocks or elements lies, in words: for errors.
std::string place_name(const Layout& layout, const Extent& extent, uint64_t at);
// The error for memory that is registered, and not mapped at that byte. `whose`: "source" or "destination".
Error memory_gone(const char* whose, const Layout& layout, const Extent& extent, uint64_t at);

// A position inside the bytes of some blocks or elements. Layout and extent must stay where they are.
class BlockWalk {
 public:
  struct Span {
    uint8_t* data = nullptr;
    size_t size = 0;
  };

  BlockWalk() = default;
  // The caller has checked that every block lies inside the layout's memory and that every region is in its bases.
  BlockWalk(const Layout& layout, const Extent& extent)
      : layout_(&layout), ids_(extent.ids ? extent.ids->data() + extent.first : nullptr), count_(extent.count) {
    if (layout.ranges) {
      rows_ = layout.ranges->rows().data();
      is_table_ = layout.ranges->is_table();
    }
    if (count_ != 0) find();
  }

  bool is_done() const { return at_ == count_; }
  // Where what comes next begins; null at the end.
  const uint8_t* next() const { return is_done() ? nullptr : here_; }
  // The contiguous bytes from here on, at most `max`; empty at the end. Goes past them.
  Span take(size_t max) {
    Span span{here_, 0};
    while (at_ != count_ && span.size != max) {
      if (here_ != span.data + span.size) break;
      const size_t part = std::min<uint64_t>(left_, max - span.size);
      span.size += part;
      step(part);
    }
    return span;
  }
  // As take(), but stays where it is.
  Span peek(size_t max) const {
    BlockWalk walk = *this;
    return walk.take(max);
  }
  // Goes past `bytes`. Throws Error(internal) at the end.
  void advance(size_t bytes) {
    while (bytes != 0) {
      if (at_ == count_) throw Error(Code::internal, "a walk past the last block");
      const size_t part = std::min<uint64_t>(left_, bytes);
      bytes -= part;
      step(part);
    }
  }
  // Fills up to `count` iovecs with up to `max` bytes from here on. Returns how many, and adds the bytes to `bytes`.
  template <class Iovec>
  size_t gather(Iovec* out, size_t count, size_t max, size_t& bytes) const {
    BlockWalk walk = *this;
    size_t used = 0;
    while (used < count && max != 0) {
      const Span span = walk.take(max);
      if (span.size == 0) break;
      out[used].iov_base = span.data;
      out[used++].iov_len = span.size;
      bytes += span.size;
      max -= span.size;
    }
    return used;
  }

 private:
  void step(size_t bytes) {
    here_ += bytes;
    left_ -= bytes;
    if (left_ != 0) return;
    if (rows_ == nullptr && ++segment_ != layout_->segments.size()) return find();
    segment_ = 0;
    if (++at_ != count_) find();
  }
  void find() {
    const uint32_t id = ids_[at_];
    if (rows_ == nullptr) {
      const Segment& s = layout_->segments[segment_];
      here_ = layout_->base + s.offset + s.stride * id;
      left_ = s.length;
      return;
    }
    uint32_t inside = 0;  // which element of its row
    if (is_table_) {
      row_ = id;
    } else {
      if (id < first_ || id - first_ >= rows_[row_].count || !has_row_) {
        row_ = layout_->ranges->row_of(id);
        first_ = layout_->ranges->first_of(row_);
        has_row_ = true;
      }
      inside = id - first_;
    }
    const StridedRange& range = rows_[row_];
    if (range.region != region_ || base_ == nullptr) {
      region_ = range.region;
      base_ = layout_->bases->find(region_);
    }
    here_ = base_ + range.offset + range.stride * inside;
    left_ = range.length;
  }

  const Layout* layout_ = nullptr;
  const StridedRange* rows_ = nullptr;  // null: blocks
  const uint32_t* ids_ = nullptr;
  uint32_t at_ = 0, count_ = 0;
  uint32_t segment_ = 0;
  uint8_t* here_ = nullptr;
  uint64_t left_ = 0;  // of the segment or element
  uint8_t* base_ = nullptr;
  uint32_t region_ = 0, row_ = 0, first_ = 0;
  bool is_table_ = false, has_row_ = false;
};

}  // namespace kvxfer
