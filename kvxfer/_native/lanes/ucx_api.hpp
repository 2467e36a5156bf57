// The part of libucp that we call, declared here so that building needs no UCX, and bound at run time so that a process
// without a `ucx` lane never loads it. This file knows the library's ABI and nothing of what we do with it.
//
// Source of the layouts: ucp/api/ucp.h and ucp_def.h of UCX 1.22. UCP grows its structures at the end and tells by
// `field_mask` which fields the caller knows, so these hold for every 1.x from 1.13 on, which takes memory handles in
// requests. ucs_status_t is a packed enum: one signed byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "cuda_api.hpp"

namespace kvxfer::ucp {

using Status = int8_t;
constexpr unsigned kApiMinor = 13;  // the oldest 1.x that has all we use
constexpr Status kOk = 0, kInProgress = 1, kBusy = -15, kCanceled = -16, kConnectionReset = -25;

struct Config;
struct Context;
struct Worker;
struct Endpoint;
struct Memory;
struct RemoteKey;
struct Address;

// What *_nbx functions return: null (done), a request, or a status as a pointer.
using Request = void*;
inline bool is_error(Request r) { return reinterpret_cast<uintptr_t>(r) >= static_cast<uintptr_t>(intptr_t{-100}); }
inline bool is_pending(Request r) { return r != nullptr && !is_error(r); }
inline Status status_of(Request r) { return static_cast<Status>(reinterpret_cast<intptr_t>(r)); }

struct Params {  // ucp_params_t
  uint64_t field_mask, features;
  size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  uint64_t tag_sender_mask;
  int mt_workers_shared;
  size_t estimated_num_eps, estimated_num_ppn;
  const char* name;
  size_t node_local_id;
};
enum : uint64_t { kParamFeatures = 1 << 0, kParamMtWorkersShared = 1 << 5, kParamName = 1 << 8 };
enum : uint64_t { kFeatureRma = 1 << 1, kFeatureWakeup = 1 << 4 };

struct ContextAttributes {  // ucp_context_attr_t
  uint64_t field_mask;
  size_t request_size;
  int thread_mode;
  uint64_t memory_types;
  char name[32];
  size_t device_counter_size;
};
enum : uint64_t { kContextMemoryTypes = 1 << 2 };
enum : int { kHostMemory = 0, kCudaMemory = 1 };

struct WorkerParams {  // ucp_worker_params_t
  uint64_t field_mask;
  int thread_mode;
  uint64_t cpu_mask[1024 / 64];
  unsigned events;
  void* user_data;
  int event_fd;
  uint64_t flags;
  const char* name;
  size_t am_alignment;
  uint64_t client_id;
};
enum : uint64_t { kWorkerThreadMode = 1 << 0 };
enum : int { kThreadSerialized = 1 };

struct WorkerAttributes {  // ucp_worker_attr_t
  uint64_t field_mask;
  int thread_mode;
  uint32_t address_flags;
  Address* address;
  size_t address_length;
  size_t max_am_header;
  char name[32];
  size_t max_debug_string;
};
enum : uint64_t { kWorkerAddress = 1 << 1 };

struct EndpointParams {  // ucp_ep_params_t
  uint64_t field_mask;
  const Address* address;
  int err_mode;
  struct {
    void (*callback)(void* arg, Endpoint* endpoint, Status status);
    void* arg;
  } err_handler;
  void* user_data;
  unsigned flags;
  struct {
    const void* addr;
    uint32_t addrlen;
  } sockaddr;
  void* conn_request;
  const char* name;
  struct {
    const void* addr;
    uint32_t addrlen;
  } local_sockaddr;
};
enum : uint64_t { kEndpointAddress = 1 << 0, kEndpointErrorMode = 1 << 1, kEndpointErrorHandler = 1 << 2 };
enum : int { kErrorModePeer = 1 };

struct MapParams {  // ucp_mem_map_params_t
  uint64_t field_mask;
  void* address;
  size_t length;
  unsigned flags;
  unsigned prot;
  int memory_type;
  const void* exported_memh_buffer;
};
enum : uint64_t { kMapAddress = 1 << 0, kMapLength = 1 << 1, kMapFlags = 1 << 2, kMapProtection = 1 << 3 };
enum : unsigned { kLocalRead = 1 << 0, kLocalWrite = 1 << 1, kRemoteRead = 1 << 8 };

struct MemoryAttributes {  // ucp_mem_attr_t
  uint64_t field_mask;
  void* address;
  size_t length;
  int memory_type;
};
enum : uint64_t { kMemoryType = 1 << 2 };

struct RequestParam {  // ucp_request_param_t
  uint32_t op_attr_mask;
  uint32_t flags;
  void* request;
  void (*callback)(void* request, Status status, void* user_data);
  uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* recv_info;
  Memory* memory;
  uint64_t remote_datatype;  // from here on since 1.22, never read without its flag
  const void* remote;
  size_t remote_count;
};
enum : uint32_t {
  kOpCallback = 1u << 1,
  kOpUserData = 1u << 2,
  kOpFlags = 1u << 4,
  kOpMemory = 1u << 8,
  kOpMultiSend = 1u << 19,
};
enum : uint32_t { kCloseForce = 1 };

// A loaded libucp. Stays loaded for the lifetime of the process: UCX starts threads and patches memory functions, and does not
// survive being unloaded.
struct UcxLibrary {
  std::string path;
  unsigned major = 0, minor = 0;
  std::string version;

  const char* (*status_string)(Status) = nullptr;  // of libucs
  Status (*config_read)(const char* prefix, const char* file, Config**) = nullptr;
  void (*config_release)(Config*) = nullptr;
  Status (*config_modify)(Config*, const char* name, const char* value) = nullptr;
  Status (*init_version)(unsigned major, unsigned minor, const Params*, const Config*, Context**) = nullptr;
  void (*cleanup)(Context*) = nullptr;
  Status (*context_query)(Context*, ContextAttributes*) = nullptr;
  void (*context_print_info)(Context*, std::FILE*) = nullptr;
  Status (*worker_create)(Context*, const WorkerParams*, Worker**) = nullptr;
  void (*worker_destroy)(Worker*) = nullptr;
  Status (*worker_query)(Worker*, WorkerAttributes*) = nullptr;
  void (*worker_release_address)(Worker*, Address*) = nullptr;
  unsigned (*worker_progress)(Worker*) = nullptr;
  Status (*worker_get_efd)(Worker*, int*) = nullptr;
  Status (*worker_arm)(Worker*) = nullptr;
  Request (*worker_flush_nbx)(Worker*, const RequestParam*) = nullptr;
  Status (*ep_create)(Worker*, const EndpointParams*, Endpoint**) = nullptr;
  Request (*ep_close_nbx)(Endpoint*, const RequestParam*) = nullptr;
  Request (*ep_flush_nbx)(Endpoint*, const RequestParam*) = nullptr;
  void (*ep_print_info)(Endpoint*, std::FILE*) = nullptr;
  Status (*ep_rkey_unpack)(Endpoint*, const void* buffer, RemoteKey**) = nullptr;
  void (*rkey_destroy)(RemoteKey*) = nullptr;
  Status (*mem_map)(Context*, const MapParams*, Memory**) = nullptr;
  Status (*mem_unmap)(Context*, Memory*) = nullptr;
  Status (*mem_query)(Memory*, MemoryAttributes*) = nullptr;
  Status (*rkey_pack)(Context*, Memory*, void** buffer, size_t* size) = nullptr;
  void (*rkey_buffer_release)(void* buffer) = nullptr;
  Request (*get_nbx)(Endpoint*, void* buffer, size_t count, uint64_t remote, RemoteKey*, const RequestParam*) = nullptr;
  Status (*request_check_status)(void* request) = nullptr;
  void (*request_free)(void* request) = nullptr;
};

// Loads `path` once a process; a second call with another path gets the one that is loaded. Throws Error(no_lane): it cannot
// be loaded, its version is not 1.13 or a later 1.x, a function is missing.
const UcxLibrary& load(const std::string& path);

// While one exists, what UCX would print of this thread's calls (on standard output, by default) is kept instead: the last
// error's text tells why a call failed. Where the operator set UCX_LOG_LEVEL or UCX_LOG_FILE it is printed as well.
class Quiet {
 public:
  Quiet();
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
  ~Quiet();

  // Throws Error(no_lane): `what` failed with `status`, and what UCX said of it.
  [[noreturn]] void fail(const UcxLibrary& ucx, const std::string& what, Status status) const;
  const std::string& said() const { return said_; }

 private:
  friend struct Log;
  Quiet* const outer_;
  const cuda::RelaxedCapture relaxed_;  // UCX asks the driver of its copies, too
  std::string said_;
};

}  // namespace kvxfer::ucp
