// What a one-sided lane is to the IO thread: memory of a peer that a MAP frame made readable, and a read out of it, done
// in portions. It decides nothing about transfers: before each portion the IO thread asks the endpoint whether the blocks
// are still held, and it alone reports how a read ended.
//
// A peer is believed in nothing here. What it said of its memory was checked once when the MAP came; every position that
// a read names is checked against that before the first byte is read.
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

// The source side of one read: where its blocks or elements lie in the address space that they are read from, and the memory
// that they are in: one for a pool, one a region for ranges.
struct RemotePlace {
  Layout layout;
  std::vector<std::shared_ptr<const RemoteMemory>> memories;
};

// What a MAP frame gave: a peer's pool or region, readable by one lane. Immutable except for prefault().
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

  // A read out of `from`, one of whose memories this is and whose bounds have been checked. Called by open_read alone.
  virtual std::unique_ptr<ReadJob> open(ReadBlocks read, RemotePlace from, OwnMemory to) const = 0;
  // Prepares the next portion for reads to come, in idle time. False where nothing is left to prepare.
  virtual bool prefault() { return false; }

 protected:
  // Throws Error(no_lane) where the map is of no memory (the text is then the peer's reason) or its segments leave it.
  explicit RemoteMemory(const Map& map);
  void set_base(uint8_t* base) { base_ = base; }

 private:
  const Lane lane_;
  uint8_t* base_;  // map.address, until somebody knows better
  const uint64_t bytes_;
  const uint32_t block_count_;
  const std::vector<Segment> segments_;
  uint64_t block_bytes_ = 0;
};

// One ReadBlocks under way. Only the IO thread touches it.
class ReadJob {
 public:
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;
  virtual ~ReadJob() = default;

  // Reads up to about `max` bytes more, without blocking. May return 0 (`ucx`: in flight). What it reads is in place when
  // it returns, unless is_in_flight(). Throws Error: no_lane (another lane may serve), transport, checksum.
  virtual size_t read(size_t max) = 0;
  virtual bool is_done() const = 0;                      // every byte is in place and verified
  // Bytes may still land without another call (`ucx`). Such a job is not destroyed, and its end is not reported, before
  // this is false, whatever ended the transfer.
  virtual bool is_in_flight() const { return false; }

  // What it asked of the machine since the last look at it.
  struct Effort {
    uint64_t runs = 0;          // stretches of memory, neighbours being one; of `ucx`: gets
    uint64_t calls = 0;         // `cma`
    size_t in_flight_most = 0;  // gets
  };
  Effort take_effort() { return std::exchange(effort_, {}); }

  const TransferId& id() const { return read_.id; }
  uint64_t token() const { return read_.token; }
  SessionId session() const { return read_.session; }
  Lane lane() const { return read_.lane; }
  uint64_t bytes() const { return bytes_; }  // of the whole read

 protected:
  ReadJob(ReadBlocks read, RemotePlace from, OwnMemory to);
  // Walks over the source and over the target, from their beginning.
  BlockWalk walk_source() const { return BlockWalk(from_.layout, read_.from); }
  BlockWalk walk_target() const { return BlockWalk(*to_.layout, read_.to); }
  const RemotePlace& source() const { return from_; }
  const OwnMemory& target() const { return to_; }
  const Extent& filled() const { return read_.to; }
  const Extent& asked() const { return read_.from; }
  bool has_checksums() const { return running_.has_value(); }
  // The next `bytes` of the target, in order, are in place. Throws Error(checksum) where the source had said otherwise of
  // an element that they complete. Does nothing where it had said nothing.
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

// The memory that the peer gave as pool or region `id` by the read's lane. Throws Error(no_lane) with the reason why there
// is none.
using RemoteOf = std::function<std::shared_ptr<const RemoteMemory>(uint32_t id)>;

// Finds the source of a read (read.from.pool, or the region of each strided range) and checks every position of it, and that each
// element is as long as the one it fills. Throws Error(no_lane) where the memory cannot serve it.
std::unique_ptr<ReadJob> open_read(ReadBlocks read, const RemoteOf& remote_of, OwnMemory to);

}  // namespace kvxfer
