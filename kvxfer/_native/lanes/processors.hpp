// Which processors a thread may run on, and how many of them have nothing to run.
#pragma once

#include <sched.h>

namespace kvxfer {

// Those on which the calling thread may run; empty where the kernel does not say.
cpu_set_t own_processors() noexcept;

// How many of these have nothing to run; negative: so many threads more want to run than there are processors. The kernel
// tells only how many threads of the whole machine want to run, so the count may be too small. Never throws.
int idle_processors(const cpu_set_t& of) noexcept;

}  // namespace kvxfer
