// The `mapped` lane, the reader's side: a peer's pool mapped read-only, and copies out of it.
//
// A descriptor from a peer is believed in nothing: it must carry the seals that keep its size and its contents out of
// reach of surprise (see region.hpp), be as large as it claims, and hold every segment that is claimed to lie in it.
// A copy runs in slices, and before each slice the endpoint says whether its blocks are still held.
//
// The first touch of a mapped page costs a fault, as much as the copy of it. Idle time is used to take those faults ahead,
// and only for pages that the source has filled: looking at the others would make them.
#pragma once

#include "core/pool.hpp"
#include "core/shared_endpoint.hpp"

namespace kvxfer {

class Mapping {
 public:
  // Throws Error(no_lane) with the reason.
  Mapping(const Map& map, Fd fd);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  const Layout& layout() const { return layout_; }
  uint32_t block_count() const { return block_count_; }
  uint64_t block_bytes() const { return block_bytes_; }
  // Takes the faults of the next portion. False where none is left.
  bool warm();

 private:
  Fd fd_;  // until all is warm
  uint64_t warm_ = 0;
  Layout layout_;
  uint64_t bytes_ = 0, block_bytes_ = 0;
  uint32_t block_count_ = 0;
};

class CopyJob {
 public:
  // Throws Error(no_lane) where the mapping cannot serve the read.
  CopyJob(ReadBlocks read, std::shared_ptr<const Mapping> from, std::shared_ptr<const Pool> to);
  CopyJob(const CopyJob&) = delete;
  CopyJob& operator=(const CopyJob&) = delete;

  const TransferId& id() const { return read_.id; }
  uint64_t token() const { return read_.token; }
  SessionId session() const { return read_.session; }
  bool is_done() const { return target_.is_done(); }
  // Copies up to `max` bytes, without asking anybody. Returns how many.
  size_t copy(size_t max);

 private:
  ReadBlocks read_;
  std::shared_ptr<const Mapping> from_;
  std::shared_ptr<const Pool> to_;
  BlockWalk source_, target_;
};

}  // namespace kvxfer
