#include "core.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/random.h>

#include "sockets.hpp"

namespace kvxfer {
namespace {

EndpointLimits checked(EndpointLimits limits) {
  if (limits.notification_bytes_max > kNotificationMax) {
    throw Error(Code::invalid_argument, "notification_bytes_max is at most " + std::to_string(kNotificationMax));
  }
  if (limits.handshake_ns <= 0 || limits.transfers.stall_ns <= 0) throw Error(Code::invalid_argument, "handshake_ns and stall_ns must be above 0");
  return limits;
}

}  // namespace

Core::Core(AgentRef self, EndpointLimits limits, CoreAddress address)
    : limits_(checked(limits)), address_(std::move(address)), shared_(std::move(self), limits_) {}

void Core::start() {
  std::lock_guard lock(lifetime_);
  if (thread_.joinable() || shared_.is_shut()) throw Error(Code::closed, "a core starts once");
  uint16_t port = 0;
  Fd tcp = listen_tcp(address_.bind_host, address_.bind_port, port);
  Fd local;
  if (!address_.unix_path.empty()) local = listen_unix(address_.unix_path);
  is_bound_ = static_cast<bool>(local);
  owner_ = ::getpid();
  io_ = std::make_unique<IoThread>(shared_, statistics_, limits_, std::move(tcp), std::move(local));
  tcp_port_ = port;

  sigset_t all, before;  // signals are for the threads that Python knows
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "kvxfer-io");
    io_->run();
  });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Core::close() {
  if (owner_ != 0 && owner_ != ::getpid()) {  // no lock: a thread that is not here may have held it
    if (thread_.joinable()) thread_.detach();
    static_cast<void>(io_.release());
    return;
  }
  std::lock_guard lock(lifetime_);
  shared_.shut("");
  if (thread_.joinable()) thread_.join();
  io_.reset();
  if (is_bound_) ::unlink(address_.unix_path.c_str());
  is_bound_ = false;
}

void Core::add_pool(const PoolInfo& info, std::shared_ptr<Region> region, std::vector<Segment> segments) {
  check_segments(segments, info.block_count, region->bytes(), info.block_bytes, Code::invalid_argument);
  const uint64_t bytes = region->bytes();
  uint8_t* const base = region->address();
  shared_.add_pool(Pool{info, Layout{base, std::move(segments)}, bytes, std::move(region), 0});
}

void Core::add_pool(const PoolInfo& info, uint8_t* address, uint64_t bytes, std::vector<Segment> segments) {
  if (info.is_shareable) throw Error(Code::invalid_argument, "memory that kvxfer did not allocate cannot be shared");
  check_segments(segments, info.block_count, bytes, info.block_bytes, Code::invalid_argument);
  shared_.add_pool(Pool{info, Layout{address, std::move(segments)}, bytes, nullptr, 0});
}

void Core::pull(uint32_t pool, TransferSpec spec) {
  if (::getrandom(&spec.nonce_seed, sizeof spec.nonce_seed, 0) != sizeof spec.nonce_seed) throw Error(Code::internal, errno_text("getrandom"));
  shared_.act([&](Endpoint& endpoint, Nanos now, Effects& out) { endpoint.pull(pool, std::move(spec), now, out); });
}

}  // namespace kvxfer
