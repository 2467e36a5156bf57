#include "core.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/random.h>

#include "lanes/signals.hpp"
#include "lanes/stream.hpp"
#include "sockets.hpp"

namespace kvxfer {
namespace {

constexpr Nanos kAside = 5'000'000;  // another thread that waits may take the events that would end this wait
constexpr Nanos kLate = 50'000;     // who has polled in vain for so long yields; most answers to a small post are there sooner
constexpr uint32_t kSmallPost = 1024;  // pieces; larger ones leave the sending to the IO thread

EndpointLimits checked(EndpointLimits limits) {
  if (limits.notification_bytes_max > kNotificationMax) {
    throw Error(Code::invalid_argument, "notification_bytes_max is at most " + std::to_string(kNotificationMax));
  }
  if (limits.notification_queue_bytes_max < limits.notification_bytes_max) {
    throw Error(Code::invalid_argument, "notification_queue_bytes_max is at least notification_bytes_max");
  }
  if (limits.handshake_ns <= 0 || limits.transfers.stall_ns <= 0) throw Error(Code::invalid_argument, "handshake_ns and stall_ns must be above 0");
  return limits;
}

std::shared_ptr<cuda::Context> context_of(int device) { return device < 0 ? nullptr : cuda::Context::of(device); }

// Drawn many at a time: to ask the kernel for each is a tenth of what a post takes here. A forked child draws its own.
uint64_t random_seed() {
  thread_local struct {
    pid_t owner = 0;
    size_t left = 0;
    std::array<uint64_t, 32> drawn;
  } seeds;
  if (seeds.left == 0 || seeds.owner != this_process()) {
    constexpr ssize_t bytes = sizeof seeds.drawn;  // not more than 256: all of it or nothing
    if (::getrandom(seeds.drawn.data(), bytes, 0) != bytes) throw Error(Code::internal, errno_text("getrandom"));
    seeds.left = seeds.drawn.size();
    seeds.owner = this_process();
  }
  return std::exchange(seeds.drawn[--seeds.left], 0);
}

}  // namespace

Core::Core(AgentRef self, EndpointLimits limits, CoreOptions options)
    : limits_(checked(limits)), options_(std::move(options)), shared_(std::move(self), limits_) {
  if (options_.ucx.library_path.empty()) {
    ucx_obstacle_ = "no UCX library is configured";
    return;
  }
  try {
    ucx_ = std::make_shared<UcxContext>(options_.ucx);
  } catch (const Error& error) {
    if (error.code() != Code::no_lane) throw;
    ucx_obstacle_ = error.what();
  }
}

// Null where the lane is off, or cannot be had for this memory: reads by it are then told to take another.
std::shared_ptr<UcxMemory> Core::ucx_memory(uint8_t* address, uint64_t bytes, bool is_exposed, bool is_device) const {
  if (!ucx_ || (is_device && !ucx_->has_cuda())) return nullptr;
  try {
    return ucx_->add_memory(address, bytes, is_exposed, is_device);
  } catch (const Error& error) {
    if (error.code() != Code::no_lane) throw;
    return nullptr;
  }
}

void Core::start() {
  shared_.check_process();
  std::lock_guard lock(lifetime_);
  if (thread_.joinable() || shared_.is_shut()) throw Error(Code::closed, "a core starts once");
  uint16_t port = 0;
  Fd tcp = listen_tcp(options_.bind_host, options_.bind_port, port);
  Fd local;
  if (!options_.unix_path.empty()) local = listen_unix(options_.unix_path);
  is_bound_ = static_cast<bool>(local);
  LaneTools tools;
  tools.copier = std::make_shared<Copier>(options_.copy_threads == 0 ? CopyThreads::of_host() : CopyThreads{options_.copy_threads, options_.copy_threads});
  tools.staging = std::make_unique<Staging>();
  try {
    if (ucx_) tools.ucx = std::make_unique<UcxWorker>(ucx_);
  } catch (const Error& error) {
    ucx_obstacle_ = error.what();
  }
  auto io = std::make_unique<IoThread>(shared_, statistics_, limits_, std::move(tools), turn_, std::move(tcp), std::move(local));
  tcp_port_ = port;
  {
    std::lock_guard turn(turn_.mutex);
    io_ = std::move(io);
  }

  try {
    const NoSignals inherited;
    thread_ = std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "kvxfer-io");
      io_->run();
    });
  } catch (const std::system_error& error) {
    std::lock_guard turn(turn_.mutex);
    io_.reset();
    throw Error(Code::limit_exceeded, std::string("no thread can be had: ") + error.what());
  }
}

void Core::close() {
  if (owner_ != this_process()) {  // no lock: a thread that is not here may have held it
    if (thread_.joinable()) thread_.detach();
    static_cast<void>(io_.release());
    new auto(ucx_);
    shared_.leak_memory();
    return;
  }
  std::lock_guard lock(lifetime_);
  shared_.shut("");
  if (thread_.joinable()) thread_.join();
  {
    std::lock_guard turn(turn_.mutex);  // who still helps
    io_.reset();
  }
  if (is_bound_) ::unlink(options_.unix_path.c_str());
  is_bound_ = false;
}

bool Core::help() {
  if (owner_ != this_process()) return false;  // sockets and epoll are the parent's
  const std::unique_lock turn(turn_.mutex, std::try_to_lock);
  if (!turn || !io_) return false;
  return io_->help(false);
}

std::vector<OwnerEvent> Core::drain() {
  if (!shared_.has_events() && owner_ == this_process()) {
    const std::unique_lock turn(turn_.mutex, std::try_to_lock);
    if (turn && io_ && !turn_.is_driven) {
      const SharedEndpoint::Quiet quiet(shared_);
      io_->help(true);
      if (shared_.has_events()) return news();
    }
  }
  if (!shared_.has_events() && !shared_.owes_signal()) {
    polled_in_vain();
    return {};
  }
  return news();
}

std::vector<OwnerEvent> Core::news() {
  vain_at_.store(0, std::memory_order_relaxed);
  return shared_.take_events();
}

// Who polls never sleeps, and whoever is to answer may have been put on his processor: it would wait for a tick of the clock.
void Core::polled_in_vain() {
  const Nanos now = monotonic_now();
  if (now - vain_at_.load(std::memory_order_relaxed) > IoThread::kPollPause) vain_since_.store(now, std::memory_order_relaxed);
  const bool is_late = now - vain_since_.load(std::memory_order_relaxed) > kLate;
  if (is_late) ::sched_yield();
  vain_at_.store(is_late ? monotonic_now() : now, std::memory_order_relaxed);
}

// `taken`, where it is given and nobody else drives, gets what there is when the drive ends.
bool Core::drive(Nanos until, std::vector<OwnerEvent>* taken) {
  if (owner_ != this_process() || turn_.is_driven) return false;
  ++turn_.drivers;
  std::unique_lock turn(turn_.mutex);
  if (!io_) {
    --turn_.drivers;
    return false;
  }
  if (taken == nullptr || turn_.is_driven) return io_->drive(turn, until);
  const SharedEndpoint::Quiet quiet(shared_);
  io_->drive(turn, until);
  *taken = shared_.take_events();  // before the thread can have the turn, which would signal what is still there
  return true;
}

std::vector<OwnerEvent> Core::take(Nanos until) {
  std::vector<OwnerEvent> taken;
  if (drive(until, &taken)) return taken;
  wait(until);
  return shared_.take_events();
}

bool Core::wait(Nanos until) {
  if (drive(until, nullptr)) return shared_.has_events();
  const Nanos left = std::min(until - monotonic_now(), kAside);
  if (shared_.has_news() || left <= 0) return shared_.has_events();
  pollfd look{shared_.event_fd(), POLLIN, 0};
  const timespec timeout{left / 1'000'000'000, static_cast<long>(left % 1'000'000'000)};
  return ::ppoll(&look, 1, &timeout, nullptr) > 0;
}

void Core::add_pool(const PoolInfo& info, std::shared_ptr<Region> region, std::vector<Segment> segments) {
  check_segments(segments, info.block_count, region->bytes(), info.block_bytes, Code::invalid_argument);
  const uint64_t bytes = region->bytes();
  uint8_t* const base = region->address();
  std::shared_ptr<UcxMemory> ucx = ucx_memory(base, bytes, info.is_exposed);
  shared_.add_pool(Pool{info, Layout{base, std::move(segments), nullptr, nullptr}, bytes, std::move(region), 0, std::move(ucx), nullptr});
}

void Core::add_pool(const PoolInfo& info, uint8_t* address, uint64_t bytes, std::vector<Segment> segments, int device) {
  if (info.is_shareable) throw Error(Code::invalid_argument, "memory that kvxfer did not allocate cannot be shared");
  check_segments(segments, info.block_count, bytes, info.block_bytes, Code::invalid_argument);
  std::shared_ptr<cuda::Context> context = context_of(device);
  std::shared_ptr<UcxMemory> ucx = ucx_memory(address, bytes, info.is_exposed, context != nullptr);
  shared_.add_pool(Pool{info, Layout{address, std::move(segments), nullptr, nullptr}, bytes, nullptr, 0, std::move(ucx), std::move(context)});
}

void Core::add_region(const RegionInfo& info, std::shared_ptr<Region> region, uint8_t* address, int device) {
  if (region != nullptr && info.bytes > region->bytes()) throw Error(Code::invalid_argument, "a registered region is longer than its memory");
  if (region == nullptr && info.is_shareable) throw Error(Code::invalid_argument, "memory that kvxfer did not allocate cannot be shared");
  uint8_t* const base = region != nullptr ? region->address() : address;
  if (base == nullptr) throw Error(Code::invalid_argument, "a region at address 0");
  std::shared_ptr<cuda::Context> context = region != nullptr ? nullptr : context_of(device);
  std::shared_ptr<UcxMemory> ucx = ucx_memory(base, info.bytes, info.is_exposed && info.can_read, context != nullptr);
  shared_.add_region(OwnRegion{info, base, std::move(region), std::move(ucx), std::move(context)});
}

void Core::grant(const TransferId& id, uint32_t pool, std::vector<uint32_t> blocks, const std::string& reader, Nanos ttl_ns,
                 uint32_t ready_blocks, const Bytes32& content) {
  const std::shared_ptr<const Pool> own = shared_.pool(pool);
  const bool is_summed = own && own->info.checks && ready_blocks != 0;
  const auto count = static_cast<uint32_t>(blocks.size());
  shared_.act([&](Endpoint& endpoint, Nanos now, Effects& out) {
    endpoint.grant(id, pool, std::move(blocks), reader, ttl_ns, is_summed ? 0 : ready_blocks, now, out, content);
  });
  if (is_summed) ready(id, ready_blocks, 0, ready_blocks == count);
}

void Core::ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete) {
  const auto becoming = [&](const Endpoint& endpoint) { return endpoint.becoming_ready(id, blocks); };
  auto [pool, list] = shared_.look(becoming);
  std::vector<uint32_t> sums;
  // The grant may end meanwhile, its pool may not go: who removes it waits.
  struct Looking {
    ~Looking() {
      if (number != 0) shared.gathers_ended({number});
    }
    SharedEndpoint& shared;
    const uint64_t number;
  };
  if (const Looking looking{shared_, list.empty() ? 0 : shared_.begin_gather(id, 0)}; looking.number != 0) {
    const auto count = static_cast<uint32_t>(list.size());
    const Extent extent{pool, nullptr, std::make_shared<const std::vector<uint32_t>>(std::move(list)), 0, count};
    if (const OwnMemory memory = shared_.find(extent); memory && !memory.device) {  // a device's: as they are sent
      RunningSums running(memory, extent, RunningSums::Bytes::Anywhere, "source");
      running.advance(count * memory.pool->info.block_bytes);
      sums = running.sums();
    }
  }
  shared_.act([&](Endpoint& endpoint, Nanos now, Effects& out) {
    if (becoming(endpoint).second.size() != sums.size()) sums.clear();  // another thread said so too
    endpoint.ready(id, blocks, layers, complete, now, out, sums);
  });
}

void Core::pull(uint32_t pool, TransferSpec spec, bool may_help) {
  spec.nonce_seed = random_seed();
  const bool is_small = spec.blocks.size() <= kSmallPost;
  const bool must_wake = shared_.act_awake([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.pull(pool, std::move(spec), now, out); });
  if (must_wake && !(may_help && is_small && help())) shared_.wake();
}

void Core::fetch(PostSpec spec, bool may_help) {
  spec.nonce_seed = random_seed();
  const bool is_small = spec.local.count() <= kSmallPost;
  const bool must_wake = shared_.act_awake([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.fetch(std::move(spec), now, out); });
  if (must_wake && !(may_help && is_small && help())) shared_.wake();
}

void Core::push(PostSpec spec, bool may_help) {
  spec.nonce_seed = random_seed();
  const bool is_small = spec.local.count() <= kSmallPost;
  const bool must_wake = shared_.act_awake([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.push(std::move(spec), now, out); });
  if (must_wake && !(may_help && is_small && help())) shared_.wake();
}

uint64_t Core::notify(const AgentRef& to, std::string payload, bool may_help) {
  uint64_t seq = 0;
  const bool must_wake = shared_.act_awake([&](Endpoint& endpoint, Nanos now, Effects& out) { seq = endpoint.notify(to, std::move(payload), now, out); });
  if (must_wake && !(may_help && help())) shared_.wake();
  return seq;
}

}  // namespace kvxfer
