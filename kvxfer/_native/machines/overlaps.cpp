#include "overlaps.hpp"

#include <algorithm>
#include <tuple>

namespace kvxfer {
namespace {

using Wide = __int128;

Wide floor_div(Wide a, Wide b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0)); }

// The sum of floor((a * i + b) / m) over 0 <= i < n, in the steps of Euclid's algorithm; m > 0, a >= 0. Each pass counts the whole
// points below a line, and the next one those that are left, with the axes exchanged.
Wide floor_sum(Wide n, Wide m, Wide a, Wide b) {
  Wide sum = n * floor_div(b, m);
  b -= floor_div(b, m) * m;
  for (;;) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const Wide top = a * n + b;
    if (top < m) return sum;
    n = top / m;
    b = top % m;
    std::swap(a, m);
  }
}

// The blocks c, not clipped to those that exist, that meet block b: first to last.
std::pair<Wide, Wide> span(const Meeting& m, Wide b) {
  const Wide at = Wide{m.delta} + b * Wide{m.stride};
  return {floor_div(at - Wide{m.other_length}, Wide{m.other_stride}) + 1, floor_div(at + Wide{m.length} - 1, Wide{m.other_stride})};
}

// The least b of [low, high) with `is_true(b)`, which is false up to some b and true from there on; `high` where it is never.
template <class F>
Wide first_true(Wide low, Wide high, F&& is_true) {
  while (low < high) {
    const Wide middle = low + (high - low) / 2;
    if (is_true(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The blocks b of which block ranges can reach existing blocks c: [first, end).
std::pair<Wide, Wide> reach(const Meeting& m, uint32_t count, uint32_t other_count) {
  const Wide first = first_true(0, count, [&](Wide b) { return span(m, b).second >= 0; });
  const Wide end = first_true(first, count, [&](Wide b) { return span(m, b).first >= Wide{other_count}; });
  return {first, end};
}

// How many pairs of blocks meet among [first, end).
Wide meetings_in(const Meeting& m, Wide first, Wide end) {
  const Wide at = Wide{m.delta} + first * Wide{m.stride}, n = end - first;
  return floor_sum(n, Wide{m.other_stride}, Wide{m.stride}, at + Wide{m.length} - 1) -
         floor_sum(n, Wide{m.other_stride}, Wide{m.stride}, at - Wide{m.other_length});
}

bool do_meet(const Meeting& m, uint32_t count, uint32_t other_count) {
  const auto [first, end] = reach(m, count, other_count);
  return first < end && meetings_in(m, first, end) != 0;
}

struct Part {
  uint64_t begin, end;  // of all blocks
  size_t segment;
};

std::vector<Part> parts_of(const Place& place) {
  std::vector<Part> parts;
  for (size_t i = 0; i < place.segments.size(); ++i) {
    const Segment& segment = place.segments[i];
    const uint64_t begin = place.base + segment.offset;
    parts.push_back({begin, begin + (place.count - 1) * segment.stride + segment.length, i});
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
  return parts;
}

Meeting meeting_of(const Place& here, const Segment& ours, const Place& there, const Segment& theirs) {
  const auto delta = static_cast<int64_t>(here.base + ours.offset - (there.base + theirs.offset));
  return {delta, ours.stride, ours.length, theirs.stride, theirs.length};
}

}  // namespace

Overlap::Overlap(const Place& here, const Place& there) : count_(here.count), other_count_(there.count) {
  const std::vector<Part> ours = parts_of(here), theirs = parts_of(there);
  for (const Part& part : ours) {
    for (const Part& other : theirs) {
      if (other.begin >= part.end) break;
      if (other.end > part.begin) meetings_.push_back(meeting_of(here, here.segments[part.segment], there, there.segments[other.segment]));
    }
  }
  std::sort(meetings_.begin(), meetings_.end());
  meetings_.erase(std::unique(meetings_.begin(), meetings_.end()), meetings_.end());
  const auto never = [this](const Meeting& meeting) { return !do_meet(meeting, count_, other_count_); };
  meetings_.erase(std::remove_if(meetings_.begin(), meetings_.end(), never), meetings_.end());
}

std::pair<uint64_t, uint64_t> Overlap::blocks(const Meeting& meeting, uint32_t b) const {
  const auto [first, last] = span(meeting, b);
  const Wide from = std::max<Wide>(first, 0), end = std::min<Wide>(last + 1, other_count_);
  return from < end ? std::pair<uint64_t, uint64_t>(from, end) : std::pair<uint64_t, uint64_t>(0, 0);
}

std::optional<std::pair<uint32_t, uint32_t>> Overlap::example() const {
  if (meetings_.empty()) return std::nullopt;
  const Meeting& meeting = meetings_.front();
  const auto [first, end] = reach(meeting, count_, other_count_);
  const Wide begin = first;
  const Wide b = first_true(first, end, [&](Wide at) { return meetings_in(meeting, begin, at + 1) != 0; });
  return std::pair(static_cast<uint32_t>(b), static_cast<uint32_t>(blocks(meeting, static_cast<uint32_t>(b)).first));
}

std::string overlap_within(const Place& place) {
  const std::vector<Part> parts = parts_of(place);
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t j = i + 1; j < parts.size() && parts[j].begin < parts[i].end; ++j) {
      const Meeting meeting = meeting_of(place, place.segments[parts[i].segment], place, place.segments[parts[j].segment]);
      if (!do_meet(meeting, place.count, place.count)) continue;
      const auto [one, other] = std::minmax(parts[i].segment, parts[j].segment);
      return "segments " + std::to_string(one) + " and " + std::to_string(other) + " of its blocks share bytes";
    }
  }
  return {};
}

}  // namespace kvxfer
