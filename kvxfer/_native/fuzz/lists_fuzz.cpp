// Lists of ranges from a peer, compared with a list of their single elements: which lists are refused, how many elements they have,
// of how many bytes and where, and whether elements lie inside their regions.
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

struct Element {
  uint32_t region;
  uint64_t offset, length;
  bool operator==(const Element& o) const { return region == o.region && offset == o.offset && length == o.length; }
};

WireList list_of(Input& input) {
  WireList wire;
  wire.rows.resize(input.below(8));
  for (StridedRange& range : wire.rows) {
    range = {input.u32(), input.any(), input.any(), input.any(), input.u32()};
    if (range.count < 0xf0) range.count %= 16;  // most lists are short, and so are the runs of this target
  }
  wire.indices.resize(input.below(12));
  for (uint32_t& index : wire.indices) index = input.u32();
  return wire;
}

// Nothing where the list is invalid. Each range is judged whole, also one that no index names.
std::optional<std::vector<Element>> meaning_of(const WireList& wire) {
  constexpr Wide kEndMax = Wide{1} << 63;
  Wide count = 0;
  for (const StridedRange& range : wire.rows) {
    if (range.count == 0 || range.length == 0) return std::nullopt;
    if (range.count > 1 && range.stride < range.length) return std::nullopt;
    if (Wide{range.offset} + Wide{range.count - 1} * range.stride + range.length > kEndMax) return std::nullopt;
    count += range.count;
  }
  if (count == 0 || count > UINT32_MAX || (wire.indices.empty() && count > kUnindexedMax)) return std::nullopt;
  std::vector<Element> elements;
  const auto element_at = [&](uint64_t number) -> std::optional<Element> {
    for (const StridedRange& range : wire.rows) {
      if (number < range.count) return Element{range.region, range.offset + range.stride * number, range.length};
      number -= range.count;
    }
    return std::nullopt;
  };
  const size_t chosen = wire.indices.empty() ? static_cast<size_t>(count) : wire.indices.size();
  for (size_t i = 0; i < chosen; ++i) {
    const std::optional<Element> element = element_at(wire.indices.empty() ? i : wire.indices[i]);
    if (!element || element->length > kElementBytesMax) return std::nullopt;
    elements.push_back(*element);
  }
  return elements;
}

Element element_of(const ElementList& list, uint32_t i) {
  const uint32_t element = (*list.ids)[i], at = list.ranges->row_of(element);
  const StridedRange& range = list.ranges->rows().at(at);
  return {range.region, range.offset + range.stride * (element - list.ranges->first_of(at)), list.ranges->bytes_of(element)};
}

// Throws only errors that a peer would get.
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

std::optional<ElementList> try_list(const WireList& wire, const std::optional<std::vector<Element>>& meaning) {
  ElementList list;
  if (!is_accepted(Code::invalid_argument, [&] { list = from_wire(wire); })) {
    check(!meaning, "a list that means something was refused");
    return std::nullopt;
  }
  check(meaning.has_value(), "a list that means nothing was accepted");
  check(list.count() == meaning->size() && element_count(wire) == list.count(), "another number of elements");
  uint64_t bytes = 0;
  std::set<uint32_t> regions;
  for (uint32_t i = 0; i < list.count(); ++i) {
    check(element_of(list, i) == (*meaning)[i], "an element lies elsewhere");
    bytes += (*meaning)[i].length;
    regions.insert((*meaning)[i].region);
  }
  check(list.bytes(0, list.count()) == bytes, "another number of bytes");
  check(regions_of(list) == std::vector<uint32_t>(regions.begin(), regions.end()), "other regions");
  return list;
}

void try_again_over_the_wire(const ElementList& list) {
  WireList wire;
  if (!is_accepted(Code::limit_exceeded, [&] { wire = to_wire(list); })) return;
  check(wire.bytes() == wire_bytes(list) && wire.bytes() <= kListBytesMax, "a list of another length on the wire");
  const ElementList again = from_wire(wire);
  check(again.count() == list.count(), "a list came back with other elements");
  for (uint32_t i = 0; i < list.count(); ++i) check(element_of(again, i) == element_of(list, i), "a list came back with another element");
}

// A range is judged whole, also where indices name only some of its elements.
void try_regions(const WireList& wire, const ElementList& list) {
  Regions regions;
  for (uint32_t id = 0; id < kRegions; ++id) regions.add(RegionInfo{id, kRegionBytes * (id + 1), id != 1, id != 2});
  regions.withdraw(3);
  for (const RegionUse use : {RegionUse::Own, RegionUse::PeerReads, RegionUse::PeerWrites}) {
    bool is_inside = true;
    for (uint32_t i = 0; i < list.count(); ++i) {
      const StridedRange& range = wire.rows.at(list.ranges->row_of((*list.ids)[i]));
      const bool is_allowed = range.region < 3 && !(use == RegionUse::PeerReads && range.region == 1) && !(use == RegionUse::PeerWrites && range.region == 2);
      is_inside = is_inside && is_allowed && Wide{range.offset} + Wide{range.count - 1} * range.stride + range.length <= kRegionBytes * (range.region + 1);
    }
    const bool was_accepted = is_accepted(use == RegionUse::Own ? Code::invalid_argument : Code::refused, [&] {
      ElementsClaim claim(regions, list, use, true);
      claim.take();
      check(claim.fitting(0, claim.count(), 100) >= 1, "nothing fits");
      claim.give_back();
    });
    check(was_accepted == is_inside, "an element outside of what there is was accepted, or one inside refused");
  }
  for (const auto& [_, region] : regions.all()) check(region.landings == 0, "a claim was not given back");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  std::optional<std::vector<Element>> meanings[2];
  std::optional<ElementList> lists[2];
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
                                   [](const Element& a, const Element& b) { return a.length == b.length; });
  check(is_accepted(Code::invalid_argument, [&] { check_alike(*lists[0], *lists[1]); }) == is_alike, "lists were paired that are not alike, or not paired");
  return 0;
}
