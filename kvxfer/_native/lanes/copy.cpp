#include "copy.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "memory/clock.hpp"
#include "signals.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvxfer {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kStep = 4096;               // a page: the hardware prefetcher works within one, never past its end
constexpr size_t kLongRun = 256 * 1024;      // from this size on, hardware prefetching does most of the work
constexpr size_t kLongAhead = 4 * kLine;
constexpr size_t kPartBytes = 256 * 1024;    // the share of a thread at a time
constexpr size_t kSharedBytes = 1 << 20;     // fewer are copied sooner than another thread wakes up
constexpr Nanos kLookAgain = 2 * kMillisecond;  // of the processors: a check takes a few microseconds
constexpr unsigned kThreadsMax = 4;          // by default
constexpr int kSpins = 1000;                 // of a waiting thread, before it yields: some ten microseconds

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

inline void prefetch(const uint8_t* from, size_t size) {
  for (size_t i = 0; i < size; i += kLine) __builtin_prefetch(from + i);
}

// The C library knows best how to fill a cache, but not where the next run begins.
void copy_plain(const Run* runs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (i + 1 < count) prefetch(runs[i + 1].from, std::min(runs[i + 1].size, kStep));
    std::memcpy(runs[i].to, runs[i].from, runs[i].size);
  }
}

#if defined(__x86_64__)

// The bytes to prefetch during the current step.
struct CopyAhead {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  size_t size = 0;  // how much of `from` to prefetch
};

// The bytes after the first `at` bytes of runs[i].
inline CopyAhead look_ahead(const Run* runs, size_t count, size_t i, size_t at) {
  if (at == runs[i].size) {
    if (++i == count) return {};
    at = 0;
  }
  const Run& run = runs[i];
  return {run.from + at, run.to + at, std::min(run.size - at, run.size >= kLongRun ? kLongAhead : kStep)};
}

// One step that bypasses the cache: the head up to a line of the target, whole groups of four lines, the tail.
#define KVXFER_STEP(name, isa, vector, load, stream)                                                       \
  __attribute__((target(isa))) void name(uint8_t* to, const uint8_t* from, size_t size, const CopyAhead& ahead) { \
    constexpr size_t kGroup = 4 * kLine, kVectors = kGroup / sizeof(vector);                               \
    const size_t head = std::min((kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine, size);         \
    if (head != 0) std::memcpy(to, from, head);                                                            \
    to += head, from += head, size -= head;                                                                \
    size_t asked = 0;                                                                                      \
    for (; size >= kGroup; to += kGroup, from += kGroup, size -= kGroup) {                                 \
      for (const size_t end = std::min(asked + kGroup, ahead.size); asked < end; asked += kLine) __builtin_prefetch(ahead.from + asked); \
      vector group[kVectors];                                                                              \
      for (size_t i = 0; i < kVectors; ++i) group[i] = load(reinterpret_cast<const vector*>(from) + i);    \
      for (size_t i = 0; i < kVectors; ++i) stream(reinterpret_cast<vector*>(to) + i, group[i]);           \
    }                                                                                                      \
    if (asked < ahead.size) prefetch(ahead.from + asked, ahead.size - asked);                              \
    if (size != 0) std::memcpy(to, from, size);                                                            \
  }

KVXFER_STEP(step_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
KVXFER_STEP(step_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
#undef KVXFER_STEP

template <void (*kStepCopy)(uint8_t* to, const uint8_t* from, size_t size, const CopyAhead& ahead)>
void copy_past_cache(const Run* runs, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const Run& run = runs[i];
    for (size_t at = 0, size; at < run.size; at += size) {
      size = std::min(kStep, run.size - at);
      const CopyAhead ahead = look_ahead(runs, count, i, at + size);
      if (ahead.size != 0) __builtin_prefetch(ahead.to, 1);  // loads the page's translation
      kStepCopy(run.to + at, run.from + at, size, ahead);
    }
  }
  _mm_sfence();  // no other instruction orders such stores
}

#endif

using Method = void (*)(const Run* runs, size_t count);

Method find_past_cache() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") != 0) return copy_past_cache<step_avx512>;
  if (__builtin_cpu_supports("avx2") != 0) return copy_past_cache<step_avx2>;
#endif
  return copy_plain;
}

}  // namespace

void copy_runs(const Run* runs, size_t count, Stores stores) {
  static const Method past_cache = find_past_cache();
  (stores == Stores::PastCache ? past_cache : copy_plain)(runs, count);
}

CopyThreads CopyThreads::of_host() { return {std::clamp(std::thread::hardware_concurrency() / 4, 1u, kThreadsMax), kThreadsMax}; }

// --- several threads ---

namespace {

struct CutRuns {
  CutRuns(const Run* given, size_t count) {
    size_t filled = kPartBytes;
    for (size_t i = 0; i < count; ++i) {
      for (size_t at = 0, size; at < given[i].size; at += size) {
        size = std::min(given[i].size - at, kPartBytes);
        if (filled + size > kPartBytes) {
          parts.push_back({runs.size(), 0});
          filled = 0;
        }
        runs.push_back({given[i].to + at, given[i].from + at, size});
        ++parts.back().count;
        filled += size;
      }
    }
  }

  struct RunGroup {
    size_t first = 0, count = 0;  // of runs
  };
  std::vector<Run> runs;
  std::vector<RunGroup> parts;
};

}  // namespace

void Copier::copy(const Run* runs, size_t count, Stores stores) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += runs[i].size;
  const size_t by = threads(bytes);
  if (by == 1) return copy_runs(runs, count, stores);
  const CutRuns cut(runs, count);
  share(by, cut.parts.size(), [&](size_t i) { copy_runs(cut.runs.data() + cut.parts[i].first, cut.parts[i].count, stores); });
}

size_t Copier::threads(size_t bytes) {
  if (bytes < kSharedBytes) return 1;
  if (threads_.always >= threads_.most) return now_;
  if (const Nanos now = monotonic_now(); now - looked_at_ >= kLookAgain) {
    looked_at_ = now;
    const int idle = idle_processors(processors_) + awake_.load(std::memory_order_relaxed);
    now_ = std::clamp(1 + static_cast<unsigned>(std::max(0, idle)), threads_.always, threads_.most);
  }
  return now_;
}

void Copier::share(size_t threads, size_t parts, Call call, const void* context) {
  start(threads - 1);
  const std::shared_ptr<Work> work(new Work{call, context, parts, threads - 1});
  {
    std::lock_guard lock(mutex_);
    work_ = work;
    round_.fetch_add(1, std::memory_order_release);
  }
  for (size_t i = 1; i < threads; ++i) has_work_.notify_one();
  work->take_parts();
  for (int spins = 0; work->done.load(std::memory_order_acquire) != parts; ++spins) {
    spins < kSpins ? relax() : std::this_thread::yield();
  }
}

void Copier::start(size_t helpers) {
  if (helpers_.size() >= helpers) return;
  const NoSignals inherited;  // for the threads that are started here
  try {
    while (helpers_.size() < helpers) helpers_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {  // the process may have no more threads: go on with fewer
    threads_.most = now_ = static_cast<unsigned>(helpers_.size()) + 1;
    threads_.always = std::min(threads_.always, threads_.most);
  }
}

void Copier::Work::take_parts() {
  for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
    call(context, i);
    done.fetch_add(1, std::memory_order_release);
  }
}

bool Copier::Work::take_seat() {
  size_t left = seats.load(std::memory_order_relaxed);
  while (left != 0 && !seats.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
  }
  return left != 0;
}

void Copier::help() {
  ::pthread_setname_np(::pthread_self(), "kvxfer-copy");
  if (CPU_COUNT(&processors_) != 0) ::sched_setaffinity(0, sizeof processors_, &processors_);
  awake_.fetch_add(1, std::memory_order_relaxed);
  bool has_helped = true;
  for (uint64_t seen = 0;;) {
    for (int i = 0; has_helped && i < kSpins && round_.load(std::memory_order_acquire) == seen; ++i) relax();
    std::shared_ptr<Work> work;
    {
      std::unique_lock lock(mutex_);
      awake_.fetch_sub(1, std::memory_order_relaxed);
      has_work_.wait(lock, [&] { return is_over_ || round_.load(std::memory_order_relaxed) != seen; });
      if (is_over_) return;
      awake_.fetch_add(1, std::memory_order_relaxed);
      seen = round_.load(std::memory_order_relaxed);
      work = work_;
    }
    has_helped = work->take_seat();
    if (has_helped) work->take_parts();
  }
}

Copier::~Copier() {
  {
    std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  has_work_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

// --- two walks at once ---

size_t RunWalk::take(Run* runs, size_t count, size_t max, size_t& bytes) {
  size_t used = 0;
  for (; used < count && max != 0; ++used) {
    if (to_left_.size == 0) {
      to_left_ = to_.peek(max);
      to_.advance(to_left_.size);
    }
    if (to_left_.size == 0) break;
    if (from_left_.size == 0) {
      from_left_ = from_.peek(max);
      from_.advance(from_left_.size);
    }
    const size_t size = std::min({to_left_.size, from_left_.size, max});
    if (size == 0) throw Error(Code::internal, "a read must fill as many bytes as it reads");
    runs[used] = {to_left_.data, from_left_.data, size};
    to_left_.data += size, to_left_.size -= size;
    from_left_.data += size, from_left_.size -= size;
    bytes += size;
    max -= size;
  }
  return used;
}

}  // namespace kvxfer
