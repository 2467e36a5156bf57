// The core's threads take no signals: only threads that Python knows handle them.
#pragma once

#include <signal.h>

#include <initializer_list>

namespace kvxfer {

// While it exists, the calling thread takes no signals; a thread that it starts never does. Synchronous faults stay unblocked:
// otherwise the kernel would end the process at once, and no handler (Python's faulthandler, a sanitizer's) could report where.
class NoSignals {
 public:
  NoSignals() {
    sigset_t others;
    sigfillset(&others);
    for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS}) sigdelset(&others, fault);
    ::pthread_sigmask(SIG_SETMASK, &others, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace kvxfer
