// What the machine can do at best, for the benchmarks to compare with: plain loops over system calls and memcpy, no protocol
// at all. Built into a shared library and called through ctypes; `blocks` are uint32 indices of blocks of `block_bytes`
// behind a base address, other integers are uint64 but descriptors and process ids (int).
//
//   copy_blocks     one thread's memcpy, block by block, between two mappings
//   read_blocks     process_vm_readv, `runs_a_call` blocks each time, one thread
//   send_blocks     sendmsg straight out of blocks, at most `chunk_bytes` a call, on a blocking socket
//   receive_blocks  readv straight into blocks, at most `chunk_bytes` a call; the same socket's other end
//   ask, answer     `count` round trips on a blocking socket, one byte there and `bytes` back (at most 1 MiB); ask() writes
//                   how many nanoseconds each took, and `is_polling` (int) looks at the socket without a pause
//   wake            writes an eventfd `count` times, `pause` nanoseconds apart, and the CLOCK_MONOTONIC time of each write
//
// Each but copy_blocks returns 0, or the errno that stopped it (ECONNRESET where the other end closed).
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <vector>

namespace {

constexpr size_t kIovecsMax = 1024;
constexpr size_t kAnswerBytesMax = 1 << 20;

// Moves `count` blocks in order.
template <class Call>
int move_blocks(uint8_t* base, uint64_t block_bytes, const uint32_t* blocks, uint64_t count, uint64_t chunk_bytes, Call&& call) {
  uint64_t at = 0;
  const uint64_t total = block_bytes * count;
  while (at < total) {
    iovec vectors[kIovecsMax];
    size_t used = 0, bytes = 0;
    while (used < kIovecsMax && bytes < chunk_bytes && at + bytes < total) {
      const uint64_t offset = (at + bytes) % block_bytes;
      const size_t size = std::min<uint64_t>(block_bytes - offset, chunk_bytes - bytes);
      vectors[used++] = {base + uint64_t{blocks[(at + bytes) / block_bytes]} * block_bytes + offset, size};
      bytes += size;
    }
    const ssize_t moved = call(vectors, used);
    if (moved > 0) at += static_cast<uint64_t>(moved);
    if (moved == 0) return ECONNRESET;
    if (moved < 0 && errno != EINTR) return errno;
  }
  return 0;
}

int move_whole(int fd, bool is_out, uint8_t* data, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t moved = is_out ? send(fd, data + at, bytes - at, MSG_NOSIGNAL) : recv(fd, data + at, bytes - at, MSG_WAITALL);
    if (moved == 0) return ECONNRESET;
    if (moved < 0 && errno != EINTR) return errno;
    if (moved > 0) at += static_cast<uint64_t>(moved);
  }
  return 0;
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

extern "C" {

void copy_blocks(uint8_t* to_base, const uint8_t* from_base, uint64_t block_bytes, const uint32_t* from, const uint32_t* to, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) memcpy(to_base + to[i] * block_bytes, from_base + from[i] * block_bytes, block_bytes);
}

int read_blocks(int pid, uint8_t* to_base, uint8_t* from_base, uint64_t block_bytes, const uint32_t* from, const uint32_t* to, uint64_t count,
                uint64_t runs_a_call) {
  const size_t runs_max = std::clamp<size_t>(runs_a_call, 1, kIovecsMax);
  std::vector<iovec> local(runs_max), remote(runs_max);
  for (uint64_t i = 0; i < count;) {
    size_t runs = 0;
    for (; runs < runs_max && i < count; ++runs, ++i) {
      local[runs] = {to_base + to[i] * block_bytes, block_bytes};
      remote[runs] = {from_base + from[i] * block_bytes, block_bytes};
    }
    const ssize_t got = process_vm_readv(pid, local.data(), runs, remote.data(), runs, 0);
    if (got < 0) return errno;
    if (static_cast<uint64_t>(got) != runs * block_bytes) return EFAULT;
  }
  return 0;
}

int send_blocks(int fd, uint8_t* base, uint64_t block_bytes, const uint32_t* blocks, uint64_t count, uint64_t chunk_bytes) {
  return move_blocks(base, block_bytes, blocks, count, chunk_bytes, [fd](iovec* vectors, size_t used) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = used;
    return sendmsg(fd, &message, MSG_NOSIGNAL);
  });
}

int receive_blocks(int fd, uint8_t* base, uint64_t block_bytes, const uint32_t* blocks, uint64_t count, uint64_t chunk_bytes) {
  return move_blocks(base, block_bytes, blocks, count, chunk_bytes,
                     [fd](iovec* vectors, size_t used) { return readv(fd, vectors, static_cast<int>(used)); });
}

int ask(int fd, uint64_t count, uint64_t bytes, uint64_t* nanoseconds, int is_polling) {
  std::vector<uint8_t> data(std::min<uint64_t>(bytes, kAnswerBytesMax));
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t start = now_ns();
    int error = move_whole(fd, true, data.data(), 1);
    uint8_t first;
    while (is_polling != 0 && error == 0 && recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) < 0) {
      if (errno != EAGAIN && errno != EINTR) error = errno;
    }
    if (error == 0) error = move_whole(fd, false, data.data(), data.size());
    if (error != 0) return error;
    nanoseconds[i] = now_ns() - start;
  }
  return 0;
}

int wake(int fd, uint64_t count, uint64_t pause, uint64_t* nanoseconds) {
  const timespec rest{0, static_cast<long>(pause)};
  for (uint64_t i = 0; i < count; ++i) {
    nanosleep(&rest, nullptr);
    nanoseconds[i] = now_ns();
    if (eventfd_write(fd, 1) != 0) return errno;
  }
  return 0;
}

int answer(int fd, uint64_t count, uint64_t bytes) {
  std::vector<uint8_t> data(std::min<uint64_t>(bytes, kAnswerBytesMax));
  for (uint64_t i = 0; i < count; ++i) {
    int error = move_whole(fd, false, data.data(), 1);
    if (error == 0) error = move_whole(fd, true, data.data(), data.size());
    if (error != 0) return error;
  }
  return 0;
}
}
