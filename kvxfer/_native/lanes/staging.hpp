// Pinned host memory between a device and a socket: the stream lane sends out of it what was gathered on the device, and
// reads into it what is then scattered there. Copies run on the device's own time; an event descriptor tells when one of
// them is over, and a buffer is only looked at, used again or said to have landed after that.
//
// Whoever drives the IO loop touches it, one thread at a time. It knows buffers and copies, and nothing of grants: who
// gathers asks for each copy a number of the caller, and settle() gives it back when that copy is over.
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

// One element of pinned memory, with the event of its last copy.
struct StagingBuffer {
  uint8_t* data = nullptr;
  cuda::Event event = nullptr;
  size_t bytes = 0;       // of it that hold something
  uint64_t number = 0;    // of the gather that fills it; 0: none
  bool is_in_flight = false;
  bool is_left = false;   // nobody waits for it: it is free once it is not in flight
  std::string failure;    // what the driver said of its copy
};

// Which transfers' landings ended while bytes of them were still being scattered.
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
  // Finds out which copies are over; the numbers of the gathers among them.
  std::vector<uint64_t> settle();
  // Waits until all are, or `until`: then is_busy() still.
  std::vector<uint64_t> finish(Nanos until);
  // `landing` is over as soon as nothing of it is in flight: then take_stopped() gives it back.
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

// Which parts of such memory are the host's: no driver touches those, whose own loads and stores would trust that they are there.
class HostParts {
 public:
  explicit HostParts(const OwnMemory& memory);
  bool has(const uint8_t* at) const;

 private:
  std::vector<std::pair<const uint8_t*, const uint8_t*>> parts_;  // ascending
};

// The bytes of some blocks on their way from a device into pinned memory, some buffers ahead of who sends them.
class Gather {
 public:
  // Memory and extent must stay where they are.
  Gather(Staging& staging, const OwnMemory& memory, const Extent& extent, uint64_t bytes);
  Gather(const Gather&) = delete;
  Gather& operator=(const Gather&) = delete;
  ~Gather();

  // Begins what copies there is room for; `begin` gives each its number, 0 where it must not begin. Throws Error: transport,
  // memory_gone (of the host's parts).
  void fill(const std::function<uint64_t()>& begin);
  bool is_waiting() const { return !buffers_.empty() && buffers_.front()->is_in_flight; }
  // What is there to be sent next. Throws Error(transport).
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
  uint64_t left_;  // not yet asked of the device
  std::deque<StagingBuffer*> buffers_;
  size_t at_ = 0;  // sent of the first of them
};

// The other way. Bytes are said to be scattered only after the event of their copy.
class Scatter {
 public:
  Scatter(Staging& staging, const OwnMemory& memory, const Extent& extent, uint64_t bytes);
  Scatter(const Scatter&) = delete;
  Scatter& operator=(const Scatter&) = delete;
  ~Scatter();

  // Room for what comes next, at most `max` bytes of it; none where every buffer is in use. Throws Error(transport).
  iovec room(size_t max);
  // `bytes` came into that room. Throws Error: transport, memory_gone.
  void filled(size_t bytes);
  // Whether every byte is in the blocks. Throws Error(transport) where the driver gave up on some.
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
  uint64_t left_;  // not yet come
  StagingBuffer* filling_ = nullptr;
  std::deque<StagingBuffer*> buffers_;  // on their way to the device
};

}  // namespace kvxfer
