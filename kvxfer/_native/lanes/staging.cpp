#include "staging.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "memory/clock.hpp"
#include "owner_memory.hpp"
#include "stream.hpp"

namespace kvxfer {
namespace {

constexpr size_t kAheadMax = 4;            // buffers of one DATA frame at a time
constexpr size_t kBuffersMax = 64;         // of a device; beyond that every frame still gets one
constexpr size_t kBuffersASlab = 4;
constexpr unsigned kPortable = 1, kNonBlocking = 1, kDisableTiming = 2;
constexpr int kFinishPollMs = 5;

enum class Direction { FromDevice, ToDevice };

// `whose`: "source" or "destination".
[[noreturn]] void refuse(const StagingBuffer& buffer, const char* whose) {
  if (buffer.failure_code != Code::memory_gone) throw Error(buffer.failure_code, buffer.failure);
  throw Error(Code::memory_gone, std::string("the ") + whose + "'s memory is on a device that failed: " + buffer.failure);
}

void ring(void* fd) { ::eventfd_write(*static_cast<const int*>(fd), 1); }

}  // namespace

// One core's objects on one device: two streams of copies, one that only signals their ends, and the buffers.
class StagingDevice {
 public:
  StagingDevice(Staging& staging, std::shared_ptr<cuda::Context> context) : staging_(staging), context_(std::move(context)), wake_fd_(staging.fd()) {}
  StagingDevice(const StagingDevice&) = delete;
  StagingDevice& operator=(const StagingDevice&) = delete;
  ~StagingDevice();

  // Null if the limit is in use. `is_first`: for a frame without a buffer.
  StagingBuffer* take(bool is_first);
  void give(StagingBuffer* buffer);
  // Copies between the next `buffer.bytes` of `walk` and the buffer, in `direction`; moves past them. Returns how many there were
  // before the first byte that the host no longer has: then no copy was begun.
  size_t copy(StagingBuffer& buffer, BlockWalk& walk, const HostParts& host, Direction direction);
  // Appends the numbers of the gathers that have ended.
  void settle(std::vector<uint64_t>& numbers);
  size_t in_flight() const { return in_flight_.size(); }

 private:
  cuda::Stream stream(cuda::Stream& stream);
  void add_slab();
  void issue(cuda::Stream stream);
  void ring_after(const StagingBuffer& buffer);
  bool is_over(StagingBuffer& buffer);
  void fail(StagingBuffer& buffer, const char* what, cuda::Result result) const;

  Staging& staging_;
  const std::shared_ptr<cuda::Context> context_;
  const int wake_fd_;  // the driver's thread reads it, so its address must not change
  cuda::Stream gathers_ = nullptr, scatters_ = nullptr, rings_ = nullptr;
  std::vector<void*> slabs_;
  std::deque<StagingBuffer> buffers_;
  std::vector<StagingBuffer*> free_, in_flight_;
  std::vector<cuda::Address> to_, from_;
  std::vector<size_t> sizes_;
  bool has_batch_ = true;
};

StagingDevice::~StagingDevice() {
  const cuda::CudaLibrary& driver = context_->library();
  cuda::Result result = cuda::kSuccess;
  const cuda::Context::Current current(*context_, result);
  if (result != cuda::kSuccess) return;  // the context is gone, with all its objects
  bool has_ended = true;
  for (const cuda::Stream stream : {gathers_, scatters_, rings_}) {
    if (stream != nullptr && driver.stream_synchronize(stream) != cuda::kSuccess) has_ended = false;  // the last ring, too
  }
  if (!has_ended) return;  // what may still be written stays
  for (const cuda::Stream stream : {gathers_, scatters_, rings_}) {
    if (stream != nullptr) driver.stream_destroy(stream);
  }
  for (const StagingBuffer& buffer : buffers_) driver.event_destroy(buffer.event);
  for (void* slab : slabs_) driver.host_free(slab);
}

cuda::Stream StagingDevice::stream(cuda::Stream& stream) {
  if (stream == nullptr) context_->check(context_->library().stream_create(&stream, kNonBlocking), "a stream");
  return stream;
}

void StagingDevice::add_slab() {
  const cuda::CudaLibrary& driver = context_->library();
  const cuda::Context::Current current(*context_);
  void* slab = nullptr;
  context_->check(driver.host_alloc(&slab, kBuffersASlab * Staging::kBufferBytes, kPortable), "pinned memory");
  slabs_.push_back(slab);
  for (size_t i = 0; i < kBuffersASlab; ++i) {
    StagingBuffer buffer;
    buffer.data = static_cast<uint8_t*>(slab) + i * Staging::kBufferBytes;
    context_->check(driver.event_create(&buffer.event, kDisableTiming), "an event");
    buffers_.push_back(std::move(buffer));
    free_.push_back(&buffers_.back());
  }
}

StagingBuffer* StagingDevice::take(bool is_first) {
  if (free_.empty()) {
    if (!is_first && buffers_.size() >= kBuffersMax) return nullptr;
    add_slab();
  }
  StagingBuffer* const buffer = free_.back();
  free_.pop_back();
  buffer->bytes = 0;
  buffer->number = 0;
  buffer->is_left = false;
  buffer->failure.clear();
  buffer->failure_code = Code::transport;
  return buffer;
}

void StagingDevice::give(StagingBuffer* buffer) {
  if (buffer->is_in_flight) {
    buffer->is_left = true;
  } else {
    free_.push_back(buffer);
  }
}

size_t StagingDevice::copy(StagingBuffer& buffer, BlockWalk& walk, const HostParts& host, Direction direction) {
  const cuda::Context::Current current(*context_);
  const cuda::CudaLibrary& driver = context_->library();
  const cuda::Stream copies = stream(direction == Direction::FromDevice ? gathers_ : scatters_);
  stream(rings_);
  to_.clear();
  from_.clear();
  sizes_.clear();
  for (size_t at = 0; at < buffer.bytes;) {
    const BlockWalk::Span span = walk.take(buffer.bytes - at);
    if (span.size == 0) throw Error(Code::internal, "a copy longer than its blocks");
    if (host.has(span.data)) {
      const iovec run{span.data, span.size};
      uint8_t* const staged = buffer.data + at;
      const size_t done = direction == Direction::FromDevice ? copy_from_owner(staged, &run, 1) : copy_to_owner(&run, 1, staged);
      at += done;
      if (done != span.size) return at;
      continue;
    }
    const auto device = reinterpret_cast<cuda::Address>(span.data), staged = reinterpret_cast<cuda::Address>(buffer.data + at);
    from_.push_back(direction == Direction::FromDevice ? device : staged);
    to_.push_back(direction == Direction::FromDevice ? staged : device);
    sizes_.push_back(span.size);
    at += span.size;
  }
  buffer.is_in_flight = true;  // from here on, whatever fails: some copies may have begun
  in_flight_.push_back(&buffer);
  ++staging_.in_flight_;
  try {
    issue(copies);
  } catch (const Error& error) {
    buffer.failure = error.what();
    buffer.failure_code = error.code();
  }
  buffer.stream = copies;
  buffer.is_marked = driver.event_record(buffer.event, copies) == cuda::kSuccess;
  if (buffer.is_marked) ring_after(buffer);
  if (!buffer.failure.empty()) refuse(buffer, direction == Direction::FromDevice ? "source" : "destination");
  return buffer.bytes;
}

// Where the driver refuses it, nothing signals the end; the loop looks again in any case while a copy is in flight.
void StagingDevice::ring_after(const StagingBuffer& buffer) {
  const cuda::CudaLibrary& driver = context_->library();
  if (driver.stream_wait_event(rings_, buffer.event, 0) == cuda::kSuccess) driver.launch_host(rings_, &ring, const_cast<int*>(&wake_fd_));
}

void StagingDevice::issue(cuda::Stream stream) {
  const cuda::CudaLibrary& driver = context_->library();
  if (has_batch_ && driver.copy_batch != nullptr && sizes_.size() > 1) {
    cuda::CopyAttributes attributes;
    size_t first = 0, failed = 0;
    const cuda::Result result =
        driver.copy_batch(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes, &first, 1, &failed, stream);
    if (result == cuda::kSuccess) return;
    has_batch_ = cuda::is_of_capture(result);  // copies that have begun are repeated, with the same bytes
  }
  for (size_t i = 0; i < sizes_.size(); ++i) context_->check(driver.copy(to_[i], from_[i], sizes_[i], stream), "a copy");
}

// Whether the last copy of a buffer has ended, well or not. Only the driver's word for it counts: while the engine captures a graph,
// a question can be refused, and the copy runs on.
bool StagingDevice::is_over(StagingBuffer& buffer) {
  const cuda::CudaLibrary& driver = context_->library();
  cuda::Result result = cuda::kSuccess;
  if (!buffer.is_marked) {
    result = driver.event_record(buffer.event, buffer.stream);
    buffer.is_marked = result == cuda::kSuccess;
  }
  if (result == cuda::kSuccess) result = driver.event_query(buffer.event);
  if (result == cuda::kSuccess) return true;
  if (result == cuda::kNotReady || cuda::is_of_capture(result)) return false;
  // Mostly the context is lost, and nothing lands any more. Where that is not so, the stream runs dry before this returns.
  const cuda::Result dry = driver.stream_synchronize(buffer.stream);
  if (cuda::is_of_capture(dry)) return false;
  fail(buffer, "a copy", result);
  return true;
}

void StagingDevice::fail(StagingBuffer& buffer, const char* what, cuda::Result result) const {
  if (!buffer.failure.empty()) return;
  buffer.failure = std::string("CUDA: ") + what + ": " + context_->library().text(result);
  buffer.failure_code = Code::memory_gone;
}

void StagingDevice::settle(std::vector<uint64_t>& numbers) {
  if (in_flight_.empty()) return;
  cuda::Result entered = cuda::kSuccess;
  const cuda::Context::Current current(*context_, entered);
  if (cuda::is_of_capture(entered)) return;
  const auto leaves = [&](StagingBuffer* buffer) {
    // A context that cannot be entered was destroyed, with its copies.
    if (entered == cuda::kSuccess && !is_over(*buffer)) return false;
    if (entered != cuda::kSuccess) fail(*buffer, "the device's context", entered);
    buffer->is_in_flight = false;
    --staging_.in_flight_;
    if (buffer->number != 0) numbers.push_back(std::exchange(buffer->number, 0));
    if (buffer->is_left) free_.push_back(buffer);
    return true;
  };
  in_flight_.erase(std::remove_if(in_flight_.begin(), in_flight_.end(), leaves), in_flight_.end());
}

Staging::Staging() : wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_fd_) fail_errno(Code::limit_exceeded, "eventfd");
}

Staging::~Staging() {
  stopped_.clear();
  devices_.clear();
}

void Staging::woken() {
  eventfd_t ignored;
  ::eventfd_read(wake_fd_.get(), &ignored);
}

StagingDevice& Staging::device(const std::shared_ptr<cuda::Context>& context) {
  std::unique_ptr<StagingDevice>& slot = devices_[context->device()];
  if (!slot) slot = std::make_unique<StagingDevice>(*this, context);
  return *slot;
}

std::vector<uint64_t> Staging::settle() {
  std::vector<uint64_t> numbers = std::exchange(unbegun_, {});
  for (auto& [_, device] : devices_) device->settle(numbers);
  return numbers;
}

std::vector<uint64_t> Staging::finish(Nanos until) {
  std::vector<uint64_t> numbers = settle();
  while (in_flight_ != 0 && monotonic_now() < until) {
    pollfd wake{wake_fd_.get(), POLLIN, 0};
    ::poll(&wake, 1, kFinishPollMs);
    woken();
    const std::vector<uint64_t> more = settle();
    numbers.insert(numbers.end(), more.begin(), more.end());
  }
  return numbers;
}

void Staging::stop_later(std::unique_ptr<IncomingBlocks> landing, Code code, const std::string& text) {
  stopped_.push_back({std::move(landing), code, text});
}

std::vector<StoppedLanding> Staging::take_stopped() {
  std::vector<StoppedLanding> over;
  for (size_t i = 0; i < stopped_.size();) {
    if (stopped_[i].landing->is_in_flight()) {
      ++i;
      continue;
    }
    over.push_back(std::move(stopped_[i]));
    stopped_.erase(stopped_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return over;
}

HostParts::HostParts(const OwnMemory& memory) {
  for (const auto& region : memory.regions) {
    if (region->device == nullptr) parts_.emplace_back(region->base, region->base + region->info.bytes);
  }
  std::sort(parts_.begin(), parts_.end());
}

bool HostParts::has(const uint8_t* at) const {
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), at, [](const uint8_t* value, const auto& part) { return value < part.first; });
  return after != parts_.begin() && at < std::prev(after)->second;
}

Gather::Gather(Staging& staging, const OwnMemory& memory, const Extent& extent, uint64_t bytes)
    : staging_(staging), context_(memory.device), layout_(*memory.layout), extent_(extent), host_(memory), walk_(layout_, extent), bytes_(bytes), left_(bytes) {}

Gather::~Gather() {
  for (StagingBuffer* buffer : buffers_) staging_.device(context_).give(buffer);
}

void Gather::fill(const std::function<uint64_t()>& begin) {
  StagingDevice& device = staging_.device(context_);
  while (left_ != 0 && buffers_.size() < kAheadMax) {
    StagingBuffer* const buffer = device.take(buffers_.empty());
    if (buffer == nullptr) return;
    buffers_.push_back(buffer);
    buffer->bytes = static_cast<size_t>(std::min<uint64_t>(left_, Staging::kBufferBytes));
    buffer->number = begin();
    if (buffer->number == 0) {
      device.give(buffer);
      buffers_.pop_back();
      return;
    }
    const uint64_t begins = bytes_ - left_;
    left_ -= buffer->bytes;
    try {
      const size_t there = device.copy(*buffer, walk_, host_, Direction::FromDevice);
      if (there != buffer->bytes) throw memory_gone("source", layout_, extent_, begins + there);
    } catch (const Error&) {
      if (!buffer->is_in_flight) staging_.unbegun_.push_back(std::exchange(buffer->number, 0));
      throw;
    }
  }
}

std::pair<const uint8_t*, size_t> Gather::front() const {
  if (buffers_.empty()) return {nullptr, 0};
  const StagingBuffer& buffer = *buffers_.front();
  if (buffer.is_in_flight) return {nullptr, 0};
  if (!buffer.failure.empty()) refuse(buffer, "source");
  return {buffer.data + at_, buffer.bytes - at_};
}

void Gather::sent(size_t bytes) {
  while (bytes != 0) {
    const size_t part = std::min(bytes, buffers_.front()->bytes - at_);
    bytes -= part;
    at_ += part;
    if (at_ != buffers_.front()->bytes) return;
    staging_.device(context_).give(buffers_.front());
    buffers_.pop_front();
    at_ = 0;
  }
}

Scatter::Scatter(Staging& staging, const OwnMemory& memory, const Extent& extent, uint64_t bytes)
    : staging_(staging), context_(memory.device), layout_(*memory.layout), extent_(extent), host_(memory), walk_(layout_, extent), bytes_(bytes), left_(bytes) {}

Scatter::~Scatter() {
  if (filling_ == nullptr && buffers_.empty()) return;
  StagingDevice& device = staging_.device(context_);
  if (filling_ != nullptr) device.give(filling_);
  for (StagingBuffer* buffer : buffers_) device.give(buffer);
}

void Scatter::forget_done() {
  while (!buffers_.empty() && !buffers_.front()->is_in_flight) {
    if (!buffers_.front()->failure.empty()) refuse(*buffers_.front(), "destination");
    staging_.device(context_).give(buffers_.front());
    buffers_.pop_front();
  }
}

iovec Scatter::room(size_t max) {
  forget_done();
  if (filling_ == nullptr) {
    if (left_ == 0 || buffers_.size() >= kAheadMax) return {nullptr, 0};
    filling_ = staging_.device(context_).take(buffers_.empty());
    if (filling_ == nullptr) return {nullptr, 0};
  }
  const size_t free = static_cast<size_t>(std::min<uint64_t>(Staging::kBufferBytes - filling_->bytes, left_));
  return {filling_->data + filling_->bytes, std::min(free, max)};
}

void Scatter::filled(size_t bytes) {
  filling_->bytes += bytes;
  left_ -= bytes;
  if (left_ != 0 && filling_->bytes != Staging::kBufferBytes) return;
  StagingBuffer* const full = std::exchange(filling_, nullptr);
  buffers_.push_back(full);
  const size_t there = staging_.device(context_).copy(*full, walk_, host_, Direction::ToDevice);
  if (there != full->bytes) throw memory_gone("destination", layout_, extent_, bytes_ - left_ - full->bytes + there);
}

bool Scatter::is_done() {
  forget_done();
  return left_ == 0 && filling_ == nullptr && buffers_.empty();
}

bool Scatter::is_in_flight() const {
  return std::any_of(buffers_.begin(), buffers_.end(), [](const StagingBuffer* buffer) { return buffer->is_in_flight; });
}

}  // namespace kvxfer
