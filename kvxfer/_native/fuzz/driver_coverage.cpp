#include "driver_coverage.hpp"

namespace fuzz {
namespace {

Coverage the_coverage;
thread_local bool is_heard = false;

// Below 4, below 8, and so on: a loop that ran twice as often is something new, one more turn of it is not.
uint32_t range_of(uint8_t count) {
  constexpr uint8_t kEnds[] = {1, 2, 3, 7, 15, 31, 127, 255};
  uint32_t range = 0;
  while (count > kEnds[range]) ++range;
  return range;
}

}  // namespace

Coverage& coverage() { return the_coverage; }

void Coverage::begin() {
  for (const uint32_t edge : touched_) counts_[edge] = 0;
  touched_.clear();
  touched_.reserve(kEdges);
  last_ = 0;
  compared_ = 0;
  is_heard = true;
}

const std::vector<uint32_t>& Coverage::end() {
  is_heard = false;
  features_.clear();
  for (const uint32_t edge : touched_) features_.push_back(edge * 8 + range_of(counts_[edge]));
  return features_;
}

}  // namespace fuzz

#define KVXFER_COMPARED(name, type)                                                      \
  void __sanitizer_cov_trace_##name(type left, type right) {                             \
    if (fuzz::is_heard) fuzz::the_coverage.compared(left, right, sizeof(type));          \
  }

extern "C" {

// Where the executable was loaded does not matter: the same input has the same edges in every process.
void __sanitizer_cov_trace_pc() {
  if (!fuzz::is_heard) return;
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  fuzz::the_coverage.block(here - reinterpret_cast<uintptr_t>(&__sanitizer_cov_trace_pc));
}

KVXFER_COMPARED(cmp2, uint16_t)
KVXFER_COMPARED(cmp4, uint32_t)
KVXFER_COMPARED(cmp8, uint64_t)
KVXFER_COMPARED(const_cmp2, uint16_t)
KVXFER_COMPARED(const_cmp4, uint32_t)
KVXFER_COMPARED(const_cmp8, uint64_t)

// A byte is soon guessed.
void __sanitizer_cov_trace_cmp1(uint8_t, uint8_t) {}
void __sanitizer_cov_trace_const_cmp1(uint8_t, uint8_t) {}
void __sanitizer_cov_trace_cmpf(float, float) {}
void __sanitizer_cov_trace_cmpd(double, double) {}

// cases[0]: how many there are; [1]: bits of the value; then the values.
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t* cases) {
  if (!fuzz::is_heard) return;
  for (uint64_t i = 0; i < cases[0]; ++i) fuzz::the_coverage.compared(value, cases[2 + i], static_cast<uint8_t>(cases[1] / 8));
}

}  // extern "C"
