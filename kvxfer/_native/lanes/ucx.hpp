// UCX as one agent uses it: a loaded libucp, one context, and our own memory registered with it. Any thread may register
// memory; the worker that moves bytes (ucx_worker.hpp) is the IO thread's alone.
//
// The context has only the features RMA and WAKEUP. It sets some of UCX's options, unless the operator's environment has them
// (UCX_<NAME>):
//   TLS                        every transport but tcp: a process that reaches UCX's tcp port can read and write this process
//   PROTO_EMULATION_ENABLE=n   an emulated get is slower than our own `stream`; not set if TLS names tcp, which has no other get
//   RNDV_THRESH=inf, {POSIX,SYSV}_ERROR_HANDLING=y
//                              an endpoint on one host can be made in peer error mode: see docs/ucx.md
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "ucx_api.hpp"

namespace kvxfer {

struct UcxOptions {
  std::string library_path;  // of libucp.so.0; empty: no UCX in this process, nothing is loaded
  std::string tls;           // the transports of our context; empty: the environment's UCX_TLS, or every transport but tcp
};

class UcxContext;

// Own memory that peers may read (if it was registered so) and that reads may fill. Deregistered with its last owner: keep one as
// long as a read into it is in flight.
class UcxMemory {
 public:
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;
  ~UcxMemory();

  uint8_t* address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  bool is_readable() const { return is_readable_; }
  bool is_device() const { return is_device_; }  // never to be touched by the CPU
  ucp::Memory* handle() const { return handle_; }

 private:
  friend class UcxContext;
  UcxMemory(std::shared_ptr<UcxContext> context, uint8_t* address, uint64_t bytes, bool is_readable, bool is_device, ucp::Memory* handle)
      : context_(std::move(context)), address_(address), bytes_(bytes), is_readable_(is_readable), is_device_(is_device), handle_(handle) {}

  const std::shared_ptr<UcxContext> context_;
  uint8_t* const address_;
  const uint64_t bytes_;
  const bool is_readable_, is_device_;
  ucp::Memory* const handle_;
};

class UcxContext : public std::enable_shared_from_this<UcxContext> {
 public:
  // Throws Error(no_lane) with the reason.
  explicit UcxContext(const UcxOptions& options);
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;
  ~UcxContext();

  const ucp::UcxLibrary& library() const { return library_; }
  ucp::Context* handle() const { return handle_; }
  // False in a forked child: it has only a copy of memory, and the devices behind it are the parent's.
  bool is_mine() const { return owner_ == ::getpid(); }
  // Names as UCX has them (rc_mlx5, cuda_ipc, cma, ...), each once.
  const std::vector<std::string>& transports() const { return transports_; }
  bool has_rdma() const;
  bool has_cuda() const { return has_cuda_; }

  // From any thread. Pins the memory if a transport needs that, which takes time. `is_readable`: peers may read it. `is_device`: it
  // is device memory. UCX detects the kind of memory itself. Throws Error(no_lane), also if UCX takes device memory for host memory.
  std::shared_ptr<UcxMemory> add_memory(uint8_t* address, uint64_t bytes, bool is_readable, bool is_device = false);

 private:
  const ucp::UcxLibrary& library_;
  const pid_t owner_ = ::getpid();
  ucp::Context* handle_ = nullptr;
  std::vector<std::string> transports_;
  bool has_cuda_ = false;
};

}  // namespace kvxfer
