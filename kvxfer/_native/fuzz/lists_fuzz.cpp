// Lists of ranges that a peer names, against what they mean when each piece is written down: which lists are refused, how many
// pieces of how many bytes they have and where, and whether pieces lie inside the regions that they are said to be of.
#include <set>

#include "input.hpp"
#include "machines/frames.hpp"
#include "machines/memory_claim.hpp"

using namespace kvxfer;
using namespace kvxfer::fuzz;

namespace {

using Wide = __int128;

constexpr uint32_t kRegions = 4;
constexpr uint64_t kRegionBytes = 200;

struct Piece {
  uint32_t region;
  uint64_t offset, length;
  bool operator==(const Piece& o) const { return region == o.region && offset == o.offset && length == o.length; }
};

WireList list_of(Input& input) {
  WireList wire;
  wire.grids.resize(input.below(8));
  for (Grid& grid : wire.grids) {
    grid = {input.u32(), input.any(), input.any(), input.any(), input.u32()};
    if (grid.count < 0xf0) grid.count %= 16;  // most lists are short, and so are the runs of this target
  }
  wire.picks.resize(input.below(12));
  for (uint32_t& pick : wire.picks) pick = input.u32();
  return wire;
}

// Nothing where the list means nothing. Grids are judged whole, also those that nothing is picked of.
std::optional<std::vector<Piece>> meaning_of(const WireList& wire) {
  constexpr Wide kEndMax = Wide{1} << 63;
  Wide count = 0;
  for (const Grid& grid : wire.grids) {
    if (grid.count == 0 || grid.length == 0) return std::nullopt;
    if (grid.count > 1 && grid.stride < grid.length) return std::nullopt;
    if (Wide{grid.offset} + Wide{grid.count - 1} * grid.stride + grid.length > kEndMax) return std::nullopt;
    count += grid.count;
  }
  if (count == 0 || count > UINT32_MAX || (wire.picks.empty() && count > kUnpickedMax)) return std::nullopt;
  std::vector<Piece> pieces;
  const auto piece_at = [&](uint64_t number) -> std::optional<Piece> {
    for (const Grid& grid : wire.grids) {
      if (number < grid.count) return Piece{grid.region, grid.offset + grid.stride * number, grid.length};
      number -= grid.count;
    }
    return std::nullopt;
  };
  const size_t picked = wire.picks.empty() ? static_cast<size_t>(count) : wire.picks.size();
  for (size_t i = 0; i < picked; ++i) {
    const std::optional<Piece> piece = piece_at(wire.picks.empty() ? i : wire.picks[i]);
    if (!piece || piece->length > kPieceBytesMax) return std::nullopt;
    pieces.push_back(*piece);
  }
  return pieces;
}

Piece piece_of(const PieceList& list, uint32_t i) {
  const uint32_t piece = (*list.ids)[i], at = list.ranges->grid_of(piece);
  const Grid& grid = list.ranges->grids().at(at);
  return {grid.region, grid.offset + grid.stride * (piece - list.ranges->first_of(at)), list.ranges->bytes_of(piece)};
}

// Throws nothing but what a peer would be told.
template <class F>
bool is_accepted(Code code, F&& act) {
  try {
    act();
    return true;
  } catch (const Error& error) {
    check(error.code() == code, error.what());
    return false;
  }
}

std::optional<PieceList> try_list(const WireList& wire, const std::optional<std::vector<Piece>>& meaning) {
  PieceList list;
  if (!is_accepted(Code::invalid_argument, [&] { list = from_wire(wire); })) {
    check(!meaning, "a list that means something was refused");
    return std::nullopt;
  }
  check(meaning.has_value(), "a list that means nothing was accepted");
  check(list.count() == meaning->size() && piece_count(wire) == list.count(), "another number of pieces");
  uint64_t bytes = 0;
  std::set<uint32_t> regions;
  for (uint32_t i = 0; i < list.count(); ++i) {
    check(piece_of(list, i) == (*meaning)[i], "a piece lies elsewhere");
    bytes += (*meaning)[i].length;
    regions.insert((*meaning)[i].region);
  }
  check(list.bytes(0, list.count()) == bytes, "another number of bytes");
  check(regions_of(list) == std::vector<uint32_t>(regions.begin(), regions.end()), "other regions");
  return list;
}

void try_again_over_the_wire(const PieceList& list) {
  WireList wire;
  if (!is_accepted(Code::limit_exceeded, [&] { wire = to_wire(list); })) return;
  check(wire.bytes() == wire_bytes(list) && wire.bytes() <= kListBytesMax, "a list of another length on the wire");
  const PieceList again = from_wire(wire);
  check(again.count() == list.count(), "a list came back with other pieces");
  for (uint32_t i = 0; i < list.count(); ++i) check(piece_of(again, i) == piece_of(list, i), "a list came back with another piece");
}

// A grid that only some pieces of are picked of is judged whole.
void try_regions(const WireList& wire, const PieceList& list) {
  Regions regions;
  for (uint32_t id = 0; id < kRegions; ++id) regions.add(RegionInfo{id, kRegionBytes * (id + 1), id != 1, id != 2});
  regions.withdraw(3);
  for (const RegionUse use : {RegionUse::Own, RegionUse::PeerReads, RegionUse::PeerWrites}) {
    bool is_inside = true;
    for (uint32_t i = 0; i < list.count(); ++i) {
      const Grid& grid = wire.grids.at(list.ranges->grid_of((*list.ids)[i]));
      const bool is_allowed = grid.region < 3 && !(use == RegionUse::PeerReads && grid.region == 1) && !(use == RegionUse::PeerWrites && grid.region == 2);
      is_inside = is_inside && is_allowed && Wide{grid.offset} + Wide{grid.count - 1} * grid.stride + grid.length <= kRegionBytes * (grid.region + 1);
    }
    const bool was_accepted = is_accepted(use == RegionUse::Own ? Code::invalid_argument : Code::refused, [&] {
      PiecesClaim claim(regions, list, use, true);
      claim.take();
      check(claim.fitting(0, claim.count(), 100) >= 1, "nothing fits");
      claim.give_back();
    });
    check(was_accepted == is_inside, "a piece outside of what there is was accepted, or one inside refused");
  }
  for (const auto& [_, region] : regions.all()) check(region.landings == 0, "a claim was not given back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  std::optional<std::vector<Piece>> meanings[2];
  std::optional<PieceList> lists[2];
  for (int i = 0; i < 2; ++i) {
    const WireList wire = list_of(input);
    meanings[i] = meaning_of(wire);
    lists[i] = try_list(wire, meanings[i]);
    if (!lists[i]) continue;
    try_again_over_the_wire(*lists[i]);
    try_regions(wire, *lists[i]);
  }
  if (!lists[0] || !lists[1]) return 0;
  const bool is_alike = std::equal(meanings[0]->begin(), meanings[0]->end(), meanings[1]->begin(), meanings[1]->end(),
                                   [](const Piece& a, const Piece& b) { return a.length == b.length; });
  check(is_accepted(Code::invalid_argument, [&] { check_alike(*lists[0], *lists[1]); }) == is_alike, "lists were paired that are not alike, or not paired");
  return 0;
}
