// Counters of the event loop. The thread that runs it writes them, any thread reads them.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvxfer {

class Counter {
 public:
  void add(uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  void raise_to(uint64_t value) {
    if (value > get()) value_.store(value, std::memory_order_relaxed);
  }
  void subtract(uint64_t amount = 1) { value_.fetch_sub(amount, std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Counts one object while it exists. As an object's first member it is destroyed last: a reader of the lower count finds the
// object's descriptors closed.
class Counted {
 public:
  explicit Counted(Counter& counter) : counter_(counter) { counter_.add(); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { counter_.subtract(); }

 private:
  Counter& counter_;
};

struct Statistics {
  Counter bytes_mapped, bytes_cma, bytes_ucx, bytes_streamed_in, bytes_streamed_out, bytes_spliced_out, bytes_discarded;
  Counter runs_mapped, runs_cma, calls_cma, gets_ucx, gets_ucx_most, runs_streamed_out, calls_streamed_out;
  Counter frames_in, frames_out, wakeups;
  Counter connections, sessions_tcp, sessions_unix, sessions_refused, sessions_ended, dials, dials_failed;
  Counter mappings, mappings_refused, checksum_failures;
  Counter sessions_tls, tls_failures, tls_key_updates;
};

}  // namespace kvxfer
