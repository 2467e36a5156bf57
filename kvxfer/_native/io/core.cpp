#include "core.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/random.h>

#include "lanes/signals.hpp"
#include "lanes/stream.hpp"
#include "sockets.hpp"

namespace kvxfer {
namespace {

constexpr uint32_t kSmallPost = 1024;  // elements; larger posts leave the sending to the IO thread

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

uint64_t random_seed() {
  uint64_t seed;
  if (::getrandom(&seed, sizeof seed, 0) != sizeof seed) throw Error(Code::internal, errno_text("getrandom"));
  return seed;
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

// Null if the lane is off, or cannot use this memory: a read by it then continues by another lane.
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
  tools.encryption = std::make_shared<Encryption>(options_.encryption);
  try {
    if (ucx_) tools.ucx = std::make_unique<UcxWorker>(ucx_);
  } catch (const Error& error) {
    ucx_obstacle_ = error.what();
  }
  auto loop = std::make_unique<EventLoop>(shared_, statistics_, limits_, std::move(tools), loop_mutex_, std::move(tcp), std::move(local));
  tcp_port_ = port;
  {
    std::lock_guard lock(loop_mutex_);
    loop_ = std::move(loop);
  }

  try {
    const NoSignals inherited;
    thread_ = std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "kvxfer-io");
      loop_->run();
    });
  } catch (const std::system_error& error) {
    std::lock_guard lock(loop_mutex_);
    loop_.reset();
    throw Error(Code::limit_exceeded, std::string("cannot start a thread: ") + error.what());
  }
}

void Core::close() {
  if (owner_ != this_process()) {  // no lock: a thread of the parent may have held it
    if (thread_.joinable()) thread_.detach();
    // The sockets, the UCX context and its memory are the parent's. The child leaks its copies: a destructor would use them.
    static_cast<void>(loop_.release());
    new auto(ucx_);
    shared_.leak_memory();
    return;
  }
  std::lock_guard lock(lifetime_);
  shared_.shut("");
  if (thread_.joinable()) thread_.join();
  {
    std::lock_guard lock(loop_mutex_);  // a caller may still do a round
    loop_.reset();
  }
  if (is_bound_) ::unlink(options_.unix_path.c_str());
  is_bound_ = false;
}

// One round of the event loop on this thread; with `looks`, it reads ready sockets first. Returns false if this thread may not run
// the loop, or another thread runs it.
bool Core::progress(bool looks) {
  if (!is_run_by_callers() || owner_ != this_process()) return false;
  const std::unique_lock lock(loop_mutex_, std::try_to_lock);
  return lock && loop_ && loop_->progress(looks);
}

std::vector<OwnerEvent> Core::drain() {
  if (!shared_.has_events()) progress(true);
  if (shared_.has_events() || shared_.owes_signal()) return shared_.take_events();
  // A program that polls in a loop never sleeps, and the kernel may have put the peer on the same processor.
  if (is_run_by_callers()) ::sched_yield();
  return {};
}

bool Core::wait(Nanos until) {
  if (shared_.has_news()) return true;
  if (owner_ == this_process()) {  // a forked child's sockets and epoll are the parent's
    std::unique_lock lock(loop_mutex_, std::try_to_lock);
    if (lock && loop_ && !shared_.is_shut() && loop_->progress_until(lock, until)) return shared_.has_events();
  }
  return shared_.wait_for_news(until);
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
                 uint32_t ready_blocks, const Bytes32& content_digest) {
  const std::shared_ptr<const Pool> own = shared_.pool(pool);
  const bool is_checksummed = own && own->info.has_checksums && ready_blocks != 0;
  const auto count = static_cast<uint32_t>(blocks.size());
  shared_.act([&](Endpoint& endpoint, Nanos now, Effects& out) {
    endpoint.grant(id, pool, std::move(blocks), reader, ttl_ns, is_checksummed ? 0 : ready_blocks, now, out, content_digest);
  });
  if (is_checksummed) ready(id, ready_blocks, 0, ready_blocks == count);
}

void Core::ready(const TransferId& id, uint32_t blocks, uint32_t layers, bool complete) {
  const auto newly_ready = [&](const Endpoint& endpoint) { return endpoint.becoming_ready(id, blocks); };
  auto [pool, list] = shared_.look(newly_ready);
  std::vector<uint32_t> checksums;
  // This thread reads the pool's memory without the mutex. The grant may end meanwhile, but the pool stays: while a gather is
  // registered, the thread that removes the pool waits.
  struct RegisteredGather {
    ~RegisteredGather() {
      if (number != 0) shared.gathers_ended({number});
    }
    SharedEndpoint& shared;
    const uint64_t number;
  };
  if (const RegisteredGather gather{shared_, list.empty() ? 0 : shared_.begin_gather(id, 0)}; gather.number != 0) {
    const auto count = static_cast<uint32_t>(list.size());
    const Extent extent{pool, nullptr, std::make_shared<const std::vector<uint32_t>>(std::move(list)), 0, count};
    if (const OwnMemory memory = shared_.find(extent); memory && !memory.device) {  // the checksums of memory on a device are taken while it is sent
      RunningChecksums running(memory, extent, RunningChecksums::Bytes::Anywhere, "source");
      running.advance(count * memory.pool->info.block_bytes);
      checksums = running.checksums();
    }
  }
  shared_.act([&](Endpoint& endpoint, Nanos now, Effects& out) {
    if (newly_ready(endpoint).second.size() != checksums.size()) checksums.clear();  // another thread announced some of them meanwhile
    endpoint.ready(id, blocks, layers, complete, now, out, checksums);
  });
}

// A small operation is sent by this thread, if it may run the loop; a large one would keep the caller, so the IO thread sends it.
template <class F>
void Core::act(bool is_small, F&& act) {
  const bool must_wake = shared_.act_awake(std::forward<F>(act));
  if (must_wake && !(is_small && progress(false))) shared_.wake();
}

void Core::pull(uint32_t pool, TransferSpec spec) {
  spec.nonce_seed = random_seed();
  const bool is_small = spec.blocks.size() <= kSmallPost;
  act(is_small, [&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.pull(pool, std::move(spec), now, out); });
}

void Core::fetch(PostSpec spec) {
  spec.nonce_seed = random_seed();
  const bool is_small = spec.local.count() <= kSmallPost;
  act(is_small, [&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.fetch(std::move(spec), now, out); });
}

void Core::push(PostSpec spec) {
  spec.nonce_seed = random_seed();
  const bool is_small = spec.local.count() <= kSmallPost;
  act(is_small, [&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.push(std::move(spec), now, out); });
}

uint64_t Core::notify(const AgentRef& to, std::string payload) {
  uint64_t seq = 0;
  act(true, [&](Endpoint& endpoint, Nanos now, Effects& out) { seq = endpoint.notify(to, std::move(payload), now, out); });
  return seq;
}

}  // namespace kvxfer
