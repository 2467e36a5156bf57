#include "owner_memory.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "memory/fd.hpp"

namespace kvxfer {
namespace {

constexpr size_t kPartBytes = 32 * 1024;
constexpr size_t kRunsMax = 64;  // of one call

using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

std::atomic<bool> is_call_refused{false};  // by the kernel or a filter: permanently

size_t bytes_of(const iovec* runs, size_t count) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += runs[i].iov_len;
  return bytes;
}

// A part of the owner's runs, from a byte on.
struct RunsPart {
  RunsPart(const iovec* from, size_t from_count, size_t begin, size_t max) {
    for (size_t i = 0; i < from_count && count < kRunsMax && bytes < max; ++i) {
      if (begin >= from[i].iov_len) {
        begin -= from[i].iov_len;
        continue;
      }
      const size_t size = std::min(from[i].iov_len - begin, max - bytes);
      runs[count++] = {static_cast<uint8_t*>(from[i].iov_base) + begin, size};
      bytes += size;
      begin = 0;
    }
  }
  iovec runs[kRunsMax];
  size_t count = 0, bytes = 0;
};

// How many bytes the kernel moved before the first missing or refused one.
size_t by_call(Call call, uint8_t* ours, const iovec* runs, size_t count) {
  size_t done = 0;
  for (const size_t total = bytes_of(runs, count); done < total && !is_call_refused.load(std::memory_order_relaxed);) {
    const RunsPart part(runs, count, done, total);
    const iovec own{ours + done, part.bytes};
    const ssize_t moved = call(::getpid(), &own, 1, part.runs, part.count, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && errno != EFAULT && errno != ENOMEM) is_call_refused.store(true, std::memory_order_relaxed);
    if (moved <= 0) break;
    done += static_cast<size_t>(moved);
    if (static_cast<size_t>(moved) != part.bytes) break;
  }
  return done;
}

class Pipe {
 public:
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) fail_errno(Code::transport, "no pipe to read memory through");
    out_ = Fd(ends[0]);
    in_ = Fd(ends[1]);
  }
  // Copies from the first list into the second, as much as that holds. False if either is unreadable.
  bool move(const iovec* from, size_t from_count, const iovec* to, size_t to_count, size_t& moved) {
    ssize_t held, taken;
    do {
      held = ::writev(in_.get(), from, static_cast<int>(from_count));
    } while (held < 0 && errno == EINTR);
    if (held <= 0) return false;
    RunsPart into(to, to_count, 0, static_cast<size_t>(held));
    do {
      taken = ::readv(out_.get(), into.runs, static_cast<int>(into.count));
    } while (taken < 0 && errno == EINTR);
    if (taken <= 0) return false;
    moved = static_cast<size_t>(taken);
    return taken == held;
  }

 private:
  Fd out_, in_;
};

// The rest, from byte `done` on.
size_t by_pipe(uint8_t* ours, const iovec* runs, size_t count, size_t done, bool is_read) {
  const size_t total = bytes_of(runs, count);
  if (done == total) return done;
  Pipe pipe;
  for (bool is_there = true; is_there && done < total;) {
    const RunsPart part(runs, count, done, kPartBytes);
    const iovec own{ours + done, part.bytes};
    size_t moved = 0;
    is_there = is_read ? pipe.move(part.runs, part.count, &own, 1, moved) : pipe.move(&own, 1, part.runs, part.count, moved);
    done += moved;
  }
  return done;
}

}  // namespace

size_t copy_from_owner(uint8_t* to, const iovec* runs, size_t count) {
  return by_pipe(to, runs, count, by_call(::process_vm_readv, to, runs, count), true);
}

size_t copy_to_owner(const iovec* runs, size_t count, const uint8_t* from) {
  uint8_t* const ours = const_cast<uint8_t*>(from);
  return by_pipe(ours, runs, count, by_call(::process_vm_writev, ours, runs, count), false);
}

size_t readable_bytes(const iovec* runs, size_t count) {
  uint8_t bytes[kPartBytes];
  size_t done = 0;
  for (const size_t total = bytes_of(runs, count); done < total;) {
    const RunsPart part(runs, count, done, sizeof bytes);
    const size_t read = copy_from_owner(bytes, part.runs, part.count);
    done += read;
    if (read != part.bytes) break;
  }
  return done;
}

}  // namespace kvxfer
