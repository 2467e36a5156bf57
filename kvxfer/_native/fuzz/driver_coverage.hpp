// What a run of the target touched, as gcc's -fsanitize-coverage=trace-pc,trace-cmp tells it: edges between basic blocks with
// how often each was taken, and the pairs of numbers that were compared and differed. Compiled without instrumentation; in a
// build without it nothing is ever told.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fuzz {

struct Comparison {
  uint64_t left = 0, right = 0;
  uint8_t bytes = 0;  // of each
};

class Coverage {
 public:
  static constexpr uint32_t kEdges = 1 << 18;     // distinguished, by hash
  static constexpr uint32_t kFeatures = kEdges * 8;  // an edge and one of eight ranges of how often it was taken
  static constexpr size_t kComparisons = 512;     // kept of one run, the latest

  void begin();
  // Every feature of the run since begin(); the same list whenever the run is the same.
  const std::vector<uint32_t>& end();
  size_t comparison_count() const { return compared_ < kComparisons ? compared_ : kComparisons; }
  const Comparison& comparison(size_t i) const { return comparisons_[i]; }

  void block(uintptr_t address) {
    const uint64_t edge = (address * 0x9e3779b97f4a7c15ull ^ last_) >> 7 & (kEdges - 1);
    last_ = address * 0x9e3779b97f4a7c15ull >> 1;
    if (counts_[edge] == 0) touched_.push_back(static_cast<uint32_t>(edge));
    if (counts_[edge] != 255) ++counts_[edge];
  }
  void compared(uint64_t left, uint64_t right, uint8_t bytes) {
    if (left != right) comparisons_[compared_++ % kComparisons] = {left, right, bytes};
  }

 private:
  std::array<uint8_t, kEdges> counts_{};
  std::vector<uint32_t> touched_, features_;
  uint64_t last_ = 0;
  std::array<Comparison, kComparisons> comparisons_{};
  size_t compared_ = 0;
};

// Of this process: the instrumentation has no other place to tell it to. Threads beside the one that fuzzes are not heard.
Coverage& coverage();

}  // namespace fuzz
