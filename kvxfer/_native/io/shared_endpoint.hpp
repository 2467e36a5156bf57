// The endpoint behind its one mutex. Any thread may call it. Effects wait in order for the thread that runs the event loop,
// and events wait in the owner's queue. No thread holds the mutex during a copy or a system call on data.
//
// Under the mutex, the event loop names the grant whose blocks it is about to send, or the read whose blocks it is about to fill. A
// read keeps its blocks reserved or quarantined in the machines until its end is reported. A grant has no such state, so a thread
// that ends a grant waits here until no send of it is in progress: after that we read no further byte of its blocks. The kernel may
// still hold references to pages of zero-copy sends; such bytes are never confirmed. A region that peers' pushes may still fill is
// given back once the event loop has stopped using it.
//
// The object belongs to the process that made it. In a forked child every call throws before it takes the mutex.
#pragma once

#include <sys/eventfd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "machines/endpoint.hpp"
#include "memory/clock.hpp"
#include "memory/pool.hpp"
#include "memory/process.hpp"
#include "owner_queue.hpp"

namespace kvxfer {

struct PeerAddress {
  std::string tcp_host;
  uint16_t tcp_port = 0;
  std::string unix_path;
};

class SharedEndpoint {
 public:
  SharedEndpoint(AgentRef self, EndpointLimits limits);

  // --- any thread ---
  // Throws Error(closed) in a forked child.
  void check_process() const;
  // Calls `act(endpoint, now, effects)` under the mutex. Throws what it throws, after its effects were delivered.
  template <class F>
  auto act(F&& act) {
    LockScope scope(*this);
    check_open();
    return run(scope, false, std::forward<F>(act));
  }
  // As act(), but the caller must wake the event loop, or run it, if this returns true.
  template <class F>
  [[nodiscard]] bool act_awake(F&& act) {
    LockScope scope(*this);
    check_open();
    run(scope, false, std::forward<F>(act));
    return std::exchange(scope.must_wake, false);
  }
  void wake() { ::eventfd_write(wake_fd_.get(), 1); }
  void clear_wake() {
    eventfd_t ignored;
    ::eventfd_read(wake_fd_.get(), &ignored);
  }
  // Read access; allowed after the end too.
  template <class F>
  auto look(F&& look) const {
    check_process();
    std::lock_guard lock(mutex_);
    return look(static_cast<const Endpoint&>(endpoint_));
  }
  // As look(), if the mutex is free now: for callers that hold a lock for which other threads wait (the GIL).
  template <class F>
  auto try_look(F&& look) const -> std::optional<decltype(look(std::declval<const Endpoint&>()))> {
    check_process();
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return std::nullopt;
    return look(static_cast<const Endpoint&>(endpoint_));
  }
  void add_pool(Pool pool);
  void set_digest(uint32_t pool, const Bytes32& digest);
  void remove_pool(uint32_t pool);
  void add_region(OwnRegion region);
  // When it returns, we no longer read or write any byte of the region. Ends peers' pushes into it and waits for them to stop;
  // throws Error(blocks_busy) while an own fetch may still write there.
  void remove_region(uint32_t region);
  void set_peer(const AgentRef& peer, const Bytes32& key, PeerAddress address);
  void peer_dead(const AgentRef& peer);
  GrantState end_grant(const TransferId& id, GrantEvent event, const std::string& why = {});
  std::vector<OwnerEvent> take_events();
  // Sleeps until has_news(), a signal comes, the endpoint is shut or it is `until`; another thread may take the news first. Returns
  // has_events().
  bool wait_for_news(Nanos until);
  // False: take_events() would have returned none a moment ago. Takes no lock.
  bool has_events() const { return has_events_.load(std::memory_order_acquire); }
  bool has_news() const { return has_news_; }  // more than progress
  // True: the descriptor is, or soon will be, readable for events that were taken already; the next take_events() clears it.
  bool owes_signal() const { return owes_signal_.load(std::memory_order_acquire); }
  int event_fd() const { return events_.fd(); }
  int wake_fd() const { return wake_fd_.get(); }
  // From here on every call throws: Error(closed), or Error(internal) with the cause `failure`. And no peer gets a confirmation any
  // more: an owner that sees the error takes its grants for ended.
  void shut(const std::string& failure);
  bool is_shut() const;
  bool has_failed() const;
  // Something that does not end still moves bytes: from now on our memory is never given back.
  void keep_memory();
  bool keeps_memory() const { return keeps_memory_.load(std::memory_order_acquire); }
  // In a forked child: touches nothing that belongs to the parent (device registrations, objects that its threads wait on). Takes
  // no lock, because a thread of the parent may have held it.
  void leak_memory();

  // --- the thread that runs the event loop ---
  template <class F>
  auto act_io(F&& act) {
    LockScope scope(*this);
    return run(scope, true, std::forward<F>(act));
  }
  // Takes the effects to perform. If there are none, the loop may sleep until `sleep_until`, and is woken if that moves earlier.
  // Sets `tick_at` to the time of the endpoint's next tick.
  std::deque<Effect> take_effects(Nanos& sleep_until, Nanos& tick_at);
  // Pools and regions that were removed since the last call.
  std::vector<Withdrawn> take_withdrawn();
  bool has_withdrawn() const { return has_withdrawn_.load(std::memory_order_acquire); }
  void tell(OwnerEvent event);
  // While true, a caller waits inside the loop: events of other threads wake the loop.
  void set_caller_waits(bool waits) { caller_waits_ = waits; }
  // Reports a failure to the owner, as the last event. Nothing is read or written any more.
  void tell_failure();
  bool can_take_notification(size_t bytes) const;
  // Bytes of notifications that the owner took and its program has not fetched: they count as waiting.
  void set_unfetched_notification_bytes(size_t bytes) { unfetched_notification_bytes_ = bytes; }
  // More effects wait than a peer should be able to cause before some are performed.
  bool is_backed_up() const;
  std::shared_ptr<const Pool> pool(uint32_t id) const;
  std::shared_ptr<const OwnRegion> region(uint32_t id) const;
  // Where the blocks or elements lie; empty if a pool or a region of them is gone.
  OwnMemory find(const Extent& extent) const;
  const Bytes16& boot_nonce() const { return endpoint_.self().boot_nonce; }  // at an address that stays
  std::optional<PeerAddress> address(const AgentRef& peer) const;
  // True if exactly that grant is alive now: its blocks may be read until end_send(). `serial` 0: any grant of that id.
  bool begin_send(const TransferId& id, uint64_t serial);
  void end_send();
  // Begins a copy out of the blocks of `id` that runs on its own (on a device). Returns its number, 0 if the grant is not alive.
  // Its result may be used between begin_send() and end_send(): then the grant was alive all the time.
  uint64_t begin_gather(const TransferId& id, uint64_t serial);
  void gathers_ended(const std::vector<uint64_t>& numbers);
  // True if the read still holds its blocks: they may be filled until its end is reported. Also notes that the peer was heard.
  bool may_land(SessionId session, const TransferId& id, uint64_t token);

 private:
  // Holds the mutex, and after its release sends the wakeups that became due, so that a woken thread finds it free.
  struct LockScope {
    explicit LockScope(SharedEndpoint& shared) : shared_(shared) {
      shared.check_process();
      lock = std::unique_lock(shared.mutex_);
    }
    ~LockScope();
    SharedEndpoint& shared_;
    std::unique_lock<std::mutex> lock;
    bool must_signal = false, must_wake = false, must_notify = false;  // the owner; the event loop; threads in wait_for_news()
  };

  template <class F>
  auto run(LockScope& scope, bool is_io, F&& act) {
    Effects out;
    const auto finish = [&] { deliver(scope, is_io, std::move(out)); };
    try {
      if constexpr (std::is_void_v<decltype(act(endpoint_, Nanos{}, out))>) {
        act(endpoint_, monotonic_now(), out);
        finish();
      } else {
        auto value = act(endpoint_, monotonic_now(), out);
        finish();
        return value;
      }
    } catch (const Error&) {
      finish();
      throw;
    }
  }
  void check_open() const;
  void deliver(LockScope& scope, bool is_io, Effects&& effects);
  void wait_send_ended(std::unique_lock<std::mutex>& lock);
  void wait_gathers_ended(std::unique_lock<std::mutex>& lock);
  void withdraw(LockScope& scope, Withdrawn gone);
  void push_event(LockScope& scope, OwnerEvent&& event, Nanos now, bool is_io);
  std::shared_ptr<const RegionTable> region_table() const;

  const pid_t owner_ = this_process();
  mutable std::mutex mutex_;
  // Heap memory that a forked child never frees: the destructor would wait for threads that only the parent has.
  struct Endings {
    std::condition_variable sends, reads;
  };
  std::unique_ptr<Endings> endings_ = std::make_unique<Endings>();
  Endpoint endpoint_;
  std::map<uint32_t, std::shared_ptr<const Pool>> pools_;
  std::map<uint32_t, std::shared_ptr<const OwnRegion>> regions_;
  mutable std::shared_ptr<const RegionTable> region_table_;  // made on demand; null after a change
  std::map<AgentRef, PeerAddress> addresses_;
  std::deque<Effect> effects_;
  std::vector<Withdrawn> withdrawn_;
  std::atomic<bool> has_withdrawn_{false};
  std::atomic<size_t> unfetched_notification_bytes_{0};
  OwnerQueue events_;
  std::atomic<bool> has_events_{false}, has_news_{false}, owes_signal_{false}, keeps_memory_{false}, caller_waits_{false};
  size_t removing_ = 0;  // threads that wait for reads to end
  std::optional<TransferId> sending_;
  uint64_t sends_ = 0;
  std::set<uint64_t> gathers_;  // in progress
  uint64_t next_gather_ = 1;
  Fd wake_fd_;
  std::atomic<uint32_t> news_{0}, news_waiters_{0};  // a counter that changes with each event, and the threads that sleep on it
  Nanos sleep_until_ = 0;  // of the event loop; 0: it is awake, and takes effects before it sleeps
  uint64_t next_pool_serial_ = 1;
  bool is_shut_ = false, is_failure_told_ = false;  // after that no event is added
  std::string failure_;
};

// From begin_send() to end_send(), also when something throws between.
class Sending {
 public:
  explicit Sending(SharedEndpoint& shared) : shared_(shared) {}
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;
  ~Sending() { end(); }
  bool begin(const TransferId& id, uint64_t serial) { return is_under_way_ = shared_.begin_send(id, serial); }
  void end() {
    if (std::exchange(is_under_way_, false)) shared_.end_send();
  }
  SharedEndpoint& shared() { return shared_; }

 private:
  SharedEndpoint& shared_;
  bool is_under_way_ = false;
};

}  // namespace kvxfer
