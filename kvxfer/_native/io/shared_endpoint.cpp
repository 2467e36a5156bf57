#include "shared_endpoint.hpp"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace kvxfer {
namespace {

constexpr size_t kNotificationBacklogMax = 64 << 20;
constexpr size_t kEffectsBacklogMax = 512;
constexpr auto kWithdrawWait = std::chrono::seconds(5);  // for the IO thread to release a region: a slice of a copy, a call

bool is_confirmation(const Frame& frame) {
  const auto* verdict = std::get_if<Verdict>(&frame);
  return verdict != nullptr && verdict->code == Code::ok;
}

// Sleeps while `word` is `seen`, up to a time limit; a signal or wake_sleepers() ends it earlier. A condition variable would go on
// sleeping after a signal, whose handler Python then could not run.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen, Nanos at_most) {
  const timespec timeout{at_most / 1'000'000'000, static_cast<long>(at_most % 1'000'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &timeout, nullptr, 0);
}
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel looks at 32 bits");
void wake_sleepers(const std::atomic<uint32_t>& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

template <class T, class Variant>
constexpr bool is_alternative = false;
template <class T, class... All>
constexpr bool is_alternative<T, std::variant<All...>> = (std::is_same_v<T, All> || ...);

}  // namespace

SharedEndpoint::SharedEndpoint(AgentRef self, EndpointLimits limits)
    : endpoint_(std::move(self), limits), wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_fd_) fail_errno(Code::limit_exceeded, "eventfd");
}

void SharedEndpoint::check_process() const {
  if (owner_ != this_process()) throw Error(Code::closed, "this core belongs to the process that made it; a forked child needs its own");
}

void SharedEndpoint::check_open() const {
  if (!failure_.empty()) throw Error(Code::internal, "the native core failed: " + failure_);
  if (is_shut_) throw Error(Code::closed, "the native core is closed");
}

// The owner's events go to the owner's queue, the other effects to the event loop, which also learns which sessions are up. An
// event that gives back memory of a send in progress (the end of a grant, the drain of a push) is added after that send. The loop
// runs on meanwhile, and its events for a transfer must not overtake those added here.
void SharedEndpoint::deliver(LockScope& scope, bool is_io, Effects&& effects) {
  std::vector<OwnerEvent> events_after_send;
  const Nanos now = monotonic_now();
  for (Effect& effect : effects) {
    std::visit(
        [&](auto& e) {
          using E = std::decay_t<decltype(e)>;
          if constexpr (is_alternative<E, OwnerEvent>) {
            if constexpr (std::is_same_v<E, SessionUp>) effects_.push_back(e);
            if constexpr (std::is_same_v<E, GrantEnded> || std::is_same_v<E, TransferDrained>) {
              if (!is_io && sending_ && *sending_ == e.id) return events_after_send.emplace_back(std::move(e)), void();
            }
            push_event(scope, std::move(e), now, is_io);
          } else {
            if constexpr (std::is_same_v<E, SendFrame>) {
              if (is_shut_ && is_confirmation(e.frame)) return;  // the owner was told of the end, and may have written
            }
            effects_.push_back(std::move(e));
          }
        },
        effect);
  }
  if (!is_io && sleep_until_ != 0 && (!effects_.empty() || endpoint_.next_deadline() < sleep_until_)) {
    sleep_until_ = 0;
    scope.must_wake = true;
  }
  if (is_io && removing_ != 0) endings_->reads.notify_all();  // it may have
  if (events_after_send.empty()) return;
  wait_send_ended(scope.lock);
  for (OwnerEvent& event : events_after_send) push_event(scope, std::move(event), monotonic_now(), is_io);
}

void SharedEndpoint::push_event(LockScope& scope, OwnerEvent&& event, Nanos now, bool is_io) {
  if (is_failure_told_) return;
  const bool is_news = !std::holds_alternative<TransferProgress>(event);
  scope.must_signal |= events_.push(std::move(event), now);
  has_events_.store(true, std::memory_order_release);
  if (!is_news) return;
  has_news_ = true;
  ++news_;
  scope.must_notify |= news_waiters_ != 0;
  scope.must_wake |= !is_io && caller_waits_;
}

bool SharedEndpoint::wait_for_news(Nanos until) {
  ++news_waiters_;
  const uint32_t seen = news_;
  if (const Nanos left = until - monotonic_now(); left > 0 && !has_news() && !is_shut()) sleep_while(news_, seen, left);
  --news_waiters_;
  return has_events();
}

void SharedEndpoint::wait_send_ended(std::unique_lock<std::mutex>& lock) {
  const uint64_t under_way = sends_;
  endings_->sends.wait(lock, [&] { return !sending_ || sends_ != under_way; });
}

void SharedEndpoint::wait_gathers_ended(std::unique_lock<std::mutex>& lock) {
  const uint64_t next = next_gather_;
  endings_->sends.wait(lock, [&] { return gathers_.empty() || *gathers_.begin() >= next || keeps_memory(); });
  if (keeps_memory()) throw Error(Code::internal, "copies out of this memory do not end");
}

SharedEndpoint::LockScope::~LockScope() {
  lock.unlock();
  if (must_wake) shared_.wake();
  if (must_notify) wake_sleepers(shared_.news_);
  if (must_signal) shared_.events_.signal();
}

void SharedEndpoint::shut(const std::string& failure) {
  LockScope scope(*this);
  is_shut_ = true;
  scope.must_wake = scope.must_notify = true;
  ++news_;
  if (failure_.empty()) failure_ = failure;
}

bool SharedEndpoint::has_failed() const {
  std::lock_guard lock(mutex_);
  return !failure_.empty();
}

void SharedEndpoint::tell_failure() {
  LockScope scope(*this);
  if (failure_.empty()) return;
  push_event(scope, CoreFailed{failure_}, monotonic_now(), false);
  is_failure_told_ = true;
  endings_->reads.notify_all();  // a thread that takes a region back need not wait any more
}

void SharedEndpoint::keep_memory() {
  std::lock_guard lock(mutex_);
  new auto(pools_);
  new auto(regions_);
  keeps_memory_.store(true, std::memory_order_release);
  endings_->sends.notify_all();
}

bool SharedEndpoint::is_shut() const {
  std::lock_guard lock(mutex_);
  return is_shut_;
}

void SharedEndpoint::leak_memory() {
  static_cast<void>(endings_.release());
  new auto(std::move(pools_));
  new auto(std::move(regions_));
  new auto(std::move(region_table_));
  new auto(std::move(effects_));
}

void SharedEndpoint::add_pool(Pool pool) {
  check_process();
  std::lock_guard lock(mutex_);
  check_open();
  endpoint_.add_pool(pool.info, {reinterpret_cast<uint64_t>(pool.layout.base), pool.layout.segments});
  pool.serial = next_pool_serial_++;
  const uint32_t id = pool.info.id;
  pools_[id] = std::make_shared<const Pool>(std::move(pool));
}

void SharedEndpoint::set_digest(uint32_t pool, const Bytes32& digest) {
  check_process();
  std::lock_guard lock(mutex_);
  check_open();
  endpoint_.set_digest(pool, digest);
}

void SharedEndpoint::remove_pool(uint32_t pool) {
  LockScope scope(*this);
  check_open();
  endpoint_.remove_pool(pool);
  const auto found = pools_.find(pool);
  const Withdrawn gone{pool, found->second->serial};
  pools_.erase(found);
  withdraw(scope, gone);
  wait_send_ended(scope.lock);  // perhaps for a grant that another thread is ending
  wait_gathers_ended(scope.lock);
}

// Peers with a map of it must unmap it.
void SharedEndpoint::withdraw(LockScope& scope, Withdrawn gone) {
  withdrawn_.push_back(gone);
  has_withdrawn_.store(true, std::memory_order_release);
  if (sleep_until_ != 0) scope.must_wake = true;
  sleep_until_ = 0;
}

std::vector<Withdrawn> SharedEndpoint::take_withdrawn() {
  if (!has_withdrawn_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mutex_);
  has_withdrawn_.store(false, std::memory_order_release);
  return std::exchange(withdrawn_, {});
}

void SharedEndpoint::add_region(OwnRegion region) {
  check_process();
  std::lock_guard lock(mutex_);
  check_open();
  endpoint_.add_region(region.info, reinterpret_cast<uint64_t>(region.base));
  const uint32_t id = region.info.id;
  regions_[id] = std::make_shared<const OwnRegion>(std::move(region));
  region_table_.reset();
}

void SharedEndpoint::remove_region(uint32_t region) {
  LockScope scope(*this);
  const auto wait_until = std::chrono::steady_clock::now() + kWithdrawWait;
  for (;;) {
    check_open();
    try {
      run(scope, false, [&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.remove_region(region, now, out); });
      break;
    } catch (const Error& error) {
      // If an own fetch holds the region, nothing was done; otherwise peers' pushes still drain.
      if (error.code() != Code::blocks_busy || !endpoint_.is_withdrawn(region)) throw;
    }
    withdraw(scope, {region, OwnRegion::kSerial});  // reads into it stop
    if (std::exchange(scope.must_wake, false)) wake();
    if (std::exchange(scope.must_signal, false)) events_.signal();
    ++removing_;
    const bool is_late = endings_->reads.wait_until(scope.lock, wait_until) == std::cv_status::timeout;
    --removing_;
    if (is_late) throw Error(Code::blocks_busy, "peers' writes into region " + std::to_string(region) + " do not stop");
  }
  regions_.erase(region);
  region_table_.reset();
  withdraw(scope, {region, OwnRegion::kSerial});
  wait_send_ended(scope.lock);
  wait_gathers_ended(scope.lock);
}

void SharedEndpoint::set_peer(const AgentRef& peer, const Bytes32& key, PeerAddress address) {
  check_process();
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

GrantState SharedEndpoint::end_grant(const TransferId& id, GrantEvent event, const std::string& why) {
  LockScope scope(*this);
  check_open();
  const GrantState state = run(scope, false, [&](Endpoint& endpoint, Nanos now, Effects& out) { return endpoint.end_grant(id, event, now, out, why); });
  if (sending_ && *sending_ == id) wait_send_ended(scope.lock);  // another thread ended it, and waits too
  return state;
}

std::vector<OwnerEvent> SharedEndpoint::take_events() {
  check_process();
  std::lock_guard lock(mutex_);
  has_events_.store(false, std::memory_order_release);
  has_news_ = false;
  std::vector<OwnerEvent> events = events_.take();
  owes_signal_.store(events_.owes_signal(), std::memory_order_release);
  return events;
}

std::deque<Effect> SharedEndpoint::take_effects(Nanos& sleep_until, Nanos& tick_at) {
  LockScope scope(*this);
  if (events_.due() != kNever) scope.must_signal = events_.is_due(monotonic_now());
  tick_at = endpoint_.next_deadline();
  sleep_until = std::min({sleep_until, tick_at, events_.due()});
  sleep_until_ = effects_.empty() && withdrawn_.empty() && !is_shut_ ? sleep_until : 0;
  return std::exchange(effects_, {});
}

void SharedEndpoint::tell(OwnerEvent event) {
  LockScope scope(*this);
  push_event(scope, std::move(event), monotonic_now(), true);
}

bool SharedEndpoint::can_take_notification(size_t bytes) const {
  std::lock_guard lock(mutex_);
  return events_.notification_bytes() + unfetched_notification_bytes_ + bytes <= kNotificationBacklogMax;
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

std::shared_ptr<const OwnRegion> SharedEndpoint::region(uint32_t id) const {
  std::lock_guard lock(mutex_);
  const auto found = regions_.find(id);
  return found == regions_.end() ? nullptr : found->second;
}

std::shared_ptr<const RegionTable> SharedEndpoint::region_table() const {
  std::lock_guard lock(mutex_);
  if (!region_table_) region_table_ = std::make_shared<RegionTable>(regions_);
  return region_table_;
}

OwnMemory SharedEndpoint::find(const Extent& extent) const {
  OwnMemory memory;
  if (!extent.ranges) {
    memory.pool = pool(extent.pool);
    if (!memory.pool) return memory;
    memory.layout = std::shared_ptr<const Layout>(memory.pool, &memory.pool->layout);
    memory.device = memory.pool->device;
    memory.is_exposed = memory.pool->info.is_exposed;
    memory.is_ours = memory.pool->region != nullptr;
    return memory;
  }
  const std::shared_ptr<const RegionTable> table = region_table();
  memory.regions = table->of(extent);
  if (memory.regions.empty()) return {};
  memory.is_exposed = memory.is_ours = true;
  for (const auto& region : memory.regions) {
    memory.is_exposed &= region->info.is_exposed && region->info.can_read;
    memory.is_ours &= region->region != nullptr;
    // Copies by the context of one device reach those of others and the host's too.
    if (!memory.device) memory.device = region->device;
  }
  memory.layout = std::make_shared<const Layout>(Layout{nullptr, {}, extent.ranges, table->bases});
  return memory;
}

std::optional<PeerAddress> SharedEndpoint::address(const AgentRef& peer) const {
  std::lock_guard lock(mutex_);
  const auto found = addresses_.find(peer);
  if (found == addresses_.end()) return std::nullopt;
  return found->second;
}

bool SharedEndpoint::begin_send(const TransferId& id, uint64_t serial) {
  std::lock_guard lock(mutex_);
  if (is_shut_ || !endpoint_.is_granted(id, serial, monotonic_now())) return false;
  sending_ = id;
  ++sends_;
  return true;
}

void SharedEndpoint::end_send() {
  std::lock_guard lock(mutex_);
  sending_.reset();
  endings_->sends.notify_all();
}

uint64_t SharedEndpoint::begin_gather(const TransferId& id, uint64_t serial) {
  std::lock_guard lock(mutex_);
  if (is_shut_ || !endpoint_.is_granted(id, serial, monotonic_now())) return 0;
  gathers_.insert(next_gather_);
  return next_gather_++;
}

void SharedEndpoint::gathers_ended(const std::vector<uint64_t>& numbers) {
  if (numbers.empty()) return;
  std::lock_guard lock(mutex_);
  for (const uint64_t number : numbers) gathers_.erase(number);
  endings_->sends.notify_all();
}

bool SharedEndpoint::may_land(SessionId session, const TransferId& id, uint64_t token) {
  std::lock_guard lock(mutex_);
  endpoint_.heard(session, monotonic_now());
  return endpoint_.is_landing(id, token);
}

}  // namespace kvxfer
