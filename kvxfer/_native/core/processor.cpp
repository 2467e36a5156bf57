#include "processor.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <limits>

namespace kvxfer {
namespace {

// Of the whole machine, the caller among them: "0.20 0.18 0.12 RUNNING/ALL PID". Allocates nothing: who asks may not fail.
int running_threads() noexcept {
  constexpr int kUnknown = std::numeric_limits<int>::max();
  const int fd = ::open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return kUnknown;
  char text[128];
  const ssize_t size = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (size <= 0) return kUnknown;
  text[size] = 0;
  int running;
  return std::sscanf(text, "%*s %*s %*s %d/", &running) == 1 ? running : kUnknown;
}

}  // namespace

bool is_sent_from_here(int fd) {
  int sender = -1;
  socklen_t size = sizeof sender;
  return ::getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &sender, &size) == 0 && sender == ::sched_getcpu();
}

bool move_over() {
  cpu_set_t all;
  if (::sched_getaffinity(0, sizeof all, &all) != 0 || running_threads() > CPU_COUNT(&all)) return false;
  cpu_set_t others = all;
  CPU_CLR(static_cast<size_t>(::sched_getcpu()), &others);
  if (CPU_COUNT(&others) == 0 || ::sched_setaffinity(0, sizeof others, &others) != 0) return false;
  ::sched_setaffinity(0, sizeof all, &all);
  return true;
}

void Spinning::was_away(Nanos away, Nanos now) {
  owed_ = std::min(owed(now) + away, kOwedCap);
  at_ = now;
}

}  // namespace kvxfer
