// The UCX worker of an agent: endpoints towards peers, and the gets in flight on them. Only the IO thread touches it, and
// its event descriptor waits in that thread's epoll.
//
// The memory of a session's MAPs owns the endpoint. When the last of that memory goes, the endpoint is closed by force. Its gets in
// flight complete as cancelled once UCX has flushed or destroyed the transport's own endpoints: nothing can land after that. A get
// cannot be recalled, so the read that posted it waits for its completion; the callbacks keep the objects alive that they need.
#pragma once

#include <set>
#include <unordered_map>

#include "read_job.hpp"
#include "ucx.hpp"

namespace kvxfer {

class UcxWorker;

// Towards the worker of one peer.
class UcxEndpoint {
 public:
  // Throws Error(no_lane).
  UcxEndpoint(UcxWorker& worker, const std::string& address);
  UcxEndpoint(const UcxEndpoint&) = delete;
  UcxEndpoint& operator=(const UcxEndpoint&) = delete;
  ~UcxEndpoint();

  bool is_failed() const { return failure_ != ucp::kOk; }
  ucp::Status failure() const { return failure_; }
  void close();

  size_t readers = 0;       // reads with gets still to post: they share the bound in flight
  bool has_worked = false;  // a get has completed on it

 private:
  friend class UcxWorker;
  friend class UcxKey;
  friend struct UcxFlight;
  UcxWorker& worker_;
  ucp::Endpoint* handle_ = nullptr;  // null: closed
  ucp::Status failure_ = ucp::kOk;
};

// A peer's memory as one endpoint reads it.
class UcxKey {
 public:
  // Throws Error(no_lane).
  UcxKey(std::shared_ptr<UcxEndpoint> endpoint, const std::string& packed, uint64_t begin, uint64_t bytes);
  UcxKey(const UcxKey&) = delete;
  UcxKey& operator=(const UcxKey&) = delete;
  ~UcxKey();

  const std::shared_ptr<UcxEndpoint>& endpoint() const { return endpoint_; }
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }

 private:
  friend struct UcxFlight;
  const std::shared_ptr<UcxEndpoint> endpoint_;
  const uint64_t begin_, end_;
  ucp::RemoteKey* handle_ = nullptr;
};

// The gets of one read, from the first to the completion of the last, even if the read ends earlier.
struct UcxFlight : std::enable_shared_from_this<UcxFlight> {
  UcxFlight(UcxWorker& worker, std::shared_ptr<UcxEndpoint> endpoint) : worker(worker), endpoint(std::move(endpoint)) {}

  // False if UCX refused it: see `failure`.
  bool get(const UcxKey& key, uint64_t from, const UcxMemory& memory, uint8_t* to, size_t bytes);
  void flush();  // once, after the last get

  UcxWorker& worker;
  const std::shared_ptr<UcxEndpoint> endpoint;
  std::vector<std::shared_ptr<const UcxKey>> keys;         // what the gets name
  std::vector<std::shared_ptr<const UcxMemory>> memories;  // what they fill
  size_t requests = 0;  // in flight, the flush among them
  uint64_t bytes = 0;   // in flight
  uint64_t landed = 0;  // bytes
  ucp::Status failure = ucp::kOk;
  std::string refusal;  // what UCX said of it
  bool is_flushed = false;

 private:
  friend class UcxWorker;
  struct FlightSlot {
    UcxFlight* flight = nullptr;
    size_t bytes = 0;
    bool is_flush = false;
  };
  void issue(ucp::Request request, FlightSlot* slot);
  void finish(FlightSlot* slot, ucp::Status status);
  static void on_completed(void* request, ucp::Status status, void* slot);

  std::shared_ptr<UcxFlight> self_;  // while something is in flight
};

class UcxWorker {
 public:
  // Throws Error(no_lane).
  explicit UcxWorker(std::shared_ptr<UcxContext> context);
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;
  // Every endpoint and key of this worker must have been destroyed. Waits for gets in flight, up to a bound.
  ~UcxWorker();

  UcxContext& context() const { return *context_; }
  const ucp::UcxLibrary& library() const { return context_->library(); }

  // --- the loop of the IO thread ---
  int fd() const { return fd_; }        // readable: call woken()
  void woken() { is_armed_ = false; }
  bool is_armed() const { return is_armed_; }  // false: new work, also a peer's, may come without a signal of the descriptor
  void progress();                      // each round; returns at once if there is nothing to do
  // Call it before the thread sleeps. False: there is more to do at once. True: the thread may sleep until the descriptor is
  // readable or it is wake_by().
  bool may_sleep();
  Nanos wake_by() const;

  // --- source ---
  // Throws Error(no_lane): it was not registered for readers, or does not fit a MAP.
  void describe(const UcxMemory& memory, Map& map) const;

  // --- reader ---
  // Throws Error(no_lane), always with the reason.
  std::shared_ptr<RemoteMemory> open(SessionId session, const Map& map);
  // Makes UCX progress once; false if it had nothing to do.
  bool progress_once();

 private:
  friend class UcxEndpoint;
  friend class UcxKey;
  friend struct UcxFlight;
  friend class UcxPeer;
  UcxFlight::FlightSlot* take_slot();

  const std::shared_ptr<UcxContext> context_;
  ucp::Worker* handle_ = nullptr;
  int fd_ = -1;
  std::string address_;
  bool is_armed_ = false;
  bool is_active_ = false;  // something was begun or done since the last check
  Nanos active_at_ = 0;     // when that was
  size_t requests_ = 0;  // in flight
  std::set<UcxEndpoint*> endpoints_;
  std::unordered_map<SessionId, std::weak_ptr<class UcxPeer>> peers_;
  std::vector<std::unique_ptr<UcxFlight::FlightSlot>> slots_;
  std::vector<UcxFlight::FlightSlot*> free_slots_;
  std::vector<std::shared_ptr<UcxFlight>> finished_;  // to be freed outside of callbacks
};

}  // namespace kvxfer
