#include "ucx_worker.hpp"

#include "memory/clock.hpp"
#include "ucx_key.hpp"
#include "ucx_read.hpp"

namespace kvxfer {
namespace {

constexpr int kTurnsMax = 256;                      // of progress in one round
constexpr Nanos kSpin = 50'000;                     // after the last activity
constexpr Nanos kWakeMax = kMillisecond;            // some transports do not signal completions
constexpr Nanos kLeave = 5'000 * kMillisecond;      // the longest wait at the end for gets in flight

}  // namespace

// --- endpoints ---

UcxEndpoint::UcxEndpoint(UcxWorker& worker, const std::string& address) : worker_(worker) {
  const ucp::Quiet quiet;
  ucp::EndpointParams params{};
  params.field_mask = ucp::kEndpointAddress | ucp::kEndpointErrorMode | ucp::kEndpointErrorHandler;
  params.address = reinterpret_cast<const ucp::Address*>(address.data());
  params.err_mode = ucp::kErrorModePeer;
  params.err_handler.callback = [](void* self, ucp::Endpoint*, ucp::Status status) { static_cast<UcxEndpoint*>(self)->failure_ = status; };
  params.err_handler.arg = this;
  if (const ucp::Status s = worker.library().ep_create(worker.handle_, &params, &handle_); s != ucp::kOk) {
    quiet.fail(worker.library(), "UCX cannot reach the peer", s);
  }
  worker_.endpoints_.insert(this);
  worker_.is_armed_ = false;
}

UcxEndpoint::~UcxEndpoint() {
  close();
  worker_.endpoints_.erase(this);
}

void UcxEndpoint::close() {
  if (handle_ == nullptr) return;
  if (failure_ == ucp::kOk) failure_ = ucp::kCanceled;
  const ucp::Quiet quiet;
  const ucp::UcxLibrary& ucx = worker_.library();
  ucp::RequestParam param{};
  param.op_attr_mask = ucp::kOpFlags | ucp::kOpCallback | ucp::kOpUserData;
  param.flags = ucp::kCloseForce;
  param.user_data = const_cast<ucp::UcxLibrary*>(&ucx);
  param.callback = [](void* request, ucp::Status, void* library) { static_cast<ucp::UcxLibrary*>(library)->request_free(request); };
  static_cast<void>(ucx.ep_close_nbx(std::exchange(handle_, nullptr), &param));
  worker_.is_armed_ = false;
}

UcxKey::UcxKey(std::shared_ptr<UcxEndpoint> endpoint, const std::string& packed, uint64_t begin, uint64_t bytes)
    : endpoint_(std::move(endpoint)), begin_(begin), end_(begin + bytes) {
  const ucp::Quiet quiet;
  const ucp::UcxLibrary& ucx = endpoint_->worker_.library();
  if (endpoint_->handle_ == nullptr || endpoint_->is_failed()) throw Error(Code::no_lane, "the UCX endpoint has failed");
  if (const ucp::Status s = ucx.ep_rkey_unpack(endpoint_->handle_, packed.data(), &handle_); s != ucp::kOk) {
    quiet.fail(ucx, "UCX rejects the peer's memory", s);
  }
}

UcxKey::~UcxKey() {
  const ucp::Quiet quiet;
  endpoint_->worker_.library().rkey_destroy(handle_);
}

// --- gets ---

bool UcxFlight::get(const UcxKey& key, uint64_t from, const UcxMemory& memory, uint8_t* to, size_t bytes) {
  FlightSlot* const slot = worker.take_slot();
  slot->flight = this;
  slot->bytes = bytes;
  ucp::RequestParam param{};
  param.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData | ucp::kOpMemory | ucp::kOpMultiSend;
  param.callback = &on_completed;
  param.user_data = slot;
  param.memory = memory.handle();
  const ucp::Quiet quiet;
  issue(worker.library().get_nbx(endpoint->handle_, to, bytes, from, key.handle_, &param), slot);
  if (failure != ucp::kOk && refusal.empty()) refusal = quiet.said();
  return failure == ucp::kOk;
}

void UcxFlight::flush() {
  FlightSlot* const slot = worker.take_slot();
  slot->flight = this;
  slot->bytes = 0;
  slot->is_flush = true;
  ucp::RequestParam param{};
  param.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData;
  param.callback = &on_completed;
  param.user_data = slot;
  const ucp::Quiet quiet;
  issue(worker.library().ep_flush_nbx(endpoint->handle_, &param), slot);
}

void UcxFlight::issue(ucp::Request request, FlightSlot* slot) {
  worker.is_armed_ = false;
  worker.is_active_ = true;
  ++requests;
  ++worker.requests_;
  bytes += slot->bytes;
  if (!ucp::is_pending(request)) return finish(slot, ucp::status_of(request));
  if (!self_) self_ = shared_from_this();
}

void UcxFlight::finish(FlightSlot* slot, ucp::Status status) {
  --requests;
  --worker.requests_;
  bytes -= slot->bytes;
  if (status != ucp::kOk) {
    if (failure == ucp::kOk) failure = status;
  } else if (slot->is_flush) {
    is_flushed = true;
  } else {
    landed += slot->bytes;
    endpoint->has_worked = true;
  }
  *slot = FlightSlot{};
  worker.free_slots_.push_back(slot);
  if (requests == 0 && self_) worker.finished_.push_back(std::move(self_));
}

void UcxFlight::on_completed(void* request, ucp::Status status, void* data) {
  FlightSlot* const slot = static_cast<FlightSlot*>(data);
  const ucp::UcxLibrary& ucx = slot->flight->worker.library();
  slot->flight->finish(slot, status);
  ucx.request_free(request);
}

UcxFlight::FlightSlot* UcxWorker::take_slot() {
  if (free_slots_.empty()) {
    slots_.push_back(std::make_unique<UcxFlight::FlightSlot>());
    free_slots_.reserve(slots_.size());  // so that a callback never allocates
    return slots_.back().get();
  }
  UcxFlight::FlightSlot* const slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

// --- the worker ---

UcxWorker::UcxWorker(std::shared_ptr<UcxContext> context) : context_(std::move(context)) {
  const ucp::Quiet quiet;
  const ucp::UcxLibrary& ucx = library();
  ucp::WorkerParams params{};
  params.field_mask = ucp::kWorkerThreadMode;
  params.thread_mode = ucp::kThreadSerialized;  // made by one thread, used by another
  if (const ucp::Status s = ucx.worker_create(context_->handle(), &params, &handle_); s != ucp::kOk) quiet.fail(ucx, "UCX cannot make a worker", s);
  ucp::WorkerAttributes attributes{};
  attributes.field_mask = ucp::kWorkerAddress;
  ucp::Status status = ucx.worker_get_efd(handle_, &fd_);
  if (status == ucp::kOk) status = ucx.worker_query(handle_, &attributes);
  if (status != ucp::kOk) {
    ucx.worker_destroy(handle_);
    quiet.fail(ucx, "UCX's worker cannot be waited for", status);
  }
  address_.assign(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucx.worker_release_address(handle_, attributes.address);
}

UcxWorker::~UcxWorker() {
  if (!context_->is_mine()) return;
  const ucp::Quiet quiet;
  for (UcxEndpoint* endpoint : endpoints_) endpoint->close();
  for (const Nanos end = monotonic_now() + kLeave; requests_ != 0 && monotonic_now() < end;) progress_once();
  finished_.clear();
  library().worker_destroy(handle_);
}

bool UcxWorker::progress_once() {
  const bool has_done = library().worker_progress(handle_) != 0;
  is_active_ |= has_done;
  if (!finished_.empty()) std::vector<std::shared_ptr<UcxFlight>>().swap(finished_);
  return has_done;
}

void UcxWorker::progress() {
  if (is_armed_) return;
  const ucp::Quiet quiet;
  int turns = 0;
  while (turns < kTurnsMax && progress_once()) ++turns;
  for (UcxEndpoint* endpoint : endpoints_) {
    if (endpoint->is_failed()) endpoint->close();
  }
}

bool UcxWorker::may_sleep() {
  if (is_armed_) return true;
  if (requests_ != 0) {
    const Nanos now = monotonic_now();
    if (std::exchange(is_active_, false)) active_at_ = now;
    if (now - active_at_ < kSpin) return false;
  }
  const ucp::Quiet quiet;
  if (library().worker_arm(handle_) == ucp::kBusy) return false;
  is_armed_ = requests_ == 0;  // with gets in flight it is armed anew each time
  return true;
}

Nanos UcxWorker::wake_by() const { return requests_ == 0 ? kNever : monotonic_now() + kWakeMax; }

// --- MAP ---

void UcxWorker::describe(const UcxMemory& memory, Map& map) const {
  if (!memory.is_readable()) throw Error(Code::no_lane, "the memory is not exposed");
  const ucp::Quiet quiet;
  void* packed = nullptr;
  size_t size = 0;
  if (const ucp::Status s = library().rkey_pack(context_->handle(), memory.handle(), &packed, &size); s != ucp::kOk) {
    quiet.fail(library(), "UCX cannot pack a key of the memory", s);
  }
  const std::string key(static_cast<const char*>(packed), size);
  library().rkey_buffer_release(packed);
  map.key = write_ucx_key(address_, key);
  map.address = reinterpret_cast<uint64_t>(memory.address());
}

std::shared_ptr<RemoteMemory> UcxWorker::open(SessionId session, const Map& map) {
  UcxKeyParts key = read_ucx_key(map);
  std::shared_ptr<UcxPeer> peer = peers_[session].lock();
  if (!peer) {
    for (auto it = peers_.begin(); it != peers_.end();) it = it->second.expired() ? peers_.erase(it) : std::next(it);
    peer = std::make_shared<UcxPeer>(*this, std::move(key.address));
    peers_[session] = peer;
  } else if (peer->address() != key.address) {
    throw Error(Code::no_lane, "the peer's UCX worker is another than before");
  }
  return std::make_shared<UcxRemote>(std::move(peer), map, std::move(key.packed));
}

}  // namespace kvxfer
