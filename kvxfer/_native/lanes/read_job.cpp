#include "read_job.hpp"

#include <algorithm>
#include <map>

namespace kvxfer {
namespace {

uint64_t block_bytes(const Layout& layout) {
  uint64_t sum = 0;
  for (const Segment& segment : layout.segments) sum += segment.length;
  return sum;
}

// Of every block or element; 0 where elements differ.
uint64_t uniform_bytes(const Extent& extent, const Layout& layout) {
  return extent.ranges ? extent.ranges->uniform_bytes() : block_bytes(layout);
}

uint64_t bytes_of(const Extent& extent, uint64_t uniform, uint32_t i) { return uniform != 0 ? uniform : extent.ranges->bytes_of(extent[i]); }

void check_lengths(const ReadBlocks& read, const Layout& from, const Layout& to) {
  if (read.from.count != read.to.count) throw Error(Code::internal, "a read must fill as many blocks as it reads");
  const uint64_t from_uniform = uniform_bytes(read.from, from), to_uniform = uniform_bytes(read.to, to);
  const uint32_t looks = from_uniform != 0 && to_uniform != 0 ? std::min(read.from.count, 1u) : read.from.count;
  for (uint32_t i = 0; i < looks; ++i) {
    if (bytes_of(read.from, from_uniform, i) != bytes_of(read.to, to_uniform, i)) {
      throw Error(Code::no_lane, "the source's memory has another size than the memory to fill");
    }
  }
}

RemotePlace find_blocks(const Extent& from, const RemoteOf& remote_of) {
  std::shared_ptr<const RemoteMemory> memory = remote_of(from.pool);
  for (uint32_t i = 0; i < from.count; ++i) {
    if (from[i] >= memory->block_count()) throw Error(Code::no_lane, "the source named a block outside of its pool");
  }
  RemotePlace place{{memory->base(), memory->segments(), nullptr, nullptr}, {}};
  place.memories.push_back(std::move(memory));
  return place;
}

RemotePlace find_elements(const Extent& from, const RemoteOf& remote_of) {
  const Ranges& ranges = *from.ranges;
  RemotePlace place;
  auto bases = std::make_shared<Bases>();
  std::map<uint32_t, const RemoteMemory*> found;
  const RemoteMemory* memory = nullptr;  // of the element before
  uint32_t region = 0;
  for (uint32_t i = 0; i < from.count;) {
    const uint32_t at = ranges.row_of(from[i]);
    const StridedRange& range = ranges.rows()[at];
    if (memory == nullptr || range.region != region) {
      region = range.region;
      const RemoteMemory*& known = found[region];
      if (known == nullptr) {
        place.memories.push_back(remote_of(region));
        known = place.memories.back().get();
        bases->add(region, known->base());
      }
      memory = known;
    }
    if (!memory->is_region() || range.end() > memory->bytes()) {
      throw Error(Code::no_lane, "an element lies outside of the source's readable region");
    }
    // The whole range was checked: the next elements in it need no second check.
    for (const uint32_t first = ranges.first_of(at); i < from.count && from[i] >= first && from[i] - first < range.count;) ++i;
  }
  place.layout.ranges = from.ranges;
  place.layout.bases = std::move(bases);
  return place;
}

}  // namespace

RemoteMemory::RemoteMemory(const Map& map)
    : lane_(map.lane), base_(reinterpret_cast<uint8_t*>(map.address)), bytes_(map.region_bytes), block_count_(map.block_count), segments_(map.segments) {
  if (bytes_ == 0) throw Error(Code::no_lane, map.key.empty() ? "the source does not let this lane read the memory" : printable(map.key.substr(0, kTextMax)));
  if (is_region() && block_count_ != 0) throw Error(Code::no_lane, "the source's map has no segments");
  if (!is_region()) block_bytes_ = check_segments(segments_, block_count_, bytes_, 0, Code::no_lane);
}

ReadJob::ReadJob(ReadBlocks read, RemotePlace from, OwnMemory to) : read_(std::move(read)), from_(std::move(from)), to_(std::move(to)) {
  const uint64_t uniform = uniform_bytes(read_.to, *to_.layout);
  for (uint32_t i = 0; uniform == 0 && i < read_.to.count; ++i) bytes_ += bytes_of(read_.to, uniform, i);
  if (uniform != 0) bytes_ = uniform * read_.to.count;
  if (read_.checksums.empty()) return;
  if (read_.checksums.size() != read_.to.count) throw Error(Code::internal, "a read needs one checksum for each block");
  running_.emplace(to_, read_.to, RunningChecksums::Bytes::InCache, "destination");
}

void ReadJob::verify(size_t bytes) {
  if (!running_) return;
  running_->advance(bytes);
  for (const std::vector<uint32_t>& checksums = running_->checksums(); verified_ < checksums.size(); ++verified_) {
    if (checksums[verified_] == read_.checksums[verified_]) continue;
    throw Error(Code::checksum, "block " + std::to_string(verified_) + " of a read does not match its source's checksum");
  }
}

std::unique_ptr<ReadJob> open_read(ReadBlocks read, const RemoteOf& remote_of, OwnMemory to) {
  if (!to) throw Error(Code::internal, "a read into missing memory");
  RemotePlace from = read.from.ranges ? find_elements(read.from, remote_of) : find_blocks(read.from, remote_of);
  check_lengths(read, from.layout, *to.layout);
  if (from.memories.empty()) throw Error(Code::internal, "a read without memory");
  const RemoteMemory& first = *from.memories.front();
  for (const auto& memory : from.memories) {
    if (memory->lane() != read.lane) throw Error(Code::internal, "memory of another lane");
  }
  return first.open(std::move(read), std::move(from), std::move(to));
}

}  // namespace kvxfer
