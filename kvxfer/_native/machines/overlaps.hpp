// Which blocks of two pools share bytes. Memory may be registered as several pools, each of which cuts it into blocks in its own way
// (slices of heads, tokens instead of pages), and what one pool promises another must not fill. A pool says where its blocks lie
// as numbers only: nothing here is an address that could be used.
//
// All of it is exact, whatever the strides are: blocks whose bytes interleave and never meet do not overlap.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "frames.hpp"

namespace kvxfer {

// Where the parts of some blocks lie: part s of block b is `length` bytes at `base + offset + b * stride`. Without segments it is not
// known, and overlaps nothing.
struct Place {
  uint64_t base = 0;
  std::vector<Segment> segments{};
  uint32_t count = 0;  // of blocks

  static Place of_region(uint64_t base, uint64_t bytes) { return {base, {Segment{0, bytes, bytes}}, 1}; }
};

// How one part of the blocks here meets one part of the blocks there: block b here and block c there share a byte if
// -length < delta + b * stride - c * other_stride < other_length.
struct Meeting {
  int64_t delta = 0;
  uint64_t stride = 0, length = 0, other_stride = 0, other_length = 0;
  bool operator==(const Meeting& o) const {
    return delta == o.delta && stride == o.stride && length == o.length && other_stride == o.other_stride && other_length == o.other_length;
  }
  bool operator<(const Meeting& o) const {
    return std::tie(delta, stride, length, other_stride, other_length) < std::tie(o.delta, o.stride, o.length, o.other_stride, o.other_length);
  }
};

// All ways in which blocks of one place meet those of another, each once: equal layers of a cache meet in one way. No two segments of
// one place may share bytes (`overlap_within`). Takes n log n steps of n segments of one stride; of others, and of segments that do
// meet, it judges each pair that lies in each other. Throws Error: limit_exceeded for too many of those, invalid_argument for memory
// where no process has any.
class Overlap {
 public:
  Overlap(const Place& here, const Place& there);

  bool is_empty() const { return meetings_.empty(); }
  // Some block here and the block there that it shares bytes with; none where they share none.
  std::optional<std::pair<uint32_t, uint32_t>> example() const;
  // `visit(c)` of blocks c there that share a byte with block b here, perhaps more than once each, until one of the calls returns
  // true; returns whether one did.
  template <class F>
  bool any_of(uint32_t b, F&& visit) const {
    for (const Meeting& meeting : meetings_) {
      const auto [first, end] = blocks(meeting, b);
      for (uint64_t c = first; c < end; ++c) {
        if (visit(static_cast<uint32_t>(c))) return true;
      }
    }
    return false;
  }

 private:
  std::pair<uint64_t, uint64_t> blocks(const Meeting& meeting, uint32_t b) const;

  uint32_t count_, other_count_;
  std::vector<Meeting> meetings_;
};

// Two different blocks, or two parts of one block, that share a byte, in words; empty where there are none. Takes as long, and
// throws, as Overlap.
std::string overlap_within(const Place& place);

}  // namespace kvxfer
