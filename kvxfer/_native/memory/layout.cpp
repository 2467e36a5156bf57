#include "layout.hpp"

#include <algorithm>
#include <utility>

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

std::string place_name(const Layout& layout, const Extent& extent, uint64_t at) {
  if (!extent.ranges) {
    uint64_t bytes = 0;
    for (const Segment& segment : layout.segments) bytes += segment.length;
    const auto i = static_cast<uint32_t>(bytes == 0 ? 0 : std::min<uint64_t>(at / bytes, extent.count - 1));
    return "block " + std::to_string(extent[i]) + " of pool " + std::to_string(extent.pool);
  }
  const Ranges& ranges = *extent.ranges;
  uint32_t i = 0;
  if (const uint64_t uniform = ranges.uniform_bytes(); uniform != 0) {
    i = static_cast<uint32_t>(std::min<uint64_t>(at / uniform, extent.count - 1));
    at -= i * uniform;
  } else {
    for (uint64_t bytes; i + 1 < extent.count && at >= (bytes = ranges.bytes_of(extent[i])); ++i) at -= bytes;
  }
  const uint32_t row = ranges.row_of(extent[i]);
  const StridedRange& from = ranges.rows()[row];
  const uint64_t byte = from.offset + (extent[i] - ranges.first_of(row)) * from.stride + at;
  return "region " + std::to_string(from.region) + " at byte " + std::to_string(byte);
}

Error memory_gone(const char* whose, const Layout& layout, const Extent& extent, uint64_t at) {
  return Error(Code::memory_gone, std::string("the ") + whose + "'s memory is registered, and not mapped (or not accessible) any more: " + place_name(layout, extent, at));
}

void Bases::add(uint32_t region, uint8_t* base) {
  if (2 * (used_ + 1) > slots_.size()) {
    const std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(std::max<size_t>(8, slots_.size() * 2)));
    mask_ = slots_.size() - 1;
    used_ = 0;
    for (const Slot& slot : before) {
      if (slot.base != nullptr) place(slot);
    }
  }
  place({region, base});
}

void Bases::place(const Slot& slot) {
  size_t i = hash(slot.region) & mask_;
  while (slots_[i].base != nullptr && slots_[i].region != slot.region) i = (i + 1) & mask_;
  if (slots_[i].base == nullptr) ++used_;
  slots_[i] = slot;
}

}  // namespace kvxfer
