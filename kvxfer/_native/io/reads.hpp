// The one-sided reads in progress. They take turns, in portions; before each portion the endpoint is asked whether the read still
// holds its blocks. Only the thread that runs the event loop touches them.
#pragma once

#include <deque>

#include "lanes/read_job.hpp"
#include "shared_endpoint.hpp"
#include "statistics.hpp"

namespace kvxfer {

class Reads {
 public:
  Reads(SharedEndpoint& shared, Statistics& statistics) : shared_(shared), statistics_(statistics) {}

  void add(std::unique_ptr<ReadJob> job) {
    jobs_.push_back(std::move(job));
    has_new_ = true;
  }
  // Reads about `budget` bytes. True: more can be read at once.
  bool work(size_t budget);
  void stop(const TransferId& id);  // the transfer is over
  void stop_all();                  // the core closes
  void report_stopped(const TransferId& id, uint64_t token, Code code, const std::string& text);
  bool has_new() const { return has_new_; }  // since the last work()
  bool is_idle() const { return jobs_.empty() && stopped_.empty(); }
  bool is_in_flight() const;  // something may still land
  // Keeps those in flight, and all memory that they use, for ever.
  void keep();

 private:
  struct Stopped {
    std::unique_ptr<ReadJob> job;
    Code code;
    std::string text;
  };

  void stop(std::unique_ptr<ReadJob> job, Code code, const std::string& text);
  void settle_stopped();
  std::unique_ptr<ReadJob> take_first();
  void count(Lane lane, size_t bytes, const ReadJob::Effort& effort);

  SharedEndpoint& shared_;
  Statistics& statistics_;
  std::deque<std::unique_ptr<ReadJob>> jobs_;
  bool has_new_ = false;
  std::vector<Stopped> stopped_;  // their ends are reported once nothing can land for them any more
};

}  // namespace kvxfer
