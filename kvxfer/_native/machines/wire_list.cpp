// Between lists of pieces and what of them goes over the wire.
#include <numeric>

#include "frames.hpp"

namespace kvxfer {
namespace {

bool is_all(const PieceList& list) {
  if (list.count() != list.ranges->count()) return false;
  for (uint32_t i = 0; i < list.count(); ++i) {
    if ((*list.ids)[i] != i) return false;
  }
  return true;
}

// A long list says all of its picks: what a frame makes its receiver write down must not outgrow the frame.
bool goes_unpicked(const PieceList& list) { return list.count() <= kUnpickedMax && is_all(list); }

}  // namespace

size_t wire_bytes(const PieceList& list) {
  const size_t grids = list.ranges->grids().size() * kGridBytes;
  const size_t bytes = list.ranges->is_table() ? list.count() * kGridBytes : goes_unpicked(list) ? grids : grids + list.count() * 4;
  if (bytes > kListBytesMax) {
    throw Error(Code::limit_exceeded, "a list of " + std::to_string(bytes) + " bytes does not fit one post (" + std::to_string(kListBytesMax) + "): split it");
  }
  return bytes;
}

WireList to_wire(const PieceList& list) {
  wire_bytes(list);
  WireList wire;
  const std::vector<Grid>& grids = list.ranges->grids();
  if (!list.ranges->is_table()) {
    wire.grids = grids;
    if (!goes_unpicked(list)) wire.picks = *list.ids;
    return wire;
  }
  wire.grids.reserve(list.count());
  for (const uint32_t piece : *list.ids) wire.grids.push_back(grids[piece]);
  return wire;
}

uint32_t piece_count(const WireList& wire) {
  if (!wire.picks.empty()) return static_cast<uint32_t>(wire.picks.size());
  uint64_t count = 0;
  for (const Grid& grid : wire.grids) count += grid.count;
  if (count > kUnpickedMax) throw Error(Code::invalid_argument, "a list without picks has more pieces than " + std::to_string(kUnpickedMax));
  return static_cast<uint32_t>(count);
}

PieceList from_wire(const WireList& wire) {
  const uint32_t count = piece_count(wire);
  PieceList list;
  list.ranges = std::make_shared<const Ranges>(wire.grids);
  list.is_whole = wire.picks.empty();
  std::vector<uint32_t> ids = wire.picks;
  if (list.is_whole) {
    ids.resize(count);
    std::iota(ids.begin(), ids.end(), 0u);
  }
  list.ids = std::make_shared<const std::vector<uint32_t>>(std::move(ids));
  check_picks(list);
  return list;
}

}  // namespace kvxfer
