#include "processors.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <limits>
#include <utility>

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
  // Fewer than the caller alone: of a sandbox that says nothing of its host.
  return std::sscanf(text, "%*s %*s %*s %d/", &running) == 1 && running > 0 ? running : kUnknown;
}

// Of whoever sent what came last over this connection, where it is TCP within one kernel; negative: not known.
int incoming_processor(int fd) noexcept {
  int processor = -1;
  socklen_t size = sizeof processor;
  return ::getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &processor, &size) == 0 ? processor : -1;
}

}  // namespace

cpu_set_t own_processors() noexcept {
  cpu_set_t own;
  if (::sched_getaffinity(0, sizeof own, &own) != 0) CPU_ZERO(&own);
  return own;
}

int idle_processors(const cpu_set_t& of) noexcept { return CPU_COUNT(&of) - running_threads(); }

void Asker::heard(int fd, Nanos now) {
  if (now - std::exchange(heard_at_, now) < kPause) return;
  processor_ = now - said_at_ < kPause ? -1 : incoming_processor(fd);
}

bool KeepOff::flows(int fd, const Asker& asker, Nanos now) {
  flowed_at_ = now;
  if (is_on_ || now - began_at_ < kTryAgain) return false;
  leaves_ = ::sched_getcpu();
  if (asker.processor() != leaves_ || incoming_processor(fd) != leaves_) return false;
  began_at_ = now;
  return true;
}

bool KeepOff::begin() {
  all_ = own_processors();
  if (idle_processors(all_) < 0) return false;
  others_ = all_;
  CPU_CLR(static_cast<size_t>(leaves_), &others_);
  is_on_ = CPU_COUNT(&others_) != 0 && ::sched_setaffinity(0, sizeof others_, &others_) == 0;
  return is_on_;
}

void KeepOff::end() {
  if (!std::exchange(is_on_, false)) return;
  cpu_set_t now;
  if (::sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &others_)) ::sched_setaffinity(0, sizeof all_, &all_);
}

void Spinning::was_away(Nanos away, Nanos now) {
  owed_ = std::min(owed(now) + away, kOwedCap);
  at_ = now;
}

}  // namespace kvxfer
