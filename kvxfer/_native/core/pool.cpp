#include "pool.hpp"

#include <algorithm>

namespace kvxfer {

uint64_t check_segments(const std::vector<Segment>& segments, uint32_t block_count, uint64_t bytes, uint64_t block_bytes, Code code) {
  if (segments.empty() || segments.size() > kSegmentsMax) throw Error(code, "a pool needs 1 to " + std::to_string(kSegmentsMax) + " segments");
  if (block_count == 0) throw Error(code, "a pool needs at least one block");
  uint64_t sum = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& s = segments[i];
    const std::string where = "segment " + std::to_string(i);
    if (s.length == 0 || s.length > kPayloadMax || s.stride < s.length) throw Error(code, where + " needs a length above 0 and a stride of at least that");
    uint64_t end;  // of the last block's part
    if (__builtin_mul_overflow(s.stride, uint64_t{block_count} - 1, &end) || __builtin_add_overflow(end, s.offset, &end) ||
        __builtin_add_overflow(end, s.length, &end) || end > bytes) {
      throw Error(code, where + " leaves the region of " + std::to_string(bytes) + " bytes");
    }
    sum += s.length;
  }
  if (sum > kPayloadMax || (block_bytes != 0 && sum != block_bytes)) {
    throw Error(code, "segments add up to " + std::to_string(sum) + " bytes a block, not " + std::to_string(block_bytes));
  }
  return sum;
}

BlockWalk::Span BlockWalk::peek(size_t max) const {
  Span span;
  size_t block = block_, segment = segment_;
  uint64_t offset = offset_;
  while (block < blocks_->size() && span.size < max) {
    const Segment& s = layout_->segments[segment];
    uint8_t* const here = layout_->base + s.offset + s.stride * (*blocks_)[block] + offset;
    if (span.size != 0 && here != span.data + span.size) break;
    if (span.size == 0) span.data = here;
    span.size += s.length - offset;
    offset = 0;
    if (++segment == layout_->segments.size()) {
      segment = 0;
      ++block;
    }
  }
  span.size = std::min(span.size, max);
  return span;
}

void BlockWalk::advance(size_t bytes) {
  while (bytes != 0) {
    const uint64_t left = layout_->segments[segment_].length - offset_;
    if (bytes < left) {
      offset_ += bytes;
      return;
    }
    bytes -= left;
    offset_ = 0;
    if (++segment_ == layout_->segments.size()) {
      segment_ = 0;
      ++block_;
    }
  }
}

}  // namespace kvxfer
