// The `cma` lane: a peer's memory on this host read by process_vm_readv, many runs a call, whoever allocated it.
//
// Which process is read is never the peer's word: the kernel names it at the other end of the session's own Unix socket,
// and a pidfd holds on to it. Each call also reads the 16 bytes at which that process keeps the nonce of its incarnation; bytes
// that came with another nonce, or from a process that has ended, are of nobody and count for nothing.
//
// The kernel lets one process read another where it would let it trace it. What forbids that here is told in words.
#pragma once

#include <string>

#include "copy.hpp"
#include "read_job.hpp"

struct iovec;

namespace kvxfer {

// Why this process can read no other one of its user, or cannot be read by it, and what to do about it; empty: it can.
// With a process id: why it cannot read that one.
std::string cma_obstacle(int pid = 0);

// Why this process cannot make the system calls that reading needs, whatever it would read; empty where it can.
std::string cma_missing_calls();

// The process at the other end of a Unix socket.
class CmaPeer {
 public:
  // Throws Error(no_lane).
  CmaPeer(int unix_socket, const Bytes16& boot_nonce);

  // Fills `to` from `from`, lists of as many bytes together and at most kRunsMax entries, each with room for one more
  // entry, which is for the nonce at `nonce_address`. Throws Error: no_lane, transport; Gone where the process is the right one,
  // and memory of it, or of ours, is not there.
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

// What a source says of its own memory: fills address and key. `boot_nonce` stays where it is as long as the map is good.
void describe_cma(Map& map, const void* address, const Bytes16& boot_nonce);

// Throws Error(no_lane) with the reason. Much at once is read by as many threads as `copier` takes.
std::shared_ptr<RemoteMemory> open_cma(const Map& map, std::shared_ptr<CmaPeer> peer, std::shared_ptr<Copier> copier);

}  // namespace kvxfer
