// The `stream` lane: the blocks of one DATA frame on their way out of, or into, their pool. Vectored writes straight from
// blocks, vectored reads straight into them; no byte is copied in between.
#pragma once

#include "core/pool.hpp"

namespace kvxfer {

struct OutgoingBlocks {
  OutgoingBlocks(SendData send, std::shared_ptr<const Pool> from)
      : frame(send.frame), blocks(std::move(send.blocks)), pool(std::move(from)), left(frame.payload_bytes), walk(pool->layout, blocks) {}
  OutgoingBlocks(const OutgoingBlocks&) = delete;
  OutgoingBlocks& operator=(const OutgoingBlocks&) = delete;

  const Data frame;
  const std::vector<uint32_t> blocks;
  const std::shared_ptr<const Pool> pool;
  uint64_t left;
  BlockWalk walk;
};

struct IncomingBlocks {
  IncomingBlocks(const TransferId& transfer, Landing landing, std::shared_ptr<const Pool> to)
      : id(transfer), token(landing.token), blocks(std::move(landing.blocks)), pool(std::move(to)), walk(pool->layout, blocks) {}
  IncomingBlocks(const IncomingBlocks&) = delete;
  IncomingBlocks& operator=(const IncomingBlocks&) = delete;

  const TransferId id;
  const uint64_t token;
  const std::vector<uint32_t> blocks;
  const std::shared_ptr<const Pool> pool;
  BlockWalk walk;
};

}  // namespace kvxfer
