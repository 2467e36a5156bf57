#include "reads.hpp"

#include <algorithm>

namespace kvxfer {
namespace {

constexpr size_t kSliceBytes = 4 << 20;       // one job's portion: after it the endpoint is asked again whether the read holds its blocks
constexpr size_t kSliceBytesMin = 512 << 10;  // the portion if many jobs share kSliceBytes: a smaller one would cost more in calls

}  // namespace

void Reads::report_stopped(const TransferId& id, uint64_t token, Code code, const std::string& text) {
  shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_stopped(id, token, code, text, now, out); });
}

void Reads::stop(std::unique_ptr<ReadJob> job, Code code, const std::string& text) {
  if (job->is_in_flight()) {
    stopped_.push_back({std::move(job), code, text});
  } else {
    report_stopped(job->id(), job->token(), code, text);
  }
}

void Reads::stop(const TransferId& id) {
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    if ((*it)->id() != id) {
      ++it;
      continue;
    }
    std::unique_ptr<ReadJob> job = std::move(*it);
    it = jobs_.erase(it);
    stop(std::move(job), Code::cancelled, "the transfer is over");
  }
}

void Reads::stop_all() {
  while (!jobs_.empty()) stop(take_first(), Code::closed, "the core is closed");
}

bool Reads::is_in_flight() const {
  const auto is_flying = [](const auto& job) { return job->is_in_flight(); };
  return std::any_of(jobs_.begin(), jobs_.end(), is_flying) ||
         std::any_of(stopped_.begin(), stopped_.end(), [&](const Stopped& stopped) { return is_flying(stopped.job); });
}

// Leaks all jobs on purpose: a read in flight may still write to the memory that its job owns.
void Reads::keep() {
  new auto(std::move(jobs_));
  new auto(std::move(stopped_));
}

std::unique_ptr<ReadJob> Reads::take_first() {
  std::unique_ptr<ReadJob> job = std::move(jobs_.front());
  jobs_.pop_front();
  return job;
}

void Reads::settle_stopped() {
  for (size_t i = 0; i < stopped_.size();) {
    if (stopped_[i].job->is_in_flight()) {
      ++i;
      continue;
    }
    const Stopped stopped = std::move(stopped_[i]);
    stopped_.erase(stopped_.begin() + static_cast<std::ptrdiff_t>(i));
    report_stopped(stopped.job->id(), stopped.job->token(), stopped.code, stopped.text);
  }
}

void Reads::count(Lane lane, size_t bytes, const ReadJob::Effort& effort) {
  (lane == Lane::Mapped ? statistics_.bytes_mapped : lane == Lane::Cma ? statistics_.bytes_cma : statistics_.bytes_ucx).add(bytes);
  (lane == Lane::Mapped ? statistics_.runs_mapped : lane == Lane::Cma ? statistics_.runs_cma : statistics_.gets_ucx).add(effort.runs);
  if (lane == Lane::Cma) statistics_.calls_cma.add(effort.calls);
  statistics_.gets_ucx_most.raise_to(effort.in_flight_most);
}

bool Reads::work(size_t budget) {
  has_new_ = false;
  settle_stopped();
  size_t idle = 0;  // jobs in a row that read nothing: once that is all of them, only UCX can bring more bytes
  while (budget != 0 && idle < jobs_.size()) {
    ReadJob* const job = jobs_.front().get();  // it stays in `jobs_` if a call throws: a job in flight must not be destroyed
    if (!shared_.may_land(job->session(), job->id(), job->token())) {
      stop(take_first(), Code::cancelled, "the transfer is over");
      continue;
    }
    size_t bytes = 0;
    try {
      bytes = job->read(std::min(budget, std::max(kSliceBytes / jobs_.size(), kSliceBytesMin)));
    } catch (const Error& error) {
      if (error.code() == Code::internal) throw;
      if (error.code() == Code::checksum) statistics_.checksum_failures.add();
      stop(take_first(), error.code(), error.what());
      continue;
    }
    count(job->lane(), bytes, job->take_effort());
    budget -= std::min(budget, bytes);
    idle = bytes == 0 && !job->is_done() ? idle + 1 : 0;
    if (job->is_done()) {
      const std::unique_ptr<ReadJob> landed = take_first();
      shared_.act_io([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.read_landed(landed->id(), landed->token(), now, out); });
    } else {
      jobs_.push_back(take_first());
    }
  }
  return idle < jobs_.size();
}

}  // namespace kvxfer
