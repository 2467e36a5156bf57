// The `stream` lane, and `unix`, which is the same over a Unix socket: the blocks or elements of one DATA frame on their way
// out of, or into, our memory. Vectored writes straight from them, vectored reads straight into them; no byte is copied in
// between. Where the frame has checksums they are taken of each chunk just before it goes out, and just after it came in,
// while it is in the cache. Memory on a device goes by pinned host memory (staging.hpp).
//
// What is left of a frame whose grant ended goes out as zeros, of which nobody knew the checksums: all of that frame's are
// kNoChecksum then, and a block without a checksum is not compared. It is never committed either: its source gives no verdict ok.
#pragma once

#include <optional>

#include "machines/endpoint.hpp"
#include "memory/pool.hpp"
#include "staging.hpp"

namespace kvxfer {

constexpr uint32_t kNoChecksum = 0x9d1ce5a7;  // as likely to be a checksum as any other

// CRC-32C of each of some blocks or elements, as their bytes pass in order.
class RunningChecksums {
 public:
  enum class Bytes { InCache, Anywhere };  // where they are when they are checksummed
  // The checksum of foreign memory, which may be unmapped, is taken of a copy: see owner_memory.hpp. `whose`: as memory_gone() takes it.
  RunningChecksums(const OwnMemory& memory, const Extent& extent, Bytes are, const char* whose);
  // The next `bytes` are what they are. Throws Error(memory_gone).
  void advance(size_t bytes);
  // As they lie at `data`, and not where the blocks do.
  void advance(const uint8_t* data, size_t bytes);
  uint64_t passed() const { return passed_; }
  const std::vector<uint32_t>& checksums() const { return checksums_; }  // of those that have passed whole

 private:
  void add(const uint8_t* data, size_t bytes, const uint8_t* ahead = nullptr);  // of one block
  void advance_copied(size_t bytes);
  uint64_t bytes_of(uint32_t i) const { return block_bytes_ != 0 ? block_bytes_ : extent_->ranges->bytes_of((*extent_)[i]); }

  const Layout* layout_;
  const Extent* extent_;
  Bytes are_;
  const char* whose_;
  bool is_ours_;
  uint64_t block_bytes_ = 0;  // of each; 0 where they differ
  BlockWalk walk_;
  uint64_t left_ = 0, passed_ = 0;
  uint32_t checksum_ = 0;
  std::vector<uint32_t> checksums_;
};

struct OutgoingBlocks {
  OutgoingBlocks(SendData send, OwnMemory from, Staging& staging);
  OutgoingBlocks(const OutgoingBlocks&) = delete;
  OutgoingBlocks& operator=(const OutgoingBlocks&) = delete;

  // Where checksums are to be taken: takes those of the next `bytes` from the walk's position on, where they are not known.
  // Throws Error(memory_gone).
  void add_checksums(size_t bytes);
  // The same of bytes that were gathered.
  void add_checksums(const uint8_t* data, size_t bytes);
  void sent(size_t bytes) {
    left -= bytes;
    if (has_ended) return;
    if (!is_staged) return walk.advance(bytes);
    if (gather) gather->sent(bytes);
  }
  // Checksums as they go over the wire, once `left` is 0; begins at what is still to be sent of them.
  std::pair<const char*, size_t> trailer();
  // Its grant has: zeros go out from here on, and the memory may go.
  void end();
  bool is_done() const { return left == 0 && trailer_left == 0; }
  uint64_t payload_bytes() const;  // of all blocks, without their checksums

  const Data frame;
  const uint64_t serial;  // of the grant
  const Extent extent;
  OwnMemory memory;
  uint64_t left;          // of the blocks
  size_t trailer_left;    // of their checksums
  BlockWalk walk;
  const bool is_staged;   // the blocks are on a device
  std::unique_ptr<Gather> gather;
  bool is_zero_copy;           // the kernel is to have references to their pages, no copy
  bool has_ended = false;

 private:
  std::optional<RunningChecksums> running_;
  std::vector<uint32_t> known_;
  std::string trailer_;
  bool has_no_checksums_ = false;
};

struct IncomingBlocks {
  IncomingBlocks(const Data& data, Landing landing, OwnMemory to, Staging& staging);
  IncomingBlocks(const IncomingBlocks&) = delete;
  IncomingBlocks& operator=(const IncomingBlocks&) = delete;

  // `bytes` more of the blocks are in place. Throws Error: transport, memory_gone.
  void landed(size_t bytes) {
    if (scatter) return scatter_more(bytes);
    walk.advance(bytes);
    left -= bytes;
    if (running_) running_->advance(bytes);
  }
  // Where the next bytes may be written, at most `max`; returns how many iovecs that took, and adds the bytes to `bytes`.
  size_t room(iovec* out, size_t count, size_t max, size_t& bytes);
  // Of `max` bytes as they follow, how many may be put there at once.
  size_t room_for(size_t max) { return scatter && left != 0 ? scatter->room(max).iov_len : max; }
  // Staged blocks alone: what came last is not yet where it belongs, or nothing more can come for now. Throws Error(transport).
  bool must_wait(bool has_come_whole);
  bool is_in_flight() const { return scatter && scatter->is_in_flight(); }
  // Whether the blocks have the checksums that followed them.
  bool is_intact() const;
  // Said where byte `ahead` of what comes next has no place any more.
  Error memory_gone(uint64_t ahead) const;

  const TransferId id;
  const uint64_t token;
  const Extent extent;
  const OwnMemory memory;
  uint64_t left;             // of the blocks
  std::string trailer;       // where the checksums land
  size_t trailer_at = 0;
  BlockWalk walk;
  std::unique_ptr<Scatter> scatter;  // of blocks on a device

 private:
  void scatter_more(size_t bytes);

  const uint64_t bytes_ = left;

  std::optional<RunningChecksums> running_;
};

}  // namespace kvxfer
