#include "processors.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <limits>

namespace kvxfer {
namespace {

// Of the whole machine, with the caller: "0.20 0.18 0.12 RUNNING/ALL PID".
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
  // 0, which does not even count the caller, comes from a sandbox that hides its host.
  return std::sscanf(text, "%*s %*s %*s %d/", &running) == 1 && running > 0 ? running : kUnknown;
}

}  // namespace

cpu_set_t own_processors() noexcept {
  cpu_set_t own;
  if (::sched_getaffinity(0, sizeof own, &own) != 0) CPU_ZERO(&own);
  return own;
}

int idle_processors(const cpu_set_t& of) noexcept { return CPU_COUNT(&of) - running_threads(); }

}  // namespace kvxfer
