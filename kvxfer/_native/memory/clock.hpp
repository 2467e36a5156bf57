// The clock of everything that waits.
#pragma once

#include <time.h>

#include "machines/ids.hpp"

namespace kvxfer {

inline Nanos monotonic_now() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return Nanos{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace kvxfer
