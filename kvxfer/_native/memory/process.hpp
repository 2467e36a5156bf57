// Which process this is, for what must not be used by another: a forked child has a copy of all memory, and of nothing else.
#pragma once

#include <sys/types.h>

namespace kvxfer {

// As getpid(), without a system call: a handler of fork() renews the number in a child before any other code of it runs.
pid_t this_process();

}  // namespace kvxfer
