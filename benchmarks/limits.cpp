// What the machine can do at best, for benchmarks/transfer.py to compare with: one thread that copies blocks, and one plain
// TCP connection with vectored writes straight from blocks and vectored reads straight into them. No protocol at all.
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>

namespace {

constexpr size_t kIovecsMax = 1024;
constexpr size_t kCallBytes = 1 << 20;

// Moves `count` blocks in order; returns 0, or -1 where the connection broke.
template <class Call>
int move_blocks(uint8_t* base, uint64_t block_bytes, const uint32_t* blocks, uint64_t count, Call&& call) {
  uint64_t at = 0;
  const uint64_t total = block_bytes * count;
  while (at < total) {
    iovec vectors[kIovecsMax];
    size_t used = 0, bytes = 0;
    while (used < kIovecsMax && bytes < kCallBytes && at + bytes < total) {
      const uint64_t offset = (at + bytes) % block_bytes;
      const size_t size = std::min<uint64_t>(block_bytes - offset, kCallBytes - bytes);
      vectors[used++] = {base + uint64_t{blocks[(at + bytes) / block_bytes]} * block_bytes + offset, size};
      bytes += size;
    }
    const ssize_t moved = call(vectors, used);
    if (moved > 0) at += static_cast<uint64_t>(moved);
    if (moved == 0 || (moved < 0 && errno != EINTR)) return -1;
  }
  return 0;
}

}  // namespace

extern "C" {

void copy_blocks(uint8_t* to_base, const uint8_t* from_base, uint64_t block_bytes, const uint32_t* from, const uint32_t* to, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) memcpy(to_base + to[i] * block_bytes, from_base + from[i] * block_bytes, block_bytes);
}

int send_blocks(int fd, uint8_t* base, uint64_t block_bytes, const uint32_t* blocks, uint64_t count) {
  return move_blocks(base, block_bytes, blocks, count, [fd](iovec* vectors, size_t used) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = used;
    return sendmsg(fd, &message, MSG_NOSIGNAL);
  });
}

int receive_blocks(int fd, uint8_t* base, uint64_t block_bytes, const uint32_t* blocks, uint64_t count) {
  return move_blocks(base, block_bytes, blocks, count, [fd](iovec* vectors, size_t used) { return readv(fd, vectors, static_cast<int>(used)); });
}
}
