// The ledger of one pool: which blocks the agent has promised (granted), is filling (reserved) or cannot yet give back
// (quarantined). Whether a block is free or cached is the owner's decision; the ledger only says which blocks the owner must not
// use.
//
//   granted      counted: one block may be promised to several readers
//   reserved     exclusive: the destination of one live transfer
//   quarantined  was reserved, its transfer is final, and a read into it may still be under way
//
// Memory may be registered as several pools. Then a block counts as used here, too, as long as a block of another pool that shares
// bytes with it is used: what is granted in any of them is reserved in none, and what is reserved in one is neither granted nor
// reserved in another.
#pragma once

#include <algorithm>
#include <vector>

#include "codes.hpp"
#include "ids.hpp"
#include "overlaps.hpp"

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
  // From now on, until leave(), each of the two minds the other's blocks. `overlap`: of this pool's blocks and the other's.
  static void meet(Ledger& one, Overlap overlap, Ledger& other, Overlap back) {
    one.neighbours_.push_back({&other, std::move(overlap)});
    other.neighbours_.push_back({&one, std::move(back)});
  }
  void leave() {
    for (const Neighbour& neighbour : neighbours_) {
      std::vector<Neighbour>& theirs = neighbour.ledger->neighbours_;
      theirs.erase(std::remove_if(theirs.begin(), theirs.end(), [this](const Neighbour& each) { return each.ledger == this; }), theirs.end());
    }
    neighbours_.clear();
  }
  void set_digest(const Bytes32& digest) { info_.digest = digest; }  // the owner changes the meaning of its blocks

  // Throws Error(invalid_argument) for an index out of range or named twice, Error(blocks_busy) for a block in use.
  void grant(const std::vector<uint32_t>& blocks) {
    check_range(blocks);
    for (uint32_t b : blocks) {
      if (held_[b] != Held::no) busy(b, "grant");
    }
    check_neighbours(blocks, "grant", &Ledger::is_held);
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
      if (is_used(b)) busy(b, "reserve");
    }
    check_neighbours(blocks, "reserve", &Ledger::is_used);
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
  bool is_held(uint32_t block) const { return held_[block] != Held::no; }
  bool is_used(uint32_t block) const { return is_held(block) || granted_[block] != 0; }
  const char* state_of(uint32_t block) const {
    return held_[block] == Held::reserved ? "reserved" : held_[block] == Held::quarantined ? "quarantined" : "granted";
  }
  [[noreturn]] void busy(uint32_t block, const char* verb) const {
    throw Error(Code::blocks_busy, std::string("cannot ") + verb + " block " + std::to_string(block) + ": it is " + state_of(block));
  }
  void check_neighbours(const std::vector<uint32_t>& blocks, const char* verb, bool (Ledger::*is_in_the_way)(uint32_t) const) const {
    for (const auto& [ledger, overlap] : neighbours_) {
      if (ledger->is_idle()) continue;
      for (uint32_t b : blocks) {
        overlap.any_of(b, [&](uint32_t other) {
          if (!(ledger->*is_in_the_way)(other)) return false;
          throw Error(Code::blocks_busy, std::string("cannot ") + verb + " block " + std::to_string(b) + ": it shares memory with block " +
                                             std::to_string(other) + " of pool " + std::to_string(ledger->info().id) + ", which is " + ledger->state_of(other));
        });
      }
    }
  }
  void move(const std::vector<uint32_t>& blocks, Held from, Held to) {
    for (uint32_t b : blocks) {
      if (held_[b] != from) throw Error(Code::internal, "ledger: block " + std::to_string(b) + " is not in the expected state");
      held_[b] = to;
    }
  }

  struct Neighbour {
    Ledger* ledger;
    Overlap overlap;
  };

  PoolInfo info_;
  std::vector<Neighbour> neighbours_;  // pools of memory that this one has a part of
  std::vector<uint32_t> granted_;
  std::vector<Held> held_;
  size_t granted_count_ = 0, reserved_count_ = 0, quarantined_count_ = 0;
};

}  // namespace kvxfer
