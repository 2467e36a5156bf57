#include "cuda_api.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

#include "machines/codes.hpp"

namespace kvxfer::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kVariable = "KVXFER_CUDA_LIBRARY";

template <class Function>
void find(void* library, const char* name, Function& to) {
  to = reinterpret_cast<Function>(::dlsym(library, name));
  if (to == nullptr) throw Error(Code::no_lane, std::string("the CUDA driver has no ") + name);
}

std::unique_ptr<CudaLibrary> open() {
  const char* named = std::getenv(kVariable);
  void* const handle = ::dlopen(named != nullptr && *named != '\0' ? named : kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw Error(Code::no_lane, "cannot load the CUDA driver: " + std::string(why == nullptr ? kLibrary : why));
  }
  auto library = std::make_unique<CudaLibrary>();
  CudaLibrary& l = *library;
  find(handle, "cuInit", l.init);
  find(handle, "cuDeviceGetCount", l.device_count);
  find(handle, "cuDeviceGet", l.device_get);
  find(handle, "cuDevicePrimaryCtxRetain", l.context_retain);
  find(handle, "cuDevicePrimaryCtxRelease_v2", l.context_release);
  find(handle, "cuCtxPushCurrent_v2", l.context_push);
  find(handle, "cuCtxPopCurrent_v2", l.context_pop);
  find(handle, "cuMemHostAlloc", l.host_alloc);
  find(handle, "cuMemFreeHost", l.host_free);
  find(handle, "cuStreamCreate", l.stream_create);
  find(handle, "cuStreamDestroy_v2", l.stream_destroy);
  find(handle, "cuStreamSynchronize", l.stream_synchronize);
  find(handle, "cuStreamWaitEvent", l.stream_wait_event);
  find(handle, "cuMemcpyAsync", l.copy);
  find(handle, "cuEventCreate", l.event_create);
  find(handle, "cuEventDestroy_v2", l.event_destroy);
  find(handle, "cuEventRecord", l.event_record);
  find(handle, "cuEventQuery", l.event_query);
  find(handle, "cuLaunchHostFunc", l.launch_host);
  find(handle, "cuGetErrorString", l.error_string);
  l.copy_batch = reinterpret_cast<decltype(l.copy_batch)>(::dlsym(handle, "cuMemcpyBatchAsync"));
  if (const Result result = l.init(0); result != kSuccess) throw Error(Code::no_lane, "the CUDA driver does not start: " + l.text(result));
  return library;
}

}  // namespace

std::string CudaLibrary::text(Result result) const {
  const char* text = nullptr;
  if (error_string(result, &text) != kSuccess || text == nullptr) return "error " + std::to_string(result);
  return text;
}

const CudaLibrary& load() {
  static std::mutex mutex;
  static std::unique_ptr<CudaLibrary> loaded;
  std::lock_guard lock(mutex);
  if (!loaded) loaded = open();
  return *loaded;
}

std::shared_ptr<Context> Context::of(int device) { return std::make_shared<Context>(load(), device); }

Context::Context(const CudaLibrary& library, int device) : library_(library), device_(device) {
  int count = 0;
  Result result = library_.device_count(&count);
  if (result == kSuccess && (device < 0 || device >= count)) {
    throw Error(Code::no_lane, "there is no CUDA device " + std::to_string(device) + ": this process sees " + std::to_string(count));
  }
  if (result == kSuccess) result = library_.device_get(&handle_, device);
  if (result == kSuccess) result = library_.context_retain(&context_, handle_);
  if (result != kSuccess) throw Error(Code::no_lane, "CUDA device " + std::to_string(device) + " cannot be used: " + library_.text(result));
}

Context::~Context() { library_.context_release(handle_); }

void Context::check(Result result, const char* what) const {
  if (result != kSuccess) throw Error(Code::transport, std::string("CUDA: ") + what + ": " + library_.text(result));
}

Context::Current::Current(const Context& context) : context_(context) {
  context.check(context.library_.context_push(context.context_), "the device's context");
}

Context::Current::~Current() {
  void* ignored = nullptr;
  context_.library_.context_pop(&ignored);
}

}  // namespace kvxfer::cuda
