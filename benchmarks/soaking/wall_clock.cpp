// A wall clock that can be set, for one process: loaded before libc (LD_PRELOAD), it shifts CLOCK_REALTIME by the
// nanoseconds that the file $KVXFER_SOAK_CLOCK holds (a native 64-bit integer, mapped, so a change counts at once).
// A wait until a time of the shifted clock is turned into one of the kernel's. A wait that has begun when the clock
// jumps keeps its end, and pthread_cond_timedwait is left alone, because a condition does not tell its clock. Monotonic clocks stay as they are. For the soak alone.

#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

namespace {

constexpr int64_t kSecond = 1000000000;
const volatile int64_t* shift = nullptr;

__attribute__((constructor)) void map_shift() {
  const char* path = getenv("KVXFER_SOAK_CLOCK");
  const int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void* place = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (place != MAP_FAILED) shift = static_cast<const volatile int64_t*>(place);
}

template <typename Function>
Function next(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define NEXT(name) static const auto real = next(&name, #name)

timespec moved(timespec time, int64_t by) {
  const int64_t all = int64_t(time.tv_sec) * kSecond + time.tv_nsec + by;
  int64_t seconds = all / kSecond, rest = all % kSecond;
  if (rest < 0) {
    rest += kSecond;
    --seconds;
  }
  return {time_t(seconds), long(rest)};
}

int64_t now_shift() { return shift == nullptr ? 0 : *shift; }

timespec of_kernel(const timespec* time) { return moved(*time, -now_shift()); }

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* out) noexcept {
  NEXT(clock_gettime);
  const int result = real(clock, out);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *out = moved(*out, now_shift());
  return result;
}

int gettimeofday(timeval* out, void*) noexcept {
  timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  *out = {now.tv_sec, suseconds_t(now.tv_nsec / 1000)};
  return 0;
}

time_t time(time_t* out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}

int timespec_get(timespec* out, int base) noexcept {
  return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, out) == 0 ? base : 0;
}

int sem_timedwait(sem_t* semaphore, const timespec* until) {
  NEXT(sem_timedwait);
  const timespec at = of_kernel(until);
  return real(semaphore, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t* mutex, const timespec* until) noexcept {
  NEXT(pthread_mutex_timedlock);
  const timespec at = of_kernel(until);
  return real(mutex, &at);
}

// abseil, which gRPC waits with, asks the kernel itself.
long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& each : a) each = va_arg(list, long);
  va_end(list);
  NEXT(syscall);
  timespec at;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) != 0 && a[3] != 0) {
    at = of_kernel(reinterpret_cast<const timespec*>(a[3]));
    a[3] = reinterpret_cast<long>(&at);
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"
