// Own memory that a grant promises or a transfer fills: blocks of a pool, or elements of regions, numbered from 0 in the order that
// both sides use. Grants and transfers know memory only through this class.
//
// If take() throws, nothing was taken; a claim that was taken is given back exactly once.
#pragma once

#include <algorithm>

#include "ledger.hpp"
#include "regions.hpp"

namespace kvxfer {

class MemoryClaim {
 public:
  virtual ~MemoryClaim() = default;
  virtual uint32_t count() const = 0;
  virtual Extent part(uint32_t first, uint32_t count) const = 0;
  virtual uint64_t bytes(uint32_t first, uint32_t count) const = 0;
  virtual uint64_t element_bytes(uint32_t i) const = 0;
  // The most blocks from `first` on, at most `count` and at least one, that have no more than `bytes` together.
  uint32_t fitting(uint32_t first, uint32_t count, uint64_t bytes) const {
    uint32_t fits = 0;
    for (uint64_t sum = 0; fits < count && (sum += element_bytes(first + fits)) <= bytes;) ++fits;
    return std::max(fits, 1u);
  }
  virtual const PoolInfo* pool() const { return nullptr; }  // of blocks
  // The pool, or the regions, whose maps a one-sided lane needs.
  virtual std::vector<uint32_t> maps() const = 0;
  virtual bool has_memory() const { return true; }
  // Why `lane` cannot read it, or null.
  virtual const char* obstacle(Lane lane) const = 0;

  virtual void take() = 0;
  virtual void quarantine() {}
  virtual void give_back() = 0;
};

class BlocksClaim : public MemoryClaim {
 public:
  BlocksClaim(Ledger& ledger, std::vector<uint32_t> blocks) : ledger_(&ledger), blocks_(std::make_shared<const std::vector<uint32_t>>(std::move(blocks))) {}
  uint32_t count() const override { return static_cast<uint32_t>(blocks_->size()); }
  Extent part(uint32_t first, uint32_t count) const override { return Extent{ledger_->info().id, nullptr, blocks_, first, count}; }
  uint64_t bytes(uint32_t, uint32_t count) const override { return ledger_->info().block_bytes * count; }
  uint64_t element_bytes(uint32_t) const override { return ledger_->info().block_bytes; }
  const PoolInfo* pool() const override { return &ledger_->info(); }
  std::vector<uint32_t> maps() const override { return {ledger_->info().id}; }
  const char* obstacle(Lane lane) const override {
    const PoolInfo& pool = ledger_->info();
    if (lane == Lane::Mapped && !pool.is_shareable) return "the source pool cannot be mapped (memory not allocated by kvxfer, or exposure is grant)";
    if ((lane == Lane::Cma || lane == Lane::Ucx) && !pool.is_exposed) return "the source pool is not exposed to one-sided lanes (exposure is grant)";
    return nullptr;
  }

 protected:
  Ledger* ledger_;
  std::shared_ptr<const std::vector<uint32_t>> blocks_;
};

// Counted: several readers may have grants of the same block.
class PromisedBlocks final : public BlocksClaim {
 public:
  using BlocksClaim::BlocksClaim;
  void take() override { ledger_->grant(*blocks_); }
  void give_back() override { ledger_->end_grant(*blocks_); }
};

// Exclusive; quarantined between final and drained.
class ReservedBlocks final : public BlocksClaim {
 public:
  using BlocksClaim::BlocksClaim;
  void take() override { ledger_->reserve(*blocks_); }
  void quarantine() override { ledger_->quarantine(*blocks_); }
  void give_back() override { ledger_->give_back(*blocks_); }
};

// The claim of a pull that waits for its grant: it knows how many blocks it will need, and has none yet.
class NoBlocks final : public MemoryClaim {
 public:
  NoBlocks(const Ledger& ledger, uint32_t count) : ledger_(&ledger), count_(count) {}
  uint32_t count() const override { return count_; }
  Extent part(uint32_t, uint32_t) const override { throw Error(Code::internal, "a pull without blocks reads none"); }
  uint64_t bytes(uint32_t, uint32_t count) const override { return ledger_->info().block_bytes * count; }
  uint64_t element_bytes(uint32_t) const override { return ledger_->info().block_bytes; }
  const PoolInfo* pool() const override { return &ledger_->info(); }
  std::vector<uint32_t> maps() const override { return {}; }
  const char* obstacle(Lane) const override { return nullptr; }
  bool has_memory() const override { return false; }
  void take() override {}
  void give_back() override {}

 private:
  const Ledger* ledger_;
  uint32_t count_;
};

// Counted in each region that it touches. The constructor checks it, and throws what Regions::check throws.
class ElementsClaim final : public MemoryClaim {
 public:
  ElementsClaim(Regions& regions, ElementList list, RegionUse use, bool is_landing)
      : regions_(&regions), list_(std::move(list)), touched_(regions.check(list_, use)), is_landing_(is_landing) {}
  uint32_t count() const override { return list_.count(); }
  Extent part(uint32_t first, uint32_t count) const override { return list_.part(first, count); }
  uint64_t bytes(uint32_t first, uint32_t count) const override { return list_.bytes(first, count); }
  uint64_t element_bytes(uint32_t i) const override { return list_.ranges->bytes_of((*list_.ids)[i]); }
  std::vector<uint32_t> maps() const override { return touched_; }
  const char* obstacle(Lane lane) const override {
    if (lane != Lane::Mapped && lane != Lane::Cma && lane != Lane::Ucx) return nullptr;
    return regions_->obstacle(touched_, lane == Lane::Mapped);
  }
  void take() override { regions_->claim(touched_, is_landing_); }
  void give_back() override { regions_->give_back(touched_, is_landing_); }

 private:
  Regions* regions_;
  ElementList list_;
  std::vector<uint32_t> touched_;
  bool is_landing_;
};

}  // namespace kvxfer
