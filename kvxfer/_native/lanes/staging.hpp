// Pinned host memory between a device and a socket: the stream lane sends from it what was gathered on the device, and reads into
// it what is then scattered there. Copies run on the device's own time; an event descriptor tells when one has ended. Only then is
// its buffer read, reused, or reported as landed.
//
// Only the thread that runs the IO loop touches it. It knows buffers and copies, and nothing of grants: for each gather the caller
// supplies a number, and settle() returns that number when the copy has ended.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory/fd.hpp"
#include "memory/pool.hpp"
#include "cuda_api.hpp"

namespace kvxfer {

struct IncomingBlocks;
class StagingDevice;

// One buffer of pinned memory, with the event of its last copy.
struct StagingBuffer {
  uint8_t* data = nullptr;
  cuda::Event event = nullptr;
  cuda::Stream stream = nullptr;  // of its last copy
  size_t bytes = 0;       // bytes of it in use
  uint64_t number = 0;    // of the gather that fills it; 0: none
  bool is_in_flight = false;
  bool is_marked = false; // its event was recorded after its last copy: until then the event says nothing of it
  bool is_left = false;   // unused by any walk: it is free once it is not in flight
  std::string failure;    // the driver's result of its copy; empty: none
  Code failure_code = Code::transport;
};

// The transfers that ended while bytes of them were still being scattered.
struct StoppedLanding {
  std::unique_ptr<IncomingBlocks> landing;
  Code code;
  std::string text;
};

class Staging {
 public:
  static constexpr size_t kBufferBytes = 256 << 10;

  Staging();  // throws Error(limit_exceeded)
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  int fd() const { return wake_fd_.get(); }  // readable: call woken(), then settle()
  void woken();
  bool is_used() const { return !devices_.empty(); }
  bool is_busy() const { return in_flight_ != 0 || !stopped_.empty() || !unbegun_.empty(); }
  // Finds the copies that have ended; returns the numbers of the gathers among them.
  std::vector<uint64_t> settle();
  // Waits until all have ended, or `until`: then is_busy() still.
  std::vector<uint64_t> finish(Nanos until);
  // `landing` has ended once nothing of it is in flight: then take_stopped() returns it.
  void stop_later(std::unique_ptr<IncomingBlocks> landing, Code code, const std::string& text);
  std::vector<StoppedLanding> take_stopped();

 private:
  friend class Gather;
  friend class Scatter;
  friend class StagingDevice;
  StagingDevice& device(const std::shared_ptr<cuda::Context>& context);

  Fd wake_fd_;
  size_t in_flight_ = 0;
  std::map<int, std::unique_ptr<StagingDevice>> devices_;
  std::vector<uint64_t> unbegun_;  // numbers of gathers that the driver refused
  std::vector<StoppedLanding> stopped_;
};

// The parts of such memory that are the host's: no driver touches those, because its own loads and stores would trust that they are
// mapped.
class HostParts {
 public:
  explicit HostParts(const OwnMemory& memory);
  bool has(const uint8_t* at) const;

 private:
  std::vector<std::pair<const uint8_t*, const uint8_t*>> parts_;  // ascending
};

// The bytes of some blocks on their way from a device into pinned memory, some buffers ahead of the sender.
class Gather {
 public:
  // Memory and extent must stay where they are.
  Gather(Staging& staging, const OwnMemory& memory, const Extent& extent, uint64_t bytes);
  Gather(const Gather&) = delete;
  Gather& operator=(const Gather&) = delete;
  ~Gather();

  // Begins as many copies as there is room for; `begin` gives each its number, 0 if it must not begin. Throws Error: transport,
  // memory_gone (of the host's parts).
  void fill(const std::function<uint64_t()>& begin);
  bool is_waiting() const { return !buffers_.empty() && buffers_.front()->is_in_flight; }
  // The next bytes to send. Throws Error: transport, memory_gone (of the device).
  std::pair<const uint8_t*, size_t> front() const;
  void sent(size_t bytes);

 private:
  Staging& staging_;
  const std::shared_ptr<cuda::Context> context_;
  const Layout& layout_;
  const Extent& extent_;
  const HostParts host_;
  BlockWalk walk_;
  const uint64_t bytes_;
  uint64_t left_;  // not yet requested from the device
  std::deque<StagingBuffer*> buffers_;
  size_t at_ = 0;  // sent of the first of them
};

// The other direction. Bytes count as scattered only after the event of their copy.
class Scatter {
 public:
  Scatter(Staging& staging, const OwnMemory& memory, const Extent& extent, uint64_t bytes);
  Scatter(const Scatter&) = delete;
  Scatter& operator=(const Scatter&) = delete;
  ~Scatter();

  // Room for the next bytes, at most `max`; none if every buffer is in use. Throws Error: transport, memory_gone.
  iovec room(size_t max);
  // `bytes` came into that room. Throws Error: transport, memory_gone.
  void filled(size_t bytes);
  // Whether every byte is in the blocks. Throws Error(transport, memory_gone) if the driver failed for some.
  bool is_done();
  bool is_in_flight() const;

 private:
  void forget_done();

  Staging& staging_;
  const std::shared_ptr<cuda::Context> context_;
  const Layout& layout_;
  const Extent& extent_;
  const HostParts host_;
  BlockWalk walk_;
  const uint64_t bytes_;
  uint64_t left_;  // not yet received
  StagingBuffer* filling_ = nullptr;
  std::deque<StagingBuffer*> buffers_;  // on their way to the device
};

}  // namespace kvxfer
