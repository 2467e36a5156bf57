#include "overlaps.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <queue>
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

constexpr uint64_t kAddressEnd = uint64_t{1} << 63;  // no process has memory there: differences of addresses fit into int64_t
constexpr size_t kPairsMax = 1 << 18;                // of segments that are judged one by one

std::vector<Part> parts_of(const Place& place) {
  std::vector<Part> parts;
  for (size_t i = 0; i < place.segments.size(); ++i) {
    const Segment& segment = place.segments[i];
    const Wide begin = Wide{place.base} + segment.offset, end = begin + Wide{place.count - 1} * segment.stride + segment.length;
    if (end > kAddressEnd) throw Error(Code::invalid_argument, "memory at " + std::to_string(place.base) + " ends past all addresses of a process");
    parts.push_back({static_cast<uint64_t>(begin), static_cast<uint64_t>(end), i});
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
  return parts;
}

Meeting meeting_of(const Place& here, const Segment& ours, const Place& there, const Segment& theirs) {
  const auto delta = static_cast<int64_t>(here.base + ours.offset - (there.base + theirs.offset));
  return {delta, ours.stride, ours.length, theirs.stride, theirs.length};
}

// Those segments of one place that a sweep over the addresses is inside of. Segments of one stride that lie in each other are told
// apart by where they lie within the stride, as on a circle: no two of them that share no byte meet there.
class Active {
 public:
  explicit Active(const Place& place) : place_(place), parts_(parts_of(place)) {}

  // The address where the next segment begins; the greatest number after the last one.
  uint64_t next() const { return at_ == parts_.size() ? std::numeric_limits<uint64_t>::max() : parts_[at_].begin; }

  size_t upcoming() const { return parts_[at_].segment; }  // that segment

  // The sweep enters it, and leaves those that end before it.
  const Part& enter() {
    const Part& part = parts_[at_++];
    leave(part.begin);
    on_circle(place_, part.segment, [&](uint64_t from, uint64_t to) { circles_[stride_of(part)][from] = {to, part.segment}; });
    ends_.push(part);
    return part;
  }

  // `visit(segment)` of the active segments that may share bytes with segment `i` of `other`, which begins at `begin`, perhaps twice.
  template <class F>
  void meet(const Place& other, size_t i, uint64_t begin, F&& visit) {
    leave(begin);
    for (const auto& [stride, circle] : circles_) {
      if (stride != other.segments[i].stride) {
        for (const auto& [_, held] : circle) visit(held.second);
        continue;
      }
      on_circle(other, i, [&circle = circle, &visit](uint64_t from, uint64_t to) {
        auto it = circle.upper_bound(from);
        if (it != circle.begin() && std::prev(it)->second.first > from) --it;
        for (; it != circle.end() && it->first < to; ++it) visit(it->second.second);
      });
    }
  }

 private:
  using Circle = std::map<uint64_t, std::pair<uint64_t, size_t>>;  // begin -> end and segment, within the stride
  struct Later {
    bool operator()(const Part& a, const Part& b) const { return a.end > b.end; }
  };

  uint64_t stride_of(const Part& part) const { return place_.segments[part.segment].stride; }

  // `visit(begin, end)` of the one or two stretches that a segment takes of its stride.
  template <class F>
  static void on_circle(const Place& place, size_t i, F&& visit) {
    const Segment& segment = place.segments[i];
    const uint64_t from = (place.base + segment.offset) % segment.stride, to = from + segment.length;
    visit(from, std::min(to, segment.stride));
    if (to > segment.stride) visit(0, to - segment.stride);
  }

  void leave(uint64_t at) {
    for (; !ends_.empty() && ends_.top().end <= at; ends_.pop()) {
      const auto circle = circles_.find(stride_of(ends_.top()));
      on_circle(place_, ends_.top().segment, [&](uint64_t from, uint64_t) { circle->second.erase(from); });
      if (circle->second.empty()) circles_.erase(circle);
    }
  }

  const Place& place_;
  const std::vector<Part> parts_;
  size_t at_ = 0;
  std::map<uint64_t, Circle> circles_;  // by stride
  std::priority_queue<Part, std::vector<Part>, Later> ends_;
};

// Counts pairs of segments that need a look of their own.
class PairCount {
 public:
  void add() {
    if (++count_ > kPairsMax) {
      throw Error(Code::limit_exceeded, "more than " + std::to_string(kPairsMax) + " pairs of segments lie in each other: too many to judge which blocks share bytes");
    }
  }

 private:
  size_t count_ = 0;
};

}  // namespace

Overlap::Overlap(const Place& here, const Place& there) : count_(here.count), other_count_(there.count) {
  Active ours(here), theirs(there);
  PairCount pairs;
  const auto add = [&](size_t one, size_t other) {
    pairs.add();
    meetings_.push_back(meeting_of(here, here.segments[one], there, there.segments[other]));
  };
  constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();
  while (ours.next() != kNone || theirs.next() != kNone) {
    if (ours.next() <= theirs.next()) {
      const Part& part = ours.enter();
      theirs.meet(here, part.segment, part.begin, [&](size_t other) { add(part.segment, other); });
    } else {
      const Part& part = theirs.enter();
      ours.meet(there, part.segment, part.begin, [&](size_t other) { add(other, part.segment); });
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
  Active active(place);
  PairCount pairs;
  std::string found;
  while (found.empty() && active.next() != std::numeric_limits<uint64_t>::max()) {
    const uint64_t begin = active.next();
    const size_t segment = active.upcoming();
    active.meet(place, segment, begin, [&](size_t other) {
      pairs.add();
      if (!found.empty() || !do_meet(meeting_of(place, place.segments[other], place, place.segments[segment]), place.count, place.count)) return;
      const auto [low, high] = std::minmax(other, segment);
      found = "segments " + std::to_string(low) + " and " + std::to_string(high) + " of its blocks share bytes";
    });
    active.enter();
  }
  return found;
}

}  // namespace kvxfer
