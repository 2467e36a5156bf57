// Zero-copy sends: the kernel gets references to the blocks' pages (vmsplice, splice), and a receiver under the same kernel copies
// out of them. It reads the bytes that are there at that moment. So zero-copy is only for memory that one-sided lanes may read too
// (exposure is pool), and, as there, only the confirm after the last read makes the bytes valid: until then the grant keeps the
// blocks unchanged.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <vector>

#include "memory/fd.hpp"

namespace kvxfer {

// A pipe between memory and one socket.
class SplicePipe {
 public:
  // Null if the kernel gives no pipe that is long enough.
  static std::unique_ptr<SplicePipe> open();

  // A page costs the same however few of its bytes are sent: whether these runs fill enough of their pages.
  static bool pays(const iovec* runs, size_t count);

  // Whether splice() into a Unix socket passes references without waiting. Before Linux 6.5 it took, for each page, the lock that
  // the receiver holds while it reads: a receiver that hangs would block its sender.
  static bool serves_unix();

  // Appends references to the pages of these runs, as many as fit. False if none was added: the pages cannot be referenced, or
  // there is no room.
  bool fill(const iovec* runs, size_t count);
  size_t held() const { return held_; }
  // Sends all that it holds, as send() would; returns the bytes sent, or -1 and errno. `is_more`: the kernel may keep the end back
  // for the next bytes.
  ssize_t drain(int socket, bool is_more);

 private:
  SplicePipe(Fd out, Fd in) : out_(std::move(out)), in_(std::move(in)) {}

  Fd out_, in_;
  size_t held_ = 0;
};

// A few empty pipes, kept for the next send: each takes two descriptors, and part of the user's pipe quota.
class SplicePipes {
 public:
  std::unique_ptr<SplicePipe> take();  // or null, as open()
  // Closes one that holds bytes: no other connection may send those.
  void give_back(std::unique_ptr<SplicePipe> pipe);

 private:
  std::vector<std::unique_ptr<SplicePipe>> idle_;
};

}  // namespace kvxfer
