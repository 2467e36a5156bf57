#include "splice.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/utsname.h>
#include <time.h>

#include <cstdio>

namespace kvxfer {
namespace {

constexpr int kPipeBytes = 512 * 1024;       // has room for 128 pages, or parts of pages
constexpr int kPipeBytesMin = 64 * 1024;     // what a pipe has, unless its user has too many
constexpr size_t kIdleMax = 4;
constexpr size_t kPageBytes = 4096;
constexpr size_t kOfPageMin = 3072;          // with half of each page zero-copy is slower than copying

// splice() has no MSG_NOSIGNAL: a peer that hung up would kill a process that does not ignore SIGPIPE.
class NoSigpipe {
 public:
  NoSigpipe() {
    ::sigemptyset(&only_);
    ::sigaddset(&only_, SIGPIPE);
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &only_, &before_);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;
  ~NoSigpipe() {
    const int error = errno;
    if (may_be_raised && !was_pending_) {
      const timespec now{};
      ::sigtimedwait(&only_, nullptr, &now);
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  bool may_be_raised = false;

 private:
  sigset_t only_, before_;
  bool was_pending_;
};

}  // namespace

std::unique_ptr<SplicePipe> SplicePipe::open() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return nullptr;
  Fd out(ends[0]), in(ends[1]);
  ::fcntl(in.get(), F_SETPIPE_SZ, kPipeBytes);
  if (::fcntl(in.get(), F_GETPIPE_SZ) < kPipeBytesMin) return nullptr;
  return std::unique_ptr<SplicePipe>(new SplicePipe(std::move(out), std::move(in)));
}

bool SplicePipe::pays(const iovec* runs, size_t count) {
  size_t pages = 0, bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto at = reinterpret_cast<uintptr_t>(runs[i].iov_base);
    pages += (at + runs[i].iov_len - 1) / kPageBytes - at / kPageBytes + 1;
    bytes += runs[i].iov_len;
  }
  return bytes >= pages * kOfPageMin;
}

bool SplicePipe::serves_unix() {
  static const bool does = [] {
    utsname system{};
    int major = 0, minor = 0;
    if (::uname(&system) != 0 || std::sscanf(system.release, "%d.%d", &major, &minor) != 2) return false;
    return major > 6 || (major == 6 && minor >= 5);
  }();
  return does;
}

bool SplicePipe::fill(const iovec* runs, size_t count) {
  ssize_t filled;
  do {
    filled = ::vmsplice(in_.get(), runs, count, SPLICE_F_NONBLOCK);
  } while (filled < 0 && errno == EINTR);
  if (filled <= 0) return false;
  held_ += static_cast<size_t>(filled);
  return true;
}

ssize_t SplicePipe::drain(int socket, bool is_more) {
  NoSigpipe no_sigpipe;
  const ssize_t sent = ::splice(out_.get(), nullptr, socket, nullptr, held_, SPLICE_F_NONBLOCK | (is_more ? SPLICE_F_MORE : 0));
  no_sigpipe.may_be_raised = sent < 0 || static_cast<size_t>(sent) < held_;  // also after a partial write
  if (sent > 0) held_ -= static_cast<size_t>(sent);
  return sent;
}

std::unique_ptr<SplicePipe> SplicePipes::take() {
  if (idle_.empty()) return SplicePipe::open();
  std::unique_ptr<SplicePipe> pipe = std::move(idle_.back());
  idle_.pop_back();
  return pipe;
}

void SplicePipes::give_back(std::unique_ptr<SplicePipe> pipe) {
  if (pipe && pipe->held() == 0 && idle_.size() < kIdleMax) idle_.push_back(std::move(pipe));
}

}  // namespace kvxfer
