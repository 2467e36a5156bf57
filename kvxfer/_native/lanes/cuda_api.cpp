#include "cuda_api.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>

#include "machines/codes.hpp"

namespace kvxfer::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kVariable = "KVXFER_CUDA_LIBRARY";
constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

std::atomic<const CudaLibrary*> in_use{nullptr};

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
  find(handle, "cuThreadExchangeStreamCaptureMode", l.exchange_capture_mode);
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

bool is_lost(Result result) {
  // Deinitialized, a context that is invalid or destroyed, errors of the hardware, and what kills a context: bad addresses,
  // instructions, launches.
  constexpr Result kLost[] = {4, 201, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719};
  return std::find(std::begin(kLost), std::end(kLost), result) != std::end(kLost);
}

const CudaLibrary& load() {
  static std::mutex mutex;
  static std::unique_ptr<CudaLibrary> loaded;
  std::lock_guard lock(mutex);
  if (!loaded) loaded = open();
  in_use = loaded.get();
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
  if (result == kSuccess) return;
  throw Error(is_lost(result) ? Code::memory_gone : Code::transport, std::string("CUDA: ") + what + ": " + library_.text(result));
}

RelaxedCapture::RelaxedCapture() noexcept : library_(in_use), mode_(kRelaxed) {
  // A driver that refuses is one that refuses what is asked next, too: those results are judged.
  if (library_ != nullptr && library_->exchange_capture_mode(&mode_) != kSuccess) library_ = nullptr;
}

RelaxedCapture::~RelaxedCapture() {
  if (library_ != nullptr) library_->exchange_capture_mode(&mode_);
}

void Context::Current::enter(Result& result) {
  result = context_.library_.context_push(context_.context_);
  if (result == kSuccess) relaxed_.emplace();
}

Context::Current::Current(const Context& context, Result& result) noexcept : context_(context) { enter(result); }

Context::Current::Current(const Context& context) : context_(context) {
  Result result = kSuccess;
  enter(result);
  context.check(result, "the device's context");
}

Context::Current::~Current() {
  if (!relaxed_) return;
  relaxed_.reset();
  void* ignored = nullptr;
  context_.library_.context_pop(&ignored);
}

}  // namespace kvxfer::cuda
