// A stand-in for libcuda.so.1, for tests. Its "device memory" lies at addresses that nothing in the process can touch; only
// the copies below reach it, by another mapping of the same pages. Copies are done by a thread, some time after they were
// asked for and in the order of their streams, so a thread that reads bytes too early finds the wrong ones.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Result = int;
constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidContext = 201, kNotReady = 600, kLaunchFailed = 719, kCaptureUnsupported = 900;
constexpr int kGlobal = 0, kRelaxed = 2;  // modes of a thread
constexpr int kDevices = 2;

struct Memory {
  uint8_t* shadow;
  size_t bytes;
};
struct FakeEvent {
  uint64_t asked = 0, done = 0;
};
struct Task {
  std::function<bool()> may_run;
  std::function<void()> run;
  bool is_copy;
};
struct FakeStream {
  std::deque<Task> tasks;
  bool is_running = false;
};

// Never destroyed: the thread below uses them until the process is gone.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
std::map<uint64_t, Memory>& memories = *new std::map<uint64_t, Memory>;  // by the device's address
std::map<void*, size_t>& pinned = *new std::map<void*, size_t>;
std::list<FakeStream>& streams = *new std::list<FakeStream>;
std::list<FakeEvent>& events = *new std::list<FakeEvent>;
std::vector<void*>& retired = *new std::vector<void*>;  // pinned memory is not unmapped: a copy into it after its end is found, not hidden
int contexts[kDevices] = {};
int fail_copies = 0, fail_host_allocs = 0;
bool has_batch = true, is_held = false, is_lost = false;
bool is_capturing = false;                        // the engine captures a graph, in the global mode
int query_result = kSuccess, record_result = kSuccess;  // what is answered to these questions, whatever the truth is
int delay_us = 0;
uint64_t copies = 0, batches = 0, early = 0, violations = 0, broken_captures = 0;
thread_local std::vector<void*> current;
thread_local int capture_mode = kGlobal;

// Under the mutex. Whether a call that is unsafe during a capture is refused; it then breaks the capture, too.
bool breaks_capture() {
  if (!is_capturing || capture_mode == kRelaxed) return false;
  ++broken_captures;
  return true;
}

uint8_t* resolve(uint64_t address, size_t bytes) {
  auto found = memories.upper_bound(address);
  if (found != memories.begin()) {
    --found;
    if (address < found->first + found->second.bytes) {
      if (address + bytes > found->first + found->second.bytes) return nullptr;
      return found->second.shadow + (address - found->first);
    }
  }
  return reinterpret_cast<uint8_t*>(address);
}

void work() {
  std::unique_lock lock(mutex);
  for (;;) {
    FakeStream* ready = nullptr;
    for (FakeStream& stream : streams) {
      if (stream.tasks.empty() || (is_held && stream.tasks.front().is_copy) || !stream.tasks.front().may_run()) continue;
      ready = &stream;
      break;
    }
    if (ready == nullptr) {
      changed.wait(lock);
      continue;
    }
    Task task = std::move(ready->tasks.front());
    ready->tasks.pop_front();
    ready->is_running = true;
    if (task.is_copy && delay_us != 0) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      lock.lock();
    }
    lock.unlock();
    task.run();
    lock.lock();
    ready->is_running = false;
    changed.notify_all();
  }
}

void start() {
  static std::once_flag once;
  std::call_once(once, [] { std::thread(work).detach(); });
}

// Under the mutex.
Result put_locked(void* stream, Task task) {
  if (current.empty()) return kInvalidContext;
  if (is_lost) return kLaunchFailed;
  static_cast<FakeStream*>(stream)->tasks.push_back(std::move(task));
  changed.notify_all();
  return kSuccess;
}

Result put(void* stream, Task task) {
  std::lock_guard lock(mutex);
  return put_locked(stream, std::move(task));
}

bool always() { return true; }

void copy_now(const std::vector<uint64_t>& to, const std::vector<uint64_t>& from, const std::vector<size_t>& sizes) {
  std::lock_guard lock(mutex);
  for (size_t i = 0; i < to.size(); ++i) {
    uint8_t* const target = resolve(to[i], sizes[i]);
    uint8_t* const source = resolve(from[i], sizes[i]);
    if (target == nullptr || source == nullptr) {
      ++violations;
      continue;
    }
    std::memmove(target, source, sizes[i]);
    ++copies;
  }
}

}  // namespace

EXPORT Result cuInit(unsigned) {
  start();
  return kSuccess;
}
EXPORT Result cuDeviceGetCount(int* count) { return *count = kDevices, kSuccess; }
EXPORT Result cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}
EXPORT Result cuDevicePrimaryCtxRetain(void** context, int device) {
  std::lock_guard lock(mutex);
  ++contexts[device];
  *context = &contexts[device];
  return kSuccess;
}
EXPORT Result cuDevicePrimaryCtxRelease_v2(int device) {
  std::lock_guard lock(mutex);
  --contexts[device];
  return kSuccess;
}
EXPORT Result cuCtxPushCurrent_v2(void* context) { return current.push_back(context), kSuccess; }
EXPORT Result cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}
EXPORT Result cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  if (current.empty()) return kInvalidContext;
  std::lock_guard lock(mutex);
  if (breaks_capture()) return kCaptureUnsupported;
  if (fail_host_allocs != 0) return --fail_host_allocs, kOutOfMemory;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::memset(memory, 0xA5, bytes);
  pinned[memory] = bytes;
  *address = memory;
  return kSuccess;
}
EXPORT Result cuMemFreeHost(void* address) {
  std::lock_guard lock(mutex);
  if (breaks_capture()) return kCaptureUnsupported;
  if (pinned.erase(address) == 0) return ++violations, kInvalidValue;
  retired.push_back(address);
  return kSuccess;
}
EXPORT Result cuStreamCreate(void** stream, unsigned) {
  if (current.empty()) return kInvalidContext;
  std::lock_guard lock(mutex);
  streams.emplace_back();
  *stream = &streams.back();
  return kSuccess;
}
EXPORT Result cuStreamSynchronize(void* handle) {
  auto* const stream = static_cast<FakeStream*>(handle);
  std::unique_lock lock(mutex);
  if (is_lost) return kLaunchFailed;
  if (breaks_capture()) return kCaptureUnsupported;
  changed.wait(lock, [&] { return stream->tasks.empty() && !stream->is_running; });
  return kSuccess;
}
EXPORT Result cuStreamDestroy_v2(void* handle) {
  std::lock_guard lock(mutex);
  streams.remove_if([&](const FakeStream& stream) { return &stream == handle; });
  return kSuccess;
}
EXPORT Result cuEventCreate(void** event, unsigned) {
  std::lock_guard lock(mutex);
  events.emplace_back();
  *event = &events.back();
  return kSuccess;
}
EXPORT Result cuEventDestroy_v2(void* event) {
  std::lock_guard lock(mutex);
  events.remove_if([&](const FakeEvent& one) { return &one == event; });
  return kSuccess;
}
EXPORT Result cuEventRecord(void* handle, void* stream) {
  auto* const event = static_cast<FakeEvent*>(handle);
  std::lock_guard lock(mutex);
  if (record_result != kSuccess) return record_result;
  const auto reach = [event, number = event->asked + 1] {
    std::lock_guard lock(mutex);
    event->done = number;
  };
  const Result result = put_locked(stream, {always, reach, false});
  if (result == kSuccess) ++event->asked;  // one that was refused is not waited for
  return result;
}
EXPORT Result cuEventQuery(void* handle) {
  const auto* const event = static_cast<const FakeEvent*>(handle);
  std::lock_guard lock(mutex);
  if (is_lost) return kLaunchFailed;
  if (breaks_capture()) return kCaptureUnsupported;
  if (query_result != kSuccess) return query_result;
  return event->done == event->asked ? kSuccess : (++early, kNotReady);
}
EXPORT Result cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  auto* const event = static_cast<FakeEvent*>(handle);
  uint64_t number;
  {
    std::lock_guard lock(mutex);
    number = event->asked;
  }
  return put(stream, {[event, number] { return event->done >= number; }, [] {}, false});
}
EXPORT Result cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return put(stream, {always, [function, data] { function(data); }, false});
}
EXPORT Result cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  {
    std::lock_guard lock(mutex);
    if (fail_copies != 0) return --fail_copies, kOutOfMemory;  // nothing is lost
  }
  return put(stream, {always, [=] { copy_now({to}, {from}, {bytes}); }, true});
}
EXPORT Result cuMemcpyBatchAsync(uint64_t* to, uint64_t* from, size_t* sizes, size_t count, void*, size_t*, size_t, size_t*, void* stream) {
  {
    std::lock_guard lock(mutex);
    if (!has_batch) return kInvalidValue;
    if (fail_copies != 0) return --fail_copies, kOutOfMemory;  // nothing is lost
    ++batches;
  }
  const std::vector<uint64_t> targets(to, to + count), sources(from, from + count);
  const std::vector<size_t> lengths(sizes, sizes + count);
  return put(stream, {always, [=] { copy_now(targets, sources, lengths); }, true});
}
EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
  if (current.empty()) return kInvalidContext;
  std::swap(*mode, capture_mode);
  return kSuccess;
}
EXPORT Result cuGetErrorString(Result result, const char** text) {
  *text = result == kCaptureUnsupported ? "operation not permitted when stream is capturing"
          : result == kLaunchFailed ? "unspecified launch failure" : result == kOutOfMemory ? "out of memory" : "invalid argument";
  return kSuccess;
}

// --- what tests say and ask ---

EXPORT uint64_t fake_alloc(size_t bytes) {
  const int file = ::memfd_create("device", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) return 0;
  void* const address = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
  void* const shadow = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  std::lock_guard lock(mutex);
  memories[reinterpret_cast<uint64_t>(address)] = {static_cast<uint8_t*>(shadow), bytes};
  return reinterpret_cast<uint64_t>(address);
}
EXPORT void* fake_shadow(uint64_t address) {
  std::lock_guard lock(mutex);
  return memories.at(address).shadow;
}
EXPORT void fake_set(int delay, int batch, int held, int failing_copies, int failing_allocs, int lost) {
  std::lock_guard lock(mutex);
  delay_us = delay;
  has_batch = batch != 0;
  is_held = held != 0;
  fail_copies = failing_copies;
  fail_host_allocs = failing_allocs;
  is_lost = lost != 0;
  changed.notify_all();
}
EXPORT void fake_capture(int capturing, int result_of_query, int result_of_record) {
  std::lock_guard lock(mutex);
  is_capturing = capturing != 0;
  query_result = result_of_query;
  record_result = result_of_record;
}
EXPORT int fake_capture_mode() { return capture_mode; }  // of the calling thread
// 0 copies, 1 batches, 2 questions that came before the end, 3 violations, 4 pinned areas, 5 contexts held, 6 copies waiting, 7 captures broken
EXPORT uint64_t fake_count(int which) {
  std::lock_guard lock(mutex);
  uint64_t waiting = 0;
  for (const FakeStream& stream : streams) {
    for (const Task& task : stream.tasks) waiting += task.is_copy;
  }
  const uint64_t counts[] = {copies, batches, early, violations, pinned.size(), static_cast<uint64_t>(contexts[0] + contexts[1]), waiting, broken_captures};
  return counts[which];
}
