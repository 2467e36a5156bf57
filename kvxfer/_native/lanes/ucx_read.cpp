#include "ucx_read.hpp"

#include <algorithm>

#include "memory/clock.hpp"

namespace kvxfer {
namespace {

constexpr uint64_t kGetBytesMin = 256 << 10, kGetBytesMax = 8 << 20;
constexpr size_t kInFlightMax = 512;              // gets per peer; a read may always have one
constexpr uint64_t kInFlightBytesMax = 16 << 20;  // per peer
constexpr int kTurnsMax = 1024;                   // of progress in one call
constexpr int kTurnsUnwatched = 16;               // between two reads of the clock
constexpr Nanos kTurnsTime = 300'000;
constexpr Nanos kRetryRest = 1'000 * kMillisecond;

}  // namespace

// --- the peer and its memory ---

UcxPeer::~UcxPeer() {
  if (endpoint_) endpoint_->close();
}

const std::shared_ptr<UcxEndpoint>& UcxPeer::endpoint() {
  if (endpoint_ && !endpoint_->is_failed()) return endpoint_;
  if (endpoint_) {
    failure_ = std::string("UCX lost the peer: ") + worker_.library().status_string(endpoint_->failure());
    endpoint_->close();
    endpoint_.reset();
    retry_at_ = monotonic_now() + kRetryRest;
  }
  if (retry_at_ != 0 && monotonic_now() < retry_at_) throw Error(Code::no_lane, failure_);
  try {
    endpoint_ = std::make_shared<UcxEndpoint>(worker_, address_);
  } catch (const Error& error) {
    failure_ = error.what();
    retry_at_ = monotonic_now() + kRetryRest;
    throw;
  }
  return endpoint_;
}

UcxRemote::UcxRemote(std::shared_ptr<UcxPeer> peer, const Map& map, std::string packed)
    : RemoteMemory(map), peer_(std::move(peer)), packed_(std::move(packed)) {}

const std::shared_ptr<const UcxKey>& UcxRemote::key() const {
  const std::shared_ptr<UcxEndpoint>& endpoint = peer_->endpoint();
  if (!key_ || key_->endpoint() != endpoint) key_ = std::make_shared<UcxKey>(endpoint, packed_, reinterpret_cast<uint64_t>(base()), bytes());
  return key_;
}

std::unique_ptr<ReadJob> UcxRemote::open(ReadBlocks read, RemotePlace from, OwnMemory to) const {
  std::vector<std::shared_ptr<const UcxKey>> keys;
  for (const std::shared_ptr<const RemoteMemory>& memory : from.memories) keys.push_back(static_cast<const UcxRemote&>(*memory).key());
  from.memories.clear();  // the session's: when it ends, a read in progress keeps its keys and nothing else of the peer
  return std::make_unique<UcxRead>(peer_->worker(), std::move(read), std::move(from), std::move(keys), std::move(to));
}

// --- one read ---

UcxRead::UcxRead(UcxWorker& worker, ReadBlocks read, RemotePlace from, std::vector<std::shared_ptr<const UcxKey>> keys, OwnMemory to)
    : ReadJob(std::move(read), std::move(from), std::move(to)), worker_(worker), flight_(std::make_shared<UcxFlight>(worker, keys.at(0)->endpoint())),
      from_(walk_source()), to_(walk_target()) {
  std::sort(keys.begin(), keys.end(), [](const auto& a, const auto& b) { return a->begin() < b->begin(); });
  flight_->keys = std::move(keys);
  find_memories();
  ++flight_->endpoint->readers;
}

void UcxRead::end_posting() {
  if (std::exchange(is_posting_, false)) --flight_->endpoint->readers;
}

const UcxKey* UcxRead::key_at(uint64_t address) {
  const auto holds = [address](const UcxKey& key) { return key.begin() <= address && address < key.end(); };
  if (key_ != nullptr && holds(*key_)) return key_;
  const auto& keys = flight_->keys;
  auto it = std::upper_bound(keys.begin(), keys.end(), address, [](uint64_t a, const auto& key) { return a < key->begin(); });
  while (it != keys.begin() && !holds(**std::prev(it))) --it;  // more than one step only where registrations overlap
  return key_ = it == keys.begin() ? nullptr : std::prev(it)->get();
}

// The memory of the pool or the regions that this read fills, and of no other registration that covers the same addresses.
void UcxRead::find_memories() {
  auto& memories = flight_->memories;
  if (target().pool) {
    if (target().pool->ucx) memories.push_back(target().pool->ucx);
    return;
  }
  for (const auto& region : target().regions) {
    if (region->ucx) memories.push_back(region->ucx);
  }
}

const UcxMemory* UcxRead::memory_at(const uint8_t* address) {
  const auto holds = [address](const UcxMemory& memory) { return memory.address() <= address && address < memory.address() + memory.bytes(); };
  if (memory_ != nullptr && holds(*memory_)) return memory_;
  const auto& known = flight_->memories;
  const auto found = std::find_if(known.begin(), known.end(), [&](const auto& memory) { return holds(*memory); });
  return memory_ = found == known.end() ? nullptr : found->get();
}

// As much as the bounds allow.
void UcxRead::post() {
  const size_t readers = flight_->endpoint->readers;
  const size_t requests_max = std::max<size_t>(kInFlightMax / readers, 1);
  const uint64_t bytes_max = kInFlightBytesMax / readers;
  const size_t get_max = std::clamp<uint64_t>(bytes_max / 2, kGetBytesMin, kGetBytesMax);
  while (flight_->requests < requests_max && (flight_->bytes < bytes_max || flight_->requests == 0) && !has_failed()) {
    if (to_span_.size == 0) to_span_ = to_.take(get_max);
    if (from_span_.size == 0) from_span_ = from_.take(get_max);
    if (to_span_.size == 0) break;
    const auto address = reinterpret_cast<uint64_t>(from_span_.data);
    const UcxKey* const key = key_at(address);
    const UcxMemory* const memory = memory_at(to_span_.data);
    if (memory == nullptr) {
      refusal_ = "the memory to fill is not registered with UCX";
    } else if (memory->is_device() && has_checksums()) {
      refusal_ = "checksums of device memory cannot be verified here";
    } else if (key == nullptr || from_span_.size == 0) {
      refusal_ = "the peer's memory is smaller than it says";
    }
    if (!refusal_.empty()) return;
    const auto left = static_cast<uint64_t>(memory->address() + memory->bytes() - to_span_.data);
    const size_t bytes = std::min<uint64_t>({from_span_.size, to_span_.size, key->end() - address, left});
    if (!flight_->get(*key, address, *memory, to_span_.data, bytes)) return;
    ++effort_.runs;
    effort_.in_flight_most = std::max(effort_.in_flight_most, flight_->requests);
    from_span_ = {from_span_.data + bytes, from_span_.size - bytes};
    to_span_ = {to_span_.data + bytes, to_span_.size - bytes};
  }
  if (is_posted() && !has_failed()) {
    end_posting();
    flight_->flush();
  }
}

size_t UcxRead::read(size_t max) {
  const ucp::Quiet quiet;
  const Nanos end = monotonic_now() + kTurnsTime;
  for (int turn = 0; turn < kTurnsMax && flight_->landed - told_ < max && !has_failed(); ++turn) {
    if (is_posting_) post();
    if (!is_in_flight() || !worker_.progress_once()) break;
    if (turn % kTurnsUnwatched == kTurnsUnwatched - 1 && monotonic_now() > end) break;
  }
  if (has_failed()) {
    if (flight_->endpoint->is_failed()) flight_->endpoint->close();
    if (is_in_flight()) return 0;
    fail();
  }
  const uint64_t landed = std::exchange(told_, flight_->landed);
  if (!has_checksums()) {
    checked_ = told_;
    return static_cast<size_t>(told_ - landed);
  }
  if (!flight_->is_flushed || is_in_flight()) return 0;
  const size_t part = static_cast<size_t>(std::min<uint64_t>(max, bytes() - checked_));
  verify(part);
  checked_ += part;
  return part;
}

void UcxRead::fail() const {
  if (!refusal_.empty()) throw Error(Code::no_lane, refusal_);
  const UcxEndpoint& endpoint = *flight_->endpoint;
  const ucp::Status status = endpoint.is_failed() ? endpoint.failure() : flight_->failure;
  const std::string text = "UCX: " + std::string(worker_.library().status_string(status)) + (flight_->refusal.empty() ? "" : " (" + flight_->refusal + ")");
  // If no byte ever came this way, a retry will fail too, unless the session or the peer ended.
  const bool is_over = endpoint.is_failed() && (status == ucp::kCanceled || status == ucp::kConnectionReset);
  throw Error(endpoint.has_worked || is_over ? Code::transport : Code::no_lane, text);
}

}  // namespace kvxfer
