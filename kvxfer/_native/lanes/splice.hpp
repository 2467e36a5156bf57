// Blocks into a socket without a copy: the kernel is given references to their pages (vmsplice, splice), and a receiver
// under the same kernel copies out of those. What it reads is what is there when it reads. So this is for memory that
// one-sided lanes may read too (exposure is pool), and, as there, it is the confirm after the last read that makes the bytes
// count: until then its grant keeps the blocks as they are.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <vector>

#include "memory/fd.hpp"

namespace kvxfer {

// What is on its way from memory into one socket.
class SplicePipe {
 public:
  // Null where the kernel gives none that is long enough to be worth it.
  static std::unique_ptr<SplicePipe> open();

  // Pages cost the same however little of each is sent: whether these runs have enough of theirs.
  static bool pays(const iovec* runs, size_t count);

  // Whether splice() into a Unix socket gives references and waits for nobody. Before Linux 6.5 it took the lock that the
  // receiver holds while it reads, for each page: a receiver that hangs would hold its sender up.
  static bool serves_unix();

  // References the pages of these runs behind what is held already, as many as there is room for. False where it could be
  // none: they are no memory of ours whose pages can be referenced, or there is no room.
  bool fill(const iovec* runs, size_t count);
  size_t held() const { return held_; }
  // Everything that is held, as send() would; returns the bytes that went, or -1 and errno. `is_more`: the end of it may wait
  // in the kernel for what is sent next.
  ssize_t drain(int socket, bool is_more);

 private:
  SplicePipe(Fd out, Fd in) : out_(std::move(out)), in_(std::move(in)) {}

  Fd out_, in_;
  size_t held_ = 0;
};

// A few that are empty, for whoever needs one next: each has two descriptors, and a share of what its user may have.
class SplicePipes {
 public:
  std::unique_ptr<SplicePipe> take();  // or null, as open()
  // One that holds something is closed: nobody else may send that.
  void give_back(std::unique_ptr<SplicePipe> pipe);

 private:
  std::vector<std::unique_ptr<SplicePipe>> idle_;
};

}  // namespace kvxfer
