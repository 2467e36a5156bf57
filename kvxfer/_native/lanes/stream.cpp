#include "stream.hpp"

#include "crc32c.hpp"
#include "owner_memory.hpp"

namespace kvxfer {
namespace {

constexpr size_t kChecksumBytes = 4;
constexpr size_t kCopiedBytes = 32 * 1024;  // of foreign memory at a time: fits a first level cache
constexpr size_t kCopiedRuns = 64;
constexpr size_t kAheadBytes = 4096;  // from the bytes that are checksummed to those that are prefetched: the hardware prefetcher stops at a page

void append_checksum(std::string& to, uint32_t checksum) {
  for (int shift = 0; shift < 32; shift += 8) to.push_back(static_cast<char>(checksum >> shift));
}

uint32_t checksum_at(const std::string& from, size_t index) {
  uint32_t checksum = 0;
  for (size_t i = 0; i < kChecksumBytes; ++i) checksum |= uint32_t{static_cast<uint8_t>(from[index * kChecksumBytes + i])} << (8 * i);
  return checksum;
}

uint64_t trailer_bytes(const Data& data) { return data.has_checksums ? uint64_t{data.count} * kChecksumBytes : 0; }

}  // namespace

RunningChecksums::RunningChecksums(const OwnMemory& memory, const Extent& extent, Bytes are, const char* whose)
    : layout_(memory.layout.get()), extent_(&extent), are_(are), whose_(whose), is_ours_(memory.is_ours), walk_(*layout_, extent) {
  const Layout& layout = *layout_;
  if (extent.ranges) {
    block_bytes_ = extent.ranges->uniform_bytes();
  } else {
    for (const Segment& segment : layout.segments) block_bytes_ += segment.length;
  }
  checksums_.reserve(extent.count);
  if (extent.count != 0) left_ = bytes_of(0);
}

void RunningChecksums::advance(size_t bytes) {
  if (!is_ours_) return advance_copied(bytes);
  passed_ += bytes;
  while (bytes != 0) {
    const BlockWalk::Span span = walk_.take(static_cast<size_t>(std::min<uint64_t>(bytes, left_)));
    if (span.size == 0) throw Error(Code::internal, "a checksum past the last block");
    const size_t ahead = are_ == Bytes::InCache ? 0 : std::min(kAheadBytes, span.size);
    if (span.size != ahead) add(span.data, span.size - ahead, span.data + ahead);
    if (ahead != 0) add(span.data + (span.size - ahead), ahead, walk_.next());
    bytes -= span.size;
  }
}

void RunningChecksums::advance_copied(size_t bytes) {
  alignas(64) uint8_t copied[kCopiedBytes];
  iovec runs[kCopiedRuns];
  while (bytes != 0) {
    size_t part = 0;
    const size_t count = walk_.gather(runs, kCopiedRuns, std::min(bytes, sizeof copied), part);
    if (part == 0) throw Error(Code::internal, "a checksum past the last block");
    if (const size_t there = copy_from_owner(copied, runs, count); there != part) throw memory_gone(whose_, *layout_, *extent_, passed_ + there);
    walk_.advance(part);
    advance(copied, part);
    bytes -= part;
  }
}

void RunningChecksums::advance(const uint8_t* data, size_t bytes) {
  passed_ += bytes;
  while (bytes != 0) {
    const size_t part = static_cast<size_t>(std::min<uint64_t>(bytes, left_));
    if (part == 0) throw Error(Code::internal, "a checksum past the last block");
    add(data, part);
    data += part;
    bytes -= part;
  }
}

void RunningChecksums::add(const uint8_t* data, size_t bytes, const uint8_t* ahead) {
  checksum_ = crc32c(data, bytes, checksum_, ahead);
  left_ -= bytes;
  if (left_ != 0) return;
  checksums_.push_back(std::exchange(checksum_, 0));
  if (checksums_.size() < extent_->count) left_ = bytes_of(static_cast<uint32_t>(checksums_.size()));
}

OutgoingBlocks::OutgoingBlocks(SendData send, OwnMemory from, Staging& staging)
    : frame(send.frame), serial(send.serial), extent(std::move(send.from)), memory(std::move(from)), left(frame.payload_bytes - trailer_bytes(frame)),
      trailer_left(trailer_bytes(frame)), walk(*memory.layout, extent), is_staged(memory.device != nullptr),
      is_zero_copy(frame.is_zero_copy), known_(std::move(send.checksums)) {
  if (frame.payload_bytes < trailer_bytes(frame) || frame.count != extent.count) {
    throw Error(Code::internal, "a DATA frame does not match its blocks");
  }
  if (frame.has_checksums && known_.size() != frame.count) running_.emplace(memory, extent, RunningChecksums::Bytes::Anywhere, "source");
  if (is_staged) gather = std::make_unique<Gather>(staging, memory, extent, left);
}

uint64_t OutgoingBlocks::payload_bytes() const { return frame.payload_bytes - trailer_bytes(frame); }

void OutgoingBlocks::add_checksums(size_t bytes) {
  if (!running_) return;
  const uint64_t sent = payload_bytes() - left;
  if (sent + bytes > running_->passed()) running_->advance(static_cast<size_t>(sent + bytes - running_->passed()));
}

void OutgoingBlocks::add_checksums(const uint8_t* data, size_t bytes) {
  if (!running_) return;
  const uint64_t sent = payload_bytes() - left;
  const uint64_t known = running_->passed() - sent;
  if (bytes > known) running_->advance(data + known, static_cast<size_t>(bytes - known));
}

std::pair<const char*, size_t> OutgoingBlocks::trailer() {
  if (trailer_.empty()) {
    const std::vector<uint32_t>& checksums = running_ ? running_->checksums() : known_;
    for (uint32_t i = 0; i < frame.count; ++i) append_checksum(trailer_, has_no_checksums_ ? kNoChecksum : checksums.at(i));
  }
  return {trailer_.data() + trailer_.size() - trailer_left, trailer_left};
}

void OutgoingBlocks::end() {
  if (std::exchange(has_ended, true)) return;
  if (left != 0) {
    has_no_checksums_ = true;
    trailer_.clear();  // no byte of it goes out before the blocks
  } else if (trailer_left != 0) {
    trailer();  // for the blocks that went out intact
  }
  is_zero_copy = false;
  gather.reset();
  running_.reset();
  walk = {};
  memory = {};
}

IncomingBlocks::IncomingBlocks(const Data& data, Landing landing, OwnMemory to, Staging& staging)
    : id(data.id), token(landing.token), extent(std::move(landing.to)), memory(std::move(to)), left(data.payload_bytes - trailer_bytes(data)),
      trailer(trailer_bytes(data), '\0'), walk(*memory.layout, extent) {
  if (data.has_checksums) running_.emplace(memory, extent, RunningChecksums::Bytes::InCache, "destination");
  if (memory.device) scatter = std::make_unique<Scatter>(staging, memory, extent, left);
}

size_t IncomingBlocks::room(iovec* out, size_t count, size_t max, size_t& bytes) {
  if (!scatter) return walk.gather(out, count, max, bytes);
  out[0] = scatter->room(max);
  bytes += out[0].iov_len;
  return out[0].iov_len != 0 ? 1 : 0;
}

void IncomingBlocks::scatter_more(size_t bytes) {
  if (bytes == 0) return;
  if (running_) running_->advance(static_cast<const uint8_t*>(scatter->room(bytes).iov_base), bytes);
  left -= bytes;
  scatter->filled(bytes);
}

bool IncomingBlocks::must_wait(bool has_come_whole) {
  if (!scatter) return false;
  if (has_come_whole) return !scatter->is_done();
  return left != 0 && scatter->room(1).iov_len == 0;
}

Error IncomingBlocks::memory_gone(uint64_t ahead) const {
  return kvxfer::memory_gone("destination", *memory.layout, extent, bytes_ - left + ahead);
}

bool IncomingBlocks::is_intact() const {
  if (!running_) return true;
  const std::vector<uint32_t>& checksums = running_->checksums();
  for (size_t i = 0; i < checksums.size(); ++i) {
    const uint32_t checksum = checksum_at(trailer, i);
    if (checksum != kNoChecksum && checksum != checksums[i]) return false;
  }
  return checksums.size() * kChecksumBytes == trailer.size();
}

}  // namespace kvxfer
