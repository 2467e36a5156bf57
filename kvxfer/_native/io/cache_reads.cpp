#include "cache_reads.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer {
namespace {

constexpr size_t kLoadedRun = 16 * 1024;  // from here on by loads, which beat prefetches where the processor sees what comes
constexpr size_t kCacheLine = 64;
constexpr size_t kStretch = 2 << 20;      // of one kind: what the other had read already is little of it
constexpr size_t kComparedMin = 3;        // before the other kind may be preferred
constexpr uint32_t kTryEvery = 16;        // stretches of the preferred one for one of the other, once enough were compared
constexpr Nanos kPause = 5 * kMillisecond;
constexpr double kWorthIt = 0.97;         // of the time: what is as quick as plain is not read

}  // namespace

void read_into_cache(const iovec* runs, size_t count, bool may_load) {
  for (size_t i = 0; i < count; ++i) {
    const auto* at = static_cast<const volatile uint8_t*>(runs[i].iov_base);
    const auto* const end = at + runs[i].iov_len;
    if (!may_load || runs[i].iov_len < kLoadedRun) {
      for (; at < end; at += kCacheLine) __builtin_prefetch(const_cast<const uint8_t*>(at));
    } else {
      for (; at < end; at += kCacheLine) static_cast<void>(*at);
    }
  }
}

void CacheReads::spent(Nanos began, Nanos time, size_t bytes) {
  if (began - ended_at_ > kPause) {
    is_waking_ = true;
    kind_ = preferred_;
    before_ = tried_ = 0;
    time_ = 0;
    bytes_ = 0;
  }
  ended_at_ = began + time;
  time_ += time;
  bytes_ += bytes;
  if (bytes_ < kStretch) return;
  const double ns_per_byte = static_cast<double>(std::max<Nanos>(time_, 1)) / static_cast<double>(bytes_);
  time_ = 0;
  bytes_ = 0;
  if (!std::exchange(is_waking_, false)) ended(ns_per_byte);
}

void CacheReads::ended(double ns_per_byte) {
  if (kind_ != preferred_) {
    tried_ = ns_per_byte;
    kind_ = preferred_;
    return;
  }
  if (const double tried = std::exchange(tried_, 0); tried != 0) {
    const double around = (before_ + ns_per_byte) / 2;
    since_try_ = 0;
    compared(kind_ == kPlain ? tried / around : around / tried);
    if (kind_ != preferred_) {
      kind_ = preferred_;
      return;
    }
  }
  before_ = ns_per_byte;
  const bool is_due = ++since_try_ >= (count_ < kCompared ? 1 : kTryEvery);
  if (is_due) kind_ = preferred_ == kPlain ? kRead : kPlain;
}

void CacheReads::compared(double read_to_plain) {
  ratios_[count_++ % kCompared] = read_to_plain;
  const size_t known = std::min(count_, kCompared);
  if (known < kComparedMin) return;
  double sorted[kCompared];
  std::copy_n(ratios_, known, sorted);
  std::nth_element(sorted, sorted + known / 2, sorted + known);
  preferred_ = sorted[known / 2] < (preferred_ == kRead ? 1 : kWorthIt) ? kRead : kPlain;
}

}  // namespace kvxfer
