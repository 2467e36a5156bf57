#include "process.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace kvxfer {
namespace {

std::atomic<pid_t> current{::getpid()};
// If no handler can be installed, every call is a system call.
const bool is_told = ::pthread_atfork(nullptr, nullptr, [] { current.store(::getpid(), std::memory_order_relaxed); }) == 0;

}  // namespace

pid_t this_process() { return is_told ? current.load(std::memory_order_relaxed) : ::getpid(); }

}  // namespace kvxfer
