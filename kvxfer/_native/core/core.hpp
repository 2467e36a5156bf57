// One agent's native half: machines, sockets, pools, and the thread that joins them. Thread-safe; knows no Python.
#pragma once

#include <thread>

#include "io_thread.hpp"

namespace kvxfer {

struct CoreAddress {
  std::string bind_host;
  uint16_t bind_port = 0;
  std::string unix_path;  // empty: none
};

class Core {
 public:
  Core(AgentRef self, EndpointLimits limits, CoreAddress address);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  ~Core() { close(); }

  void start();
  // Joins the thread. Idempotent; calls beside it wait for the same end. In a forked child, which has a copy of the memory
  // and nothing else of the core, it leaves alone what is the parent's.
  void close();

  SharedEndpoint& shared() { return shared_; }
  const Statistics& statistics() const { return statistics_; }
  const std::string& unix_path() const { return address_.unix_path; }
  uint16_t tcp_port() const { return tcp_port_; }

  void add_pool(const PoolInfo& info, std::shared_ptr<Region> region, std::vector<Segment> segments);
  void add_pool(const PoolInfo& info, uint8_t* address, uint64_t bytes, std::vector<Segment> segments);
  void pull(uint32_t pool, TransferSpec spec);

 private:
  const EndpointLimits limits_;
  const CoreAddress address_;
  SharedEndpoint shared_;
  Statistics statistics_;
  std::mutex lifetime_;  // start and close
  std::unique_ptr<IoThread> io_;
  std::thread thread_;
  std::atomic<uint16_t> tcp_port_{0};
  bool is_bound_ = false;
  pid_t owner_ = 0;  // the process that started it
};

}  // namespace kvxfer
