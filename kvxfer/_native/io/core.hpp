// One agent's native half: machines, sockets, pools, and the event loop that joins them. Thread-safe; knows no Python.
#pragma once

#include <thread>

#include "event_loop.hpp"

namespace kvxfer {

// Which threads run the event loop: with Thread the IO thread, and in its place a caller that waits; with Caller also one that posts or
// polls.
enum class ProgressMode : uint8_t { Thread, Caller };

struct CoreOptions {
  std::string bind_host;
  uint16_t bind_port = 0;
  std::string unix_path;       // empty: no Unix socket
  UcxOptions ucx;
  unsigned copy_threads = 0;   // of `mapped` and `cma`, the IO thread among them; 0: as many as processors are idle
  ProgressMode progress = ProgressMode::Thread;
  EncryptionOptions encryption;
};

class Core {
 public:
  Core(AgentRef self, EndpointLimits limits, CoreOptions options);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  ~Core() { close(); }

  void start();
  // Joins the thread. Idempotent; concurrent calls wait for the same end. In a forked child, which has only a copy of the memory,
  // it touches nothing that belongs to the parent.
  void close();
  // Waits until there are events other than progress, a signal came or it is `until`. This thread runs the event loop meanwhile,
  // unless another thread does. Returns whether there are events.
  bool wait(Nanos until);
  // Takes the events. Never waits; with ProgressMode::Caller, if there are none, this thread first does one round of the event
  // loop, unless another thread runs it.
  std::vector<OwnerEvent> drain();
  bool is_run_by_callers() const { return options_.progress == ProgressMode::Caller; }

  SharedEndpoint& shared() { return shared_; }
  const Statistics& statistics() const { return statistics_; }
  const std::string& unix_path() const { return options_.unix_path; }
  uint16_t tcp_port() const { return tcp_port_; }
  const std::string& ucx_obstacle() const { return ucx_obstacle_; }  // why the `ucx` lane is off; empty: it is on

  void add_pool(const PoolInfo& info, std::shared_ptr<Region> region, std::vector<Segment> segments);
  // `device`: the number of the CUDA device that has `address`; below 0: host memory. Throws Error(no_lane) if the driver cannot be
  // used.
  void add_pool(const PoolInfo& info, uint8_t* address, uint64_t bytes, std::vector<Segment> segments, int device = -1);
  // `address` and `device` are ignored if there is a `region`.
  void add_region(const RegionInfo& info, std::shared_ptr<Region> region, uint8_t* address, int device = -1);
  void grant(const TransferId& id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns, uint32_t ready_blocks,
             const Bytes32& content_digest);
  // Each returns at once, and none waits for a socket or a peer. With ProgressMode::Caller this thread does a round of the event
  // loop for a small operation.
  void pull(uint32_t pool, TransferSpec spec);
  void fetch(PostSpec spec);
  void push(PostSpec spec);
  uint64_t notify(const AgentRef& to, std::string payload);
  // Tells the machines how many of a grant's blocks are ready. If the pool has checksums, the caller's thread computes those of the
  // new blocks here.
  void ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete);

 private:
  // Calls `act` on the endpoint, and makes sure that the event loop performs its effects.
  template <class F>
  void act(bool is_small, F&& act);
  bool progress(bool looks);
  std::shared_ptr<UcxMemory> ucx_memory(uint8_t* address, uint64_t bytes, bool is_exposed, bool is_device = false) const;

  const EndpointLimits limits_;
  const CoreOptions options_;
  SharedEndpoint shared_;
  Statistics statistics_;
  std::shared_ptr<UcxContext> ucx_;
  std::string ucx_obstacle_;
  std::mutex lifetime_;  // start and close
  std::mutex loop_mutex_;
  std::unique_ptr<EventLoop> loop_;
  std::thread thread_;
  std::atomic<uint16_t> tcp_port_{0};
  bool is_bound_ = false;
  const pid_t owner_ = this_process();
};

}  // namespace kvxfer
