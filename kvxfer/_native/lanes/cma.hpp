// The `cma` lane: reads a peer's memory on this host by process_vm_readv, many runs a call; any allocator may have made the memory.
//
// The peer does not choose the process to read: the kernel names the process at the other end of the session's own Unix socket, and
// a pidfd keeps its identity. Each call also reads the 16 bytes where that process keeps the nonce of its incarnation; bytes that
// came with another nonce, or from a process that has ended, are thrown away.
//
// The kernel lets one process read another if it would let it trace it. The functions below say what forbids that here.
#pragma once

#include <string>

#include "copy.hpp"
#include "read_job.hpp"

struct iovec;

namespace kvxfer {

// Why this process can read no other process of its user, or cannot be read by it, and what to do about it; empty: it can. With a
// process id: why it cannot read that process.
std::string cma_obstacle(int pid = 0);

// Why this process cannot make the system calls that reading needs, whatever the target; empty: it can.
std::string cma_missing_calls();

// The process at the other end of a Unix socket.
class CmaPeer {
 public:
  // Throws Error(no_lane).
  CmaPeer(int unix_socket, const Bytes16& boot_nonce);

  // Fills `to` from `from`: lists with the same number of bytes and at most kRunsMax entries, each with room for one more entry,
  // for the nonce at `nonce_address`. Throws Error: no_lane, transport; Gone if the process is the right one, and its memory, or
  // ours, is not there.
  void read(iovec* to, size_t to_count, iovec* from, size_t from_count, size_t bytes, uint64_t nonce_address) const;

  static constexpr size_t kRunsMax = 1023;

  struct Gone {
    size_t at;      // the byte that cannot be read or written
    bool is_own;    // it is the target that is gone
  };

 private:
  bool is_alive() const;
  bool has_nonce(uint64_t nonce_address) const;
  bool is_readable(const void* address) const;
  [[noreturn]] void fail(int error) const;

  int pid_ = 0;
  Fd pidfd_;
  const Bytes16 boot_nonce_;
};

// The map of a source's own memory: fills address and key. `boot_nonce` must stay where it is as long as the map is used.
void describe_cma(Map& map, const void* address, const Bytes16& boot_nonce);

// Throws Error(no_lane) with the reason. `copier` decides how many threads share a large read.
std::shared_ptr<RemoteMemory> open_cma(const Map& map, std::shared_ptr<CmaPeer> peer, std::shared_ptr<Copier> copier);

}  // namespace kvxfer
