// Conversion between lists of elements and their form on the wire.
#include <numeric>

#include "frames.hpp"

namespace kvxfer {
namespace {

bool is_all(const ElementList& list) {
  if (list.count() != list.ranges->count()) return false;
  for (uint32_t i = 0; i < list.count(); ++i) {
    if ((*list.ids)[i] != i) return false;
  }
  return true;
}

// A long list sends all its indices: the memory that a frame makes its receiver allocate must not outgrow the frame.
bool goes_unindexed(const ElementList& list) { return list.count() <= kUnindexedMax && is_all(list); }

}  // namespace

size_t wire_bytes(const ElementList& list) {
  const size_t rows = list.ranges->rows().size() * kRangeBytes;
  const size_t bytes = list.ranges->is_table() ? list.count() * kRangeBytes : goes_unindexed(list) ? rows : rows + list.count() * 4;
  if (bytes > kListBytesMax) {
    throw Error(Code::limit_exceeded, "a list of " + std::to_string(bytes) + " bytes does not fit one post (" + std::to_string(kListBytesMax) + "): split it");
  }
  return bytes;
}

WireList to_wire(const ElementList& list) {
  wire_bytes(list);
  WireList wire;
  const std::vector<StridedRange>& rows = list.ranges->rows();
  if (!list.ranges->is_table()) {
    wire.rows = rows;
    if (!goes_unindexed(list)) wire.indices = *list.ids;
    return wire;
  }
  wire.rows.reserve(list.count());
  for (const uint32_t element : *list.ids) wire.rows.push_back(rows[element]);
  return wire;
}

uint32_t element_count(const WireList& wire) {
  if (!wire.indices.empty()) return static_cast<uint32_t>(wire.indices.size());
  uint64_t count = 0;
  for (const StridedRange& range : wire.rows) count += range.count;
  if (count > kUnindexedMax) throw Error(Code::invalid_argument, "a list without indices has more elements than " + std::to_string(kUnindexedMax));
  return static_cast<uint32_t>(count);
}

ElementList from_wire(const WireList& wire) {
  const uint32_t count = element_count(wire);
  ElementList list;
  list.ranges = std::make_shared<const Ranges>(wire.rows);
  list.is_whole = wire.indices.empty();
  std::vector<uint32_t> ids = wire.indices;
  if (list.is_whole) {
    ids.resize(count);
    std::iota(ids.begin(), ids.end(), 0u);
  }
  list.ids = std::make_shared<const std::vector<uint32_t>>(std::move(ids));
  check_indices(list);
  return list;
}

}  // namespace kvxfer
