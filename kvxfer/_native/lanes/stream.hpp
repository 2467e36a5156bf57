// The `stream` lane, and `unix`, which is the same over a Unix socket: the blocks or elements of one DATA frame on their way out
// of, or into, our memory. Vectored writes straight from them, vectored reads straight into them; no byte is copied in between. If
// the frame has checksums, they are computed of each chunk just before it goes out, and just after it came in, while it is in the
// cache. Device memory goes through pinned host memory (staging.hpp).
//
// The rest of a frame whose grant ended goes out as zeros, whose checksums are unknown: then all checksums of that frame are
// kNoChecksum, and its blocks are not compared. They are never committed either: the source gives no verdict ok.
#pragma once

#include <optional>

#include "machines/endpoint.hpp"
#include "memory/pool.hpp"
#include "staging.hpp"

namespace kvxfer {

constexpr uint32_t kNoChecksum = 0x9d1ce5a7;  // as likely to be a checksum as any other

// The CRC-32Cs of some blocks or elements, computed while their bytes pass in order.
class RunningChecksums {
 public:
  enum class Bytes { InCache, Anywhere };  // where they are when they are checksummed
  // The checksum of foreign memory, which may be unmapped, is taken of a copy: see owner_memory.hpp. `whose`: as memory_gone() takes it.
  RunningChecksums(const OwnMemory& memory, const Extent& extent, Bytes are, const char* whose);
  // Takes the next `bytes` from the blocks' own memory. Throws Error(memory_gone).
  void advance(size_t bytes);
  // Takes them from `data`, not from the blocks' own memory.
  void advance(const uint8_t* data, size_t bytes);
  uint64_t passed() const { return passed_; }
  const std::vector<uint32_t>& checksums() const { return checksums_; }  // of the blocks that have passed completely

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

  // With checksums: computes those of the next `bytes` from the walk's position on, unless they are known. Throws
  // Error(memory_gone).
  void add_checksums(size_t bytes);
  // The same for gathered bytes.
  void add_checksums(const uint8_t* data, size_t bytes);
  void sent(size_t bytes) {
    left -= bytes;
    if (has_ended) return;
    if (!is_staged) return walk.advance(bytes);
    if (gather) gather->sent(bytes);
  }
  // The checksums in wire form, once `left` is 0; begins at the first unsent byte.
  std::pair<const char*, size_t> trailer();
  // The grant has ended: zeros go out from here on, and the memory may be freed.
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
  bool is_zero_copy;      // the kernel gets references to their pages, no copy
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
  // Room for the next bytes, at most `max`; returns how many iovecs it took, and adds the bytes to `bytes`.
  size_t room(iovec* out, size_t count, size_t max, size_t& bytes);
  // How many of the next `max` bytes may be written at once.
  size_t room_for(size_t max) { return scatter && left != 0 ? scatter->room(max).iov_len : max; }
  // For staged blocks only: the last bytes are not yet in place, or no more can come for now. Throws Error(transport).
  bool must_wait(bool has_come_whole);
  bool is_in_flight() const { return scatter && scatter->is_in_flight(); }
  // Whether the blocks match the checksums that followed them.
  bool is_intact() const;
  // Throws the error for byte `ahead` of the next bytes, whose memory is gone.
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
