#include "processor.hpp"

#include <sched.h>
#include <sys/socket.h>

#include <fstream>
#include <limits>

namespace kvxfer {
namespace {

// Of the whole machine, the caller among them: "0.20 0.18 0.12 RUNNING/ALL PID".
int running_threads() {
  std::ifstream file("/proc/loadavg");
  double load;
  int running;
  return file >> load >> load >> load >> running ? running : std::numeric_limits<int>::max();
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
