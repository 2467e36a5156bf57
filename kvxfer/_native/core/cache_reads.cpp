#include "cache_reads.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

constexpr size_t kLoadedRun = 16 * 1024;  // from here on by loads, which beat prefetches where the processor sees what comes
constexpr size_t kCacheLine = 64;
constexpr size_t kStretch = 2 << 20;     // of one kind: what the other had read already is little of it
constexpr uint32_t kFirst = 2;           // stretches of each kind before one is preferred
constexpr uint32_t kTryEvery = 16;       // stretches of the preferred one for one of the other
constexpr double kWeight = 1.0 / 4;      // of a new stretch
constexpr double kOutlier = 4;           // who was not run for a while is not that slow

}  // namespace

void read_into_cache(const iovec* runs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto* at = static_cast<const volatile uint8_t*>(runs[i].iov_base);
    const auto* const end = at + runs[i].iov_len;
    if (runs[i].iov_len < kLoadedRun) {
      for (; at < end; at += kCacheLine) __builtin_prefetch(const_cast<const uint8_t*>(at));
    } else {
      for (; at < end; at += kCacheLine) static_cast<void>(*at);
    }
  }
}

void CacheReads::spent(Nanos time, size_t bytes) {
  time_ += time;
  bytes_ += bytes;
  if (bytes_ < kStretch) return;
  Kind& kind = kinds_[kind_];
  const double found = static_cast<double>(time_) / static_cast<double>(bytes_);
  const double weight = std::max(kWeight, 1.0 / ++kind.stretches);
  const double taken = kind.stretches == 1 ? found : std::min(found, kOutlier * kind.ns_per_byte);
  kind.ns_per_byte += weight * (taken - kind.ns_per_byte);
  time_ = 0;
  bytes_ = 0;
  kind_ = next();
}

size_t CacheReads::next() {
  for (const size_t kind : {kPlain, kRead}) {
    if (kinds_[kind].stretches < std::min(kFirst, kinds_[1 - kind].stretches + 1)) return kind;
  }
  const size_t better = kinds_[kRead].ns_per_byte < kinds_[kPlain].ns_per_byte ? kRead : kPlain;
  if (++since_try_ <= kTryEvery) return better;
  since_try_ = 0;
  return 1 - better;
}

}  // namespace kvxfer
