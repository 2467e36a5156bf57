#include "cma.hpp"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <algorithm>
#include <exception>
#include <fstream>
#include <vector>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace kvxfer {
namespace {

constexpr size_t kCallBytes = 4 << 20;  // of one call: a thousand small blocks, and not so long that others wait
constexpr size_t kPartBytes = 256 << 10;  // the least for each of several simultaneous calls
constexpr int kCapSysPtrace = 19;
constexpr const char* kNotToBeHad = "process_vm_readv is not to be had: a kernel without it, or a seccomp profile that has to allow it";
constexpr const char* kYamaScope = "/proc/sys/kernel/yama/ptrace_scope";

// 0 where the kernel has no Yama, or it forbids nothing.
int yama_scope() {
  int scope = 0;
  std::ifstream(kYamaScope) >> scope;
  return scope;
}

bool can_trace_anybody() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 7, "CapEff:") == 0) return (std::stoull(line.substr(7), nullptr, 16) >> kCapSysPtrace & 1) != 0;
  }
  return false;
}

std::string yama_text(int scope) {
  const std::string how = scope >= 3 ? "which nothing but a reboot with another setting lifts"
                                     : "as root: sysctl kernel.yama.ptrace_scope=0, or give it CAP_SYS_PTRACE";
  return std::string(kYamaScope) + " is " + std::to_string(scope) + " (" + how + ")";
}

bool is_held_back_by(int scope) { return scope != 0 && (scope >= 3 || !can_trace_anybody()); }

std::string joined(const std::vector<std::string>& reasons) {
  std::string text = reasons.front();
  for (size_t i = 1; i < reasons.size(); ++i) text += "; " + reasons[i];
  return text;
}

// The possible reasons for EPERM on that process: all of them, since removing one of two obstacles does not help. The directory of
// a process in /proc belongs to its user; the files in it belong to root once the process is not dumpable.
std::string refusal_text(int pid) {
  std::vector<std::string> reasons;
  const int scope = yama_scope();
  if (is_held_back_by(scope)) reasons.push_back(yama_text(scope));
  const std::string directory = "/proc/" + std::to_string(pid);
  struct stat owned {}, shown {};
  if (::stat(directory.c_str(), &owned) != 0 || ::stat((directory + "/stat").c_str(), &shown) != 0) {
    reasons.push_back("the source cannot be seen in /proc: it is another user's, or not dumpable (run both as one user; do not start it setuid or with file capabilities)");
  } else if (owned.st_uid != shown.st_uid) {
    reasons.push_back("the source is not dumpable (do not start it setuid or with file capabilities)");
  } else if (shown.st_uid != ::geteuid()) {
    reasons.push_back(shown.st_uid == 0 ? "the source is root's (run both as one user)" : "the source is another user's process (run both as one user, or give this one CAP_SYS_PTRACE)");
  } else if (reasons.empty()) {
    reasons.push_back("the source is not dumpable, has more capabilities or another group than this process, or a filter of system calls forbids it (run both alike)");
  }
  return "ptrace is not allowed: " + joined(reasons);
}

// A descriptor for the process at the other end of a Unix socket, which stays valid if its number is reused; or errno.
int hold_peer(int unix_socket, int pid) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0) return fd;
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
}

class CmaMemory final : public RemoteMemory {
 public:
  CmaMemory(const Map& map, std::shared_ptr<CmaPeer> from, std::shared_ptr<Copier> threads)
      : RemoteMemory(map), peer(std::move(from)), copier(std::move(threads)) {
    if (map.key.size() != sizeof nonce_address) throw Error(Code::no_lane, "the source does not say where its nonce lies");
    for (size_t i = 0; i < sizeof nonce_address; ++i) nonce_address |= uint64_t{static_cast<uint8_t>(map.key[i])} << 8 * i;
    uint64_t end;
    if (map.address == 0 || __builtin_add_overflow(map.address, bytes(), &end)) throw Error(Code::no_lane, "the source's memory wraps around");
    iovec to[1], from_list[1];
    peer->read(to, 0, from_list, 0, 0, nonce_address);  // now the cause of a refusal can be determined
  }

  std::unique_ptr<ReadJob> open(ReadBlocks read, RemotePlace from, OwnMemory to) const override;

  const std::shared_ptr<CmaPeer> peer;
  const std::shared_ptr<Copier> copier;
  uint64_t nonce_address = 0;
  mutable bool has_worked = false;  // some bytes came
};

// Of a list of more bytes than that.
const uint8_t* byte_at(const iovec* runs, size_t count, size_t at) {
  size_t i = 0;
  for (; i + 1 < count && at >= runs[i].iov_len; ++i) at -= runs[i].iov_len;
  return static_cast<const uint8_t*>(runs[i].iov_base) + at;
}

// Takes up to `count` runs of up to `max` bytes together off the walk. Returns how many, and adds their bytes to `bytes`.
size_t take_runs(BlockWalk& walk, iovec* out, size_t count, size_t max, size_t& bytes) {
  size_t used = 0;
  for (BlockWalk::Span span; used < count && (span = walk.take(max)).size != 0; ++used) {
    out[used] = {span.data, span.size};
    bytes += span.size;
    max -= span.size;
    if (max == 0) return used + 1;
  }
  return used;
}

class CmaRead final : public ReadJob {
 public:
  CmaRead(ReadBlocks read, RemotePlace from, OwnMemory to, const CmaMemory& memory)
      : ReadJob(std::move(read), std::move(from), std::move(to)), memory_(memory), from_(walk_source()), to_(walk_target()) {}

  bool is_done() const override { return to_.is_done(); }

  size_t read(size_t max) override {
    size_t done = 0;
    while (done < max && !to_.is_done()) {
      const size_t bytes = read_some(max - done);
      verify(bytes);
      done += bytes;
    }
    return done;
  }

 private:
  struct Call {
    std::unique_ptr<iovec[]> from{new iovec[CmaPeer::kRunsMax + 1]}, to{new iovec[CmaPeer::kRunsMax + 1]};  // one more, for the nonce
    size_t from_count = 0, to_count = 0, bytes = 0;
    uint64_t begin = 0;  // of its bytes, in the whole read
    std::exception_ptr error;
  };

  // In one call, or in several at once if there are threads for them.
  size_t read_some(size_t max) {
    const size_t threads = memory_.copier->threads(max);
    const size_t each = std::clamp((max + threads - 1) / threads, std::min(kPartBytes, max), kCallBytes);
    size_t used = 0, bytes = 0;
    for (; used < threads && bytes < max && !to_.is_done(); bytes += calls_[used++].bytes) {
      if (used == calls_.size()) calls_.emplace_back();
      take(calls_[used], std::min(each, max - bytes));
      calls_[used].begin = read_ + bytes;
      calls_[used].error = nullptr;
      effort_.runs += std::max(calls_[used].from_count, calls_[used].to_count);
    }
    const auto make = [this](size_t i) noexcept {
      Call& call = calls_[i];
      try {
        memory_.peer->read(call.to.get(), call.to_count, call.from.get(), call.from_count, call.bytes, memory_.nonce_address);
      } catch (...) {
        call.error = std::current_exception();
      }
    };
    effort_.calls += used;
    used == 1 ? make(0) : memory_.copier->share(threads, used, make);
    try {
      for (size_t i = 0; i < used; ++i) {
        if (!calls_[i].error) continue;
        try {
          std::rethrow_exception(calls_[i].error);
        } catch (const CmaPeer::Gone& gone) {
          throw gone.is_own ? memory_gone("destination", *target().layout, filled(), calls_[i].begin + gone.at)
                            : memory_gone("source", source().layout, asked(), calls_[i].begin + gone.at);
        }
      }
    } catch (const Error& error) {  // memory that was readable is gone: the source sends the cause, and other lanes would fail too
      if (error.code() == Code::no_lane && memory_.has_worked) throw Error(Code::transport, error.what());
      throw;
    }
    memory_.has_worked = true;
    read_ += bytes;
    return bytes;
  }

  void take(Call& call, size_t max) {
    const BlockWalk from_before = from_;
    size_t to_bytes = 0;
    call.bytes = 0;
    call.from_count = take_runs(from_, call.from.get(), CmaPeer::kRunsMax, max, call.bytes);
    call.to_count = take_runs(to_, call.to.get(), CmaPeer::kRunsMax, call.bytes, to_bytes);
    if (to_bytes < call.bytes) {  // the target is cut into more runs
      from_ = from_before;
      call.bytes = 0;
      call.from_count = take_runs(from_, call.from.get(), CmaPeer::kRunsMax, to_bytes, call.bytes);
    }
    if (call.bytes == 0 || call.bytes != to_bytes) throw Error(Code::internal, "a read must fill as many bytes as it reads");
  }

  const CmaMemory& memory_;  // one of those that this read keeps
  BlockWalk from_, to_;
  std::vector<Call> calls_;
  uint64_t read_ = 0;  // so far
};

std::unique_ptr<ReadJob> CmaMemory::open(ReadBlocks read, RemotePlace from, OwnMemory to) const {
  return std::make_unique<CmaRead>(std::move(read), std::move(from), std::move(to), *this);
}

}  // namespace

std::string cma_missing_calls() {
  uint64_t here = 1, there = 2;
  const iovec to{&here, sizeof here}, from{&there, sizeof there};
  if (::process_vm_readv(::getpid(), &to, 1, &from, 1, 0) != static_cast<ssize_t>(sizeof here)) return kNotToBeHad;
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return errno_text("no Unix socket can be made");
  const Fd one(ends[0]), other(ends[1]);
  const Fd held(hold_peer(one.get(), ::getpid()));
  return held ? "" : errno_text("pidfd_open is not to be had (a kernel without it, or a seccomp profile that has to allow it)");
}

std::string cma_obstacle(int pid) {
  const std::string missing = cma_missing_calls();
  if (!missing.empty()) return missing;
  if (pid != 0) {  // it can be read: only our address means nothing there
    uint64_t here = 1;
    const iovec to{&here, sizeof here}, nowhere{reinterpret_cast<void*>(8), 8};
    const bool is_read = ::process_vm_readv(pid, &to, 1, &nowhere, 1, 0) >= 0 || errno == EFAULT;
    return is_read ? "" : errno == EPERM ? refusal_text(pid) : errno_text("process " + std::to_string(pid) + " cannot be read");
  }
  std::vector<std::string> reasons;
  const int scope = yama_scope();
  if (is_held_back_by(scope)) reasons.push_back("ptrace is not allowed: " + yama_text(scope));
  if (::prctl(PR_GET_DUMPABLE) != 1) reasons.push_back("this process is not dumpable, so no other can read it (do not start it setuid or with file capabilities)");
  return reasons.empty() ? "" : joined(reasons);
}

CmaPeer::CmaPeer(int unix_socket, const Bytes16& boot_nonce) : boot_nonce_(boot_nonce) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0) {
    throw Error(Code::no_lane, "the source's process cannot be seen from here (another pid namespace)");
  }
  pid_ = peer.pid;
  pidfd_ = Fd(hold_peer(unix_socket, pid_));
  if (!pidfd_) throw Error(Code::no_lane, errno_text("cannot hold on to the source's process (pidfd_open)"));
}

bool CmaPeer::is_alive() const {
  pollfd look{pidfd_.get(), POLLIN, 0};
  return ::poll(&look, 1, 0) == 0;
}

// The memory names its process; a process that is about to end, or to exec, no longer does.
bool CmaPeer::has_nonce(uint64_t nonce_address) const {
  Bytes16 nonce{};
  const iovec to{nonce.data(), nonce.size()}, from{reinterpret_cast<void*>(nonce_address), nonce.size()};
  return ::process_vm_readv(pid_, &to, 1, &from, 1, 0) == static_cast<ssize_t>(nonce.size()) && nonce == boot_nonce_;
}

bool CmaPeer::is_readable(const void* address) const {
  uint8_t byte;
  const iovec to{&byte, 1}, from{const_cast<void*>(address), 1};
  return ::process_vm_readv(pid_, &to, 1, &from, 1, 0) == 1;
}

void CmaPeer::fail(int error) const {
  if (error == ESRCH || !is_alive()) throw Error(Code::transport, "the source's process has ended");
  if (error == EPERM) throw Error(Code::no_lane, refusal_text(pid_));
  if (error == ENOSYS) throw Error(Code::no_lane, kNotToBeHad);
  if (error == EFAULT) throw Error(Code::no_lane, "the source's memory is not where it says");
  throw Error(Code::no_lane, errno_text("process_vm_readv", error));
}

void CmaPeer::read(iovec* to, size_t to_count, iovec* from, size_t from_count, size_t bytes, uint64_t nonce_address) const {
  Bytes16 nonce{};
  to[to_count++] = {nonce.data(), nonce.size()};
  from[from_count++] = {reinterpret_cast<void*>(nonce_address), nonce.size()};
  ssize_t got;
  do {
    got = ::process_vm_readv(pid_, to, to_count, from, from_count, 0);
  } while (got < 0 && errno == EINTR);
  const int error = got < 0 ? errno : EFAULT;  // it stops silently at the first missing byte
  const size_t there = static_cast<size_t>(std::max<ssize_t>(got, 0));
  if (error == EFAULT && there < bytes && is_alive() && has_nonce(nonce_address)) {
    const uint8_t* const read_from = byte_at(from, from_count, there);
    throw Gone{there, is_readable(read_from)};
  }
  if (got < 0 || there != bytes + nonce.size()) fail(error);
  if (nonce != boot_nonce_) throw Error(Code::transport, "the source's process is not the one that the session was made with");
  if (!is_alive()) throw Error(Code::transport, "the source's process has ended");
}

void describe_cma(Map& map, const void* address, const Bytes16& boot_nonce) {
  map.address = reinterpret_cast<uintptr_t>(address);
  map.key.clear();
  for (int i = 0; i < 8; ++i) map.key += static_cast<char>(reinterpret_cast<uintptr_t>(boot_nonce.data()) >> 8 * i & 0xFF);
}

std::shared_ptr<RemoteMemory> open_cma(const Map& map, std::shared_ptr<CmaPeer> peer, std::shared_ptr<Copier> copier) {
  return std::make_shared<CmaMemory>(map, std::move(peer), std::move(copier));
}

}  // namespace kvxfer
