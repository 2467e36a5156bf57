// The ledger of one pool: which blocks the agent has promised (granted), is filling (reserved) or cannot yet give back
// (quarantined). Whether a block is free or cached is the owner's decision; the ledger only says which blocks the owner must not
// use.
//
//   granted      counted: one block may be promised to several readers
//   reserved     exclusive: the destination of one live transfer
//   quarantined  was reserved, its transfer is final, and a read into it may still be under way
#pragma once

#include <vector>

#include "codes.hpp"
#include "ids.hpp"

namespace kvxfer {

struct PoolInfo {
  uint32_t id = 0;
  uint32_t block_count = 0;
  uint64_t block_bytes = 0;
  Bytes32 digest{};
  bool is_shareable = false;  // memory allocated by kvxfer, exposure = pool: a same-host reader may map it
  bool is_exposed = false;    // exposure = pool: one-sided lanes other than `mapped` may read it
  bool has_checksums = false; // blocks are sent with CRC-32Cs: the owner gives them with `ready`, or the shell computes them while sending
};

class Ledger {
 public:
  explicit Ledger(PoolInfo info) : info_(info), granted_(info.block_count), held_(info.block_count, Held::no) {}

  const PoolInfo& info() const { return info_; }
  void set_digest(const Bytes32& digest) { info_.digest = digest; }  // the owner changes the meaning of its blocks

  // Throws Error(invalid_argument) for an index out of range or named twice, Error(blocks_busy) for a block in use.
  void grant(const std::vector<uint32_t>& blocks) {
    check_range(blocks);
    for (uint32_t b : blocks) {
      if (held_[b] != Held::no) busy(b, "grant");
    }
    for (uint32_t b : blocks) {
      if (granted_[b]++ == 0) ++granted_count_;
    }
  }
  void end_grant(const std::vector<uint32_t>& blocks) {
    for (uint32_t b : blocks) {
      if (granted_[b] == 0) throw Error(Code::internal, "a grant ended that the ledger does not hold");
      if (--granted_[b] == 0) --granted_count_;
    }
  }
  void reserve(const std::vector<uint32_t>& blocks) {
    check_range(blocks);
    for (uint32_t b : blocks) {
      if (held_[b] != Held::no || granted_[b] != 0) busy(b, "reserve");
    }
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (held_[blocks[i]] != Held::no) {  // only this list itself can have taken it
        for (size_t j = 0; j < i; ++j) held_[blocks[j]] = Held::no;
        throw Error(Code::invalid_argument, "block " + std::to_string(blocks[i]) + " is named twice");
      }
      held_[blocks[i]] = Held::reserved;
    }
    reserved_count_ += blocks.size();
  }
  void quarantine(const std::vector<uint32_t>& blocks) {
    move(blocks, Held::reserved, Held::quarantined);
    reserved_count_ -= blocks.size();
    quarantined_count_ += blocks.size();
  }
  void give_back(const std::vector<uint32_t>& blocks) {
    move(blocks, Held::quarantined, Held::no);
    quarantined_count_ -= blocks.size();
  }
  bool is_reserved(uint32_t block) const { return block < held_.size() && held_[block] == Held::reserved; }
  bool is_granted(uint32_t block) const { return block < granted_.size() && granted_[block] != 0; }
  bool is_idle() const { return granted_count_ + reserved_count_ + quarantined_count_ == 0; }

  size_t granted_count() const { return granted_count_; }
  size_t reserved_count() const { return reserved_count_; }
  size_t quarantined_count() const { return quarantined_count_; }

 private:
  enum class Held : uint8_t { no, reserved, quarantined };

  void check_range(const std::vector<uint32_t>& blocks) const {
    for (uint32_t b : blocks) {
      if (b >= info_.block_count) {
        throw Error(Code::invalid_argument, "block " + std::to_string(b) + " is outside pool " + std::to_string(info_.id) + " of " +
                                                std::to_string(info_.block_count) + " blocks");
      }
    }
  }
  [[noreturn]] void busy(uint32_t block, const char* verb) const {
    const char* state = held_[block] == Held::reserved ? "reserved" : held_[block] == Held::quarantined ? "quarantined" : "granted";
    throw Error(Code::blocks_busy, std::string("cannot ") + verb + " block " + std::to_string(block) + ": it is " + state);
  }
  void move(const std::vector<uint32_t>& blocks, Held from, Held to) {
    for (uint32_t b : blocks) {
      if (held_[b] != from) throw Error(Code::internal, "ledger: block " + std::to_string(b) + " is not in the expected state");
      held_[b] = to;
    }
  }

  PoolInfo info_;
  std::vector<uint32_t> granted_;
  std::vector<Held> held_;
  size_t granted_count_ = 0, reserved_count_ = 0, quarantined_count_ = 0;
};

}  // namespace kvxfer
