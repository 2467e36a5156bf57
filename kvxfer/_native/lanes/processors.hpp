// Which processors a thread may run on, and how many of them are idle.
#pragma once

#include <sched.h>

namespace kvxfer {

// The processors that the calling thread may run on; empty if the kernel does not say.
cpu_set_t own_processors() noexcept;

// How many of these are idle; negative: so many more threads are runnable than there are processors. The kernel only counts the
// runnable threads of the whole machine, so the result may be too small. Never throws.
int idle_processors(const cpu_set_t& of) noexcept;

}  // namespace kvxfer
