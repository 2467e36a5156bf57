// The endpoint behind its one mutex: any thread may ask it; what it wants done waits for the IO thread, in order, and what
// the owner must know waits in the owner's queue. The mutex is never held during a system call on data or a copy.
//
// The IO thread names the grant whose blocks it is about to send, or the read whose blocks it is about to fill, under the
// mutex. A read keeps its blocks reserved or quarantined in the machines until its end is reported. A grant has no such
// state, so whoever ends one waits here until no send of it is under way: after that not one more byte of its blocks is
// taken out of memory.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

#include "owner_queue.hpp"
#include "pool.hpp"

namespace kvxfer {

Nanos monotonic_now();

struct PeerAddress {
  std::string tcp_host;
  uint16_t tcp_port = 0;
  std::string unix_path;
};

class SharedEndpoint {
 public:
  SharedEndpoint(AgentRef self, EndpointLimits limits);

  // --- any thread ---
  // Calls `act(endpoint, now, effects)` under the mutex. What it throws is thrown, after its effects were taken care of.
  template <class F>
  auto act(F&& act) {
    Turn turn(*this);
    check_open();
    return run(turn, false, std::forward<F>(act));
  }
  // Only looks; allowed after the end too.
  template <class F>
  auto look(F&& look) const {
    std::lock_guard lock(mutex_);
    return look(static_cast<const Endpoint&>(endpoint_));
  }
  void add_pool(Pool pool);
  void remove_pool(uint32_t pool);
  void set_peer(const AgentRef& peer, const Bytes32& key, PeerAddress address);
  void peer_dead(const AgentRef& peer);
  GrantState end_grant(const TransferId& id, GrantEvent event);
  std::vector<OwnerEvent> take_events();
  int event_fd() const { return events_.fd(); }
  int wake_fd() const { return wake_fd_.get(); }
  // From here on every call throws: Error(closed), or Error(internal) where `failure` says what broke. And nothing is
  // confirmed to anybody: an owner who is told so takes its grants for ended.
  void shut(const std::string& failure);
  bool is_shut() const;

  // --- the IO thread ---
  template <class F>
  auto act_io(F&& act) {
    Turn turn(*this);
    return run(turn, true, std::forward<F>(act));
  }
  // What is to be done now. Nothing: the thread may sleep until `sleep_until`, and is woken where that gets earlier. Sets
  // `tick_at` to when the endpoint wants to be ticked.
  std::deque<Effect> take_effects(Nanos& sleep_until, Nanos& tick_at);
  void tell(OwnerEvent event);
  bool can_take_notification(size_t bytes) const;
  // More waits to be performed than a peer should be able to ask for before something of it is.
  bool is_backed_up() const;
  std::shared_ptr<const Pool> pool(uint32_t id) const;
  std::optional<PeerAddress> address(const AgentRef& peer) const;
  // True where the grant is alive now: its blocks may be read until end_send().
  bool begin_send(const TransferId& id);
  void end_send();
  // True where the read still holds its blocks: they may be filled until its end is reported. Also: bytes came.
  bool may_land(SessionId session, const TransferId& id, uint64_t token);

 private:
  // The mutex held, and after it was let go the wakeups that became due: who is woken finds it free.
  struct Turn {
    explicit Turn(SharedEndpoint& shared) : shared_(shared), lock(shared.mutex_) {}
    ~Turn();
    SharedEndpoint& shared_;
    std::unique_lock<std::mutex> lock;
    bool must_signal = false, must_wake = false;
  };

  template <class F>
  auto run(Turn& turn, bool is_io, F&& act) {
    Effects out;
    const auto finish = [&] { deliver(turn, is_io, std::move(out)); };
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
  void deliver(Turn& turn, bool is_io, Effects&& effects);
  void wait_send_ended(std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable send_ended_;
  Endpoint endpoint_;
  std::map<uint32_t, std::shared_ptr<const Pool>> pools_;
  std::map<AgentRef, PeerAddress> addresses_;
  std::deque<Effect> effects_;
  OwnerQueue events_;
  std::optional<TransferId> sending_;
  uint64_t sends_ = 0;
  Fd wake_fd_;
  Nanos sleep_until_ = 0;  // 0: awake
  uint64_t next_pool_serial_ = 1;
  bool is_shut_ = false;
  std::string failure_;
};

}  // namespace kvxfer
