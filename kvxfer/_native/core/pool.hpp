// Where the blocks of a pool lie, and a walk over their bytes that sees through segments and neighbours.
//
// Block b is the concatenation of its segments, segment s being `length` bytes at `offset + b * stride`. That order is what
// goes over the wire, so two pools whose segments are cut differently still exchange blocks.
#pragma once

#include <memory>
#include <vector>

#include "machines/endpoint.hpp"
#include "region.hpp"

namespace kvxfer {

// Throws Error(code) unless every segment of every block lies inside `bytes`, and, where `block_bytes` is not 0, the
// lengths add up to it. Returns the bytes of one block.
uint64_t check_segments(const std::vector<Segment>& segments, uint32_t block_count, uint64_t bytes, uint64_t block_bytes, Code code);

// Memory seen as blocks. `base` is written only through pools of our own.
struct Layout {
  uint8_t* base = nullptr;
  std::vector<Segment> segments;
};

struct Pool {
  PoolInfo info;
  Layout layout;
  uint64_t region_bytes = 0;
  std::shared_ptr<Region> region;  // null: memory of somebody else
  uint64_t serial = 0;             // never used twice, unlike the id
};

// A position inside the bytes of a list of blocks.
class BlockWalk {
 public:
  struct Span {
    uint8_t* data = nullptr;
    size_t size = 0;
  };

  BlockWalk() = default;
  BlockWalk(const Layout& layout, const std::vector<uint32_t>& blocks) : layout_(&layout), blocks_(&blocks) {}

  bool is_done() const { return block_ == blocks_->size(); }
  // The contiguous bytes from here on, at most `max`; empty at the end.
  Span peek(size_t max) const;
  void advance(size_t bytes);
  // Fills up to `count` iovecs with up to `max` bytes from here on. Returns how many, and adds the bytes to `bytes`.
  template <class Iovec>
  size_t gather(Iovec* out, size_t count, size_t max, size_t& bytes) const {
    BlockWalk walk = *this;
    size_t used = 0;
    while (used < count && max != 0) {
      const Span span = walk.peek(max);
      if (span.size == 0) break;
      out[used].iov_base = span.data;
      out[used++].iov_len = span.size;
      bytes += span.size;
      max -= span.size;
      walk.advance(span.size);
    }
    return used;
  }

 private:
  const Layout* layout_ = nullptr;
  const std::vector<uint32_t>* blocks_ = nullptr;
  size_t block_ = 0;
  size_t segment_ = 0;
  uint64_t offset_ = 0;  // inside the segment
};

}  // namespace kvxfer
