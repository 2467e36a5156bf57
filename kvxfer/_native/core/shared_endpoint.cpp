#include "shared_endpoint.hpp"

#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>

namespace kvxfer {
namespace {

constexpr size_t kNotificationBacklogMax = 64 << 20;
constexpr size_t kEffectsBacklogMax = 512;

bool is_confirmation(const Frame& frame) {
  const auto* verdict = std::get_if<Verdict>(&frame);
  return verdict != nullptr && verdict->code == Code::ok;
}

template <class T, class Variant>
constexpr bool is_alternative = false;
template <class T, class... All>
constexpr bool is_alternative<T, std::variant<All...>> = (std::is_same_v<T, All> || ...);

}  // namespace

Nanos monotonic_now() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return Nanos{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

SharedEndpoint::SharedEndpoint(AgentRef self, EndpointLimits limits)
    : endpoint_(std::move(self), limits), wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_fd_) fail_errno(Code::limit_exceeded, "eventfd");
}

void SharedEndpoint::check_open() const {
  if (!failure_.empty()) throw Error(Code::internal, "the native core failed: " + failure_);
  if (is_shut_) throw Error(Code::closed, "the native core is closed");
}

// Owner's events to the owner, the rest to the IO thread; it also learns which transfers are final, to stop what still
// fills their blocks, and which sessions are up. Only the end of a grant that is being sent is told later, after the send:
// the IO thread goes on meanwhile, and what it then tells of a transfer must not overtake what is told here.
void SharedEndpoint::deliver(Turn& turn, bool is_io, Effects&& effects) {
  std::optional<OwnerEvent> told_after_send;
  const Nanos now = monotonic_now();
  for (Effect& effect : effects) {
    std::visit(
        [&](auto& e) {
          using E = std::decay_t<decltype(e)>;
          if constexpr (is_alternative<E, OwnerEvent>) {
            if constexpr (std::is_same_v<E, TransferFinal> || std::is_same_v<E, SessionUp>) effects_.push_back(e);
            if constexpr (std::is_same_v<E, GrantEnded>) {
              if (!is_io && sending_ && *sending_ == e.id) {
                told_after_send = std::move(e);
                return;
              }
            }
            turn.must_signal |= events_.push(std::move(e), now);
          } else {
            if constexpr (std::is_same_v<E, SendFrame>) {
              if (is_shut_ && is_confirmation(e.frame)) return;  // the owner was told that it is all over, and may have written
            }
            effects_.push_back(std::move(e));
          }
        },
        effect);
  }
  if (!is_io && sleep_until_ != 0 && (!effects_.empty() || endpoint_.next_deadline() < sleep_until_)) {
    sleep_until_ = 0;
    turn.must_wake = true;
  }
  if (!told_after_send) return;
  wait_send_ended(turn.lock);
  turn.must_signal |= events_.push(std::move(*told_after_send), monotonic_now());
}

void SharedEndpoint::wait_send_ended(std::unique_lock<std::mutex>& lock) {
  const uint64_t under_way = sends_;
  send_ended_.wait(lock, [&] { return !sending_ || sends_ != under_way; });
}

SharedEndpoint::Turn::~Turn() {
  lock.unlock();
  if (must_wake) ::eventfd_write(shared_.wake_fd_.get(), 1);
  if (must_signal) shared_.events_.signal();
}

void SharedEndpoint::shut(const std::string& failure) {
  Turn turn(*this);
  is_shut_ = true;
  turn.must_wake = true;
  if (failure.empty() || !failure_.empty()) return;
  failure_ = failure;
  turn.must_signal = events_.push(CoreFailed{failure}, monotonic_now());
}

bool SharedEndpoint::is_shut() const {
  std::lock_guard lock(mutex_);
  return is_shut_;
}

void SharedEndpoint::add_pool(Pool pool) {
  std::lock_guard lock(mutex_);
  check_open();
  endpoint_.add_pool(pool.info);
  pool.serial = next_pool_serial_++;
  const uint32_t id = pool.info.id;
  pools_[id] = std::make_shared<const Pool>(std::move(pool));
}

void SharedEndpoint::remove_pool(uint32_t pool) {
  std::unique_lock lock(mutex_);
  check_open();
  endpoint_.remove_pool(pool);
  pools_.erase(pool);
  wait_send_ended(lock);  // perhaps of a grant that another thread is just ending
}

void SharedEndpoint::set_peer(const AgentRef& peer, const Bytes32& key, PeerAddress address) {
  std::lock_guard lock(mutex_);
  check_open();
  if (peer == endpoint_.self()) return;
  endpoint_.set_peer(peer, key, address.unix_path.empty() ? SessionKind::Tcp : SessionKind::Unix);
  addresses_[peer] = std::move(address);
}

void SharedEndpoint::peer_dead(const AgentRef& peer) {
  act([&](Endpoint& endpoint, Nanos now, Effects& out) {
    endpoint.peer_dead(peer, now, out);
    addresses_.erase(peer);
  });
}

GrantState SharedEndpoint::end_grant(const TransferId& id, GrantEvent event) {
  Turn turn(*this);
  check_open();
  const GrantState state = run(turn, false, [&](Endpoint& endpoint, Nanos now, Effects& out) { return endpoint.end_grant(id, event, now, out); });
  if (sending_ && *sending_ == id) wait_send_ended(turn.lock);  // another thread ended it, and waits too
  return state;
}

std::vector<OwnerEvent> SharedEndpoint::take_events() {
  std::lock_guard lock(mutex_);
  return events_.take();
}

std::deque<Effect> SharedEndpoint::take_effects(Nanos& sleep_until, Nanos& tick_at) {
  Turn turn(*this);
  if (events_.due() != kNever) turn.must_signal = events_.is_due(monotonic_now());
  tick_at = endpoint_.next_deadline();
  sleep_until = std::min({sleep_until, tick_at, events_.due()});
  sleep_until_ = effects_.empty() && !is_shut_ ? sleep_until : 0;
  return std::exchange(effects_, {});
}

void SharedEndpoint::tell(OwnerEvent event) {
  Turn turn(*this);
  turn.must_signal = events_.push(std::move(event), monotonic_now());
}

bool SharedEndpoint::can_take_notification(size_t bytes) const {
  std::lock_guard lock(mutex_);
  return events_.notification_bytes() + bytes <= kNotificationBacklogMax;
}

bool SharedEndpoint::is_backed_up() const {
  std::lock_guard lock(mutex_);
  return effects_.size() > kEffectsBacklogMax;
}

std::shared_ptr<const Pool> SharedEndpoint::pool(uint32_t id) const {
  std::lock_guard lock(mutex_);
  const auto found = pools_.find(id);
  return found == pools_.end() ? nullptr : found->second;
}

std::optional<PeerAddress> SharedEndpoint::address(const AgentRef& peer) const {
  std::lock_guard lock(mutex_);
  const auto found = addresses_.find(peer);
  if (found == addresses_.end()) return std::nullopt;
  return found->second;
}

bool SharedEndpoint::begin_send(const TransferId& id) {
  std::lock_guard lock(mutex_);
  if (is_shut_ || endpoint_.grant_state(id, monotonic_now()) != GrantState::Alive) return false;
  sending_ = id;
  ++sends_;
  return true;
}

void SharedEndpoint::end_send() {
  std::lock_guard lock(mutex_);
  sending_.reset();
  send_ended_.notify_all();
}

bool SharedEndpoint::may_land(SessionId session, const TransferId& id, uint64_t token) {
  std::lock_guard lock(mutex_);
  endpoint_.heard(session, monotonic_now());
  return endpoint_.is_landing(id, token);
}

}  // namespace kvxfer
