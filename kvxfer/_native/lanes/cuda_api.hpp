// The few functions of the CUDA driver that device memory needs, from a libcuda that is loaded at run time: none is linked, and a
// process without device memory never loads it. KVXFER_CUDA_LIBRARY names another file than libcuda.so.1.
//
// Knows contexts, and nothing of blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

namespace kvxfer::cuda {

using Result = int;
using Stream = void*;
using Event = void*;
using Address = unsigned long long;
using HostFunction = void (*)(void*);

constexpr Result kSuccess = 0, kNotReady = 600;
constexpr Result kCaptureFirst = 900, kCaptureLast = 908;  // the driver's refusals while a stream is being captured into a graph

// A refusal says nothing of the work that was asked about: it may still run.
constexpr bool is_of_capture(Result result) { return result >= kCaptureFirst && result <= kCaptureLast; }
// Whether the context has failed for good, with all its memory: every later call gets the same result.
bool is_lost(Result result);

struct Location {
  int type = 0, id = 0;
};
struct CopyAttributes {  // CUmemcpyAttributes
  int source_access = 1;  // in the order of the stream
  Location source_hint, target_hint;
  unsigned flags = 0;
};

struct CudaLibrary {
  Result (*init)(unsigned);
  Result (*device_count)(int*);
  Result (*device_get)(int*, int);
  Result (*context_retain)(void**, int);
  Result (*context_release)(int);
  Result (*context_push)(void*);
  Result (*context_pop)(void**);
  Result (*host_alloc)(void**, size_t, unsigned);
  Result (*host_free)(void*);
  Result (*stream_create)(Stream*, unsigned);
  Result (*stream_destroy)(Stream);
  Result (*stream_synchronize)(Stream);
  Result (*stream_wait_event)(Stream, Event, unsigned);
  Result (*copy)(Address to, Address from, size_t, Stream);
  // Null where the driver is older than 12.8.
  Result (*copy_batch)(Address* to, Address* from, size_t* sizes, size_t count, CopyAttributes*, size_t*, size_t, size_t* failed, Stream);
  Result (*event_create)(Event*, unsigned);
  Result (*event_destroy)(Event);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*launch_host)(Stream, HostFunction, void*);
  Result (*exchange_capture_mode)(int*);  // of the calling thread
  Result (*error_string)(Result, const char**);

  std::string text(Result result) const;
};

// Once a process; a failure is not remembered. Throws Error(no_lane).
const CudaLibrary& load();

// While one exists, the calling thread may ask the driver anything although another thread, the engine's, captures a graph: in the
// mode that a thread begins with, such a question is refused, and breaks that capture. Does nothing before load() has succeeded.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  const CudaLibrary* library_;  // null: the mode is as it was
  int mode_;                    // to be set, then the one before
};

// The primary context of one device, which the process's own CUDA code uses. Immutable: any thread may use it.
class Context {
 public:
  // Throws Error(no_lane): no driver, or no such device.
  static std::shared_ptr<Context> of(int device);
  Context(const CudaLibrary& library, int device);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  const CudaLibrary& library() const { return library_; }
  int device() const { return device_; }
  // Throws Error with what the driver says unless `result` is success: memory_gone if the context is lost, else transport.
  void check(Result result, const char* what) const;

  // Makes it the calling thread's context while this object exists, in the relaxed mode of captures.
  class Current {
   public:
    explicit Current(const Context& context);  // throws what check() throws
    Current(const Context& context, Result& result) noexcept;
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current();

   private:
    void enter(Result& result);

    const Context& context_;
    std::optional<RelaxedCapture> relaxed_;  // none: the driver refused the context
  };

 private:
  const CudaLibrary& library_;
  const int device_;
  int handle_ = 0;  // CUdevice
  void* context_ = nullptr;
};

}  // namespace kvxfer::cuda
