// Copies between two address ranges of this process, thousands of scattered runs at a time. This file decides how bytes move
// (instructions, past the cache or into it, one thread or several), never which bytes, nor whether they may. The threads also serve
// other divisible work that moves bytes (`cma`).
//
// Pools are far larger than any cache, so a copy waits for memory: each run's successor is prefetched while the run itself is
// copied, and stores bypass the cache, which avoids reading the bytes that are overwritten. A small copy stays in the cache,
// because its reader follows soon.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memory/pool.hpp"
#include "processors.hpp"
#include "machines/ids.hpp"

namespace kvxfer {

struct Run {
  uint8_t* to = nullptr;
  const uint8_t* from = nullptr;
  size_t size = 0;
};

enum class Stores { InCache, PastCache };

// By the calling thread. `to` and `from` of a run do not overlap.
void copy_runs(const Run* runs, size_t count, Stores stores);

// How many threads copy: `always` at least, and up to `most` while that many processors are idle.
struct CopyThreads {
  unsigned always = 1, most = 1;

  // The default. `always`: a quarter of the processors, at least 1 and at most 4. `most`: 4.
  static CopyThreads of_host();
};

// The threads that copy for one IO thread, which is the first of them. The first copy that needs the others starts them; they take
// no signals, and run on the processors that their maker may use. A helper that comes late finds no work, and no thread waits for a
// helper that has not begun.
class Copier {
 public:
  explicit Copier(CopyThreads threads = {}) : threads_(threads), now_(threads.always), processors_(own_processors()) {}
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;
  ~Copier();

  // Every byte is in place when this returns. One caller at a time.
  void copy(const Run* runs, size_t count, Stores stores);
  // Calls part(0), part(1) ..., each once, on up to `threads` threads, the caller's among them; all calls have returned when this
  // returns. `part` must not throw. One caller at a time.
  template <class Part>
  void share(size_t threads, size_t parts, const Part& part) {
    share(threads, parts, [](const void* context, size_t i) { (*static_cast<const Part*>(context))(i); }, &part);
  }
  // How many threads a copy of so many bytes should use now, the caller's among them.
  size_t threads(size_t bytes);

 private:
  using Call = void (*)(const void* context, size_t part);
  struct Work {
    void take_parts();
    bool take_seat();

    const Call call;
    const void* const context;  // the caller's, which ends once all parts are done
    const size_t parts;
    std::atomic<size_t> seats;  // how many more helpers may take parts of this work
    std::atomic<size_t> next{0}, done{0};
  };
  void share(size_t threads, size_t parts, Call call, const void* context);
  void start(size_t helpers);
  void help();

  CopyThreads threads_;
  unsigned now_;                      // how many threads copy, as of the last check of the processors
  const cpu_set_t processors_;
  Nanos looked_at_ = 0;
  std::atomic<int> awake_{0};         // helpers that do not sleep: the kernel counts each as runnable
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::shared_ptr<Work> work_;        // the newest; a helper that missed an older one does not need it
  std::atomic<uint64_t> round_{0};    // counts the works: a helper that sees a new number has new work
  bool is_over_ = false;
};

// Two walks over the same number of bytes, as the runs that are contiguous in both.
class RunWalk {
 public:
  RunWalk() = default;
  RunWalk(BlockWalk from, BlockWalk to) : from_(std::move(from)), to_(std::move(to)) {}

  bool is_done() const { return to_left_.size == 0 && to_.is_done(); }
  // Up to `count` runs of up to `max` bytes together. Returns how many, and adds their bytes to `bytes`.
  size_t take(Run* runs, size_t count, size_t max, size_t& bytes);

 private:
  BlockWalk from_, to_;
  BlockWalk::Span from_left_, to_left_;
};

}  // namespace kvxfer
