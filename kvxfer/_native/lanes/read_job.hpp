// A one-sided lane as the IO thread uses it: memory of a peer that a MAP frame made readable, and a read out of it in portions. It
// decides nothing about transfers: before each portion the IO thread asks the endpoint whether the blocks are still held, and only
// the IO thread reports how a read ended.
//
// Nothing of the peer is trusted. Its description of its memory was checked once when the MAP came; every position that a read
// names is checked against that before the first byte is read.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "memory/pool.hpp"
#include "stream.hpp"

namespace kvxfer {

class ReadJob;
class RemoteMemory;

// The source side of one read: where its blocks or elements lie, and the memory that has them. A pool is one RemoteMemory; of
// ranges, each region is one.
struct RemotePlace {
  Layout layout;
  std::vector<std::shared_ptr<const RemoteMemory>> memories;
};

// A MAP frame's result: a peer's pool or region, readable by one lane. Immutable except for prefault().
class RemoteMemory {
 public:
  RemoteMemory(const RemoteMemory&) = delete;
  RemoteMemory& operator=(const RemoteMemory&) = delete;
  virtual ~RemoteMemory() = default;

  Lane lane() const { return lane_; }
  // Where it begins: in our own address space (`mapped`), or in the peer's (never to be dereferenced).
  uint8_t* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  bool is_region() const { return segments_.empty(); }
  uint32_t block_count() const { return block_count_; }  // 0 for a region
  uint64_t block_bytes() const { return block_bytes_; }  // 0 for a region
  const std::vector<Segment>& segments() const { return segments_; }

  // A read out of `from`, which this memory is part of, and whose bounds have been checked. Only open_read calls it.
  virtual std::unique_ptr<ReadJob> open(ReadBlocks read, RemotePlace from, OwnMemory to) const = 0;
  // Prefaults the next portion for later reads, in idle time. False if nothing is left.
  virtual bool prefault() { return false; }

 protected:
  // Throws Error(no_lane) if the map has no memory (its key is then the peer's reason) or its segments leave it.
  explicit RemoteMemory(const Map& map);
  void set_base(uint8_t* base) { base_ = base; }

 private:
  const Lane lane_;
  uint8_t* base_;  // map.address, until a lane sets another
  const uint64_t bytes_;
  const uint32_t block_count_;
  const std::vector<Segment> segments_;
  uint64_t block_bytes_ = 0;
};

// One ReadBlocks in progress. Only the IO thread touches it.
class ReadJob {
 public:
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;
  virtual ~ReadJob() = default;

  // Reads up to about `max` more bytes, without blocking. May return 0 (`ucx`: in flight). The bytes are in place when it returns,
  // unless is_in_flight(). Throws Error: no_lane (another lane may work), transport, checksum.
  virtual size_t read(size_t max) = 0;
  virtual bool is_done() const = 0;                      // every byte is in place and verified
  // Bytes may still land without another call (`ucx`). Such a job is destroyed, and its end is reported, only once this is false,
  // whatever ended the transfer.
  virtual bool is_in_flight() const { return false; }

  // Its work since the last call.
  struct Effort {
    uint64_t runs = 0;          // contiguous byte ranges that were copied; of `ucx`: gets
    uint64_t calls = 0;         // system calls, of `cma` only
    size_t in_flight_most = 0;  // gets in flight at once, of `ucx` only
  };
  Effort take_effort() { return std::exchange(effort_, {}); }

  const TransferId& id() const { return read_.id; }
  uint64_t token() const { return read_.token; }
  SessionId session() const { return read_.session; }
  Lane lane() const { return read_.lane; }
  uint64_t bytes() const { return bytes_; }  // of the whole read

 protected:
  ReadJob(ReadBlocks read, RemotePlace from, OwnMemory to);
  // Walks over the source and over the target, from their start.
  BlockWalk walk_source() const { return BlockWalk(from_.layout, read_.from); }
  BlockWalk walk_target() const { return BlockWalk(*to_.layout, read_.to); }
  const RemotePlace& source() const { return from_; }
  const OwnMemory& target() const { return to_; }
  const Extent& filled() const { return read_.to; }
  const Extent& asked() const { return read_.from; }
  bool has_checksums() const { return running_.has_value(); }
  // The next `bytes` of the target, in order, are in place. Throws Error(checksum) if they complete an element whose checksum
  // differs from the source's. Does nothing if the source sent no checksums.
  void verify(size_t bytes);

  Effort effort_;

 private:
  const ReadBlocks read_;
  const RemotePlace from_;
  const OwnMemory to_;
  std::optional<RunningChecksums> running_;
  size_t verified_ = 0;  // elements
  uint64_t bytes_ = 0;
};

// The memory that the peer gave as pool or region `id` for the read's lane. Throws Error(no_lane) with the reason if there is none.
using RemoteOf = std::function<std::shared_ptr<const RemoteMemory>(uint32_t id)>;

// Finds the source of a read (read.from.pool, or the region of each strided range), checks every position of it, and that each
// element is as long as the one it fills. Throws Error(no_lane) if the memory does not fit.
std::unique_ptr<ReadJob> open_read(ReadBlocks read, const RemoteOf& remote_of, OwnMemory to);

}  // namespace kvxfer
