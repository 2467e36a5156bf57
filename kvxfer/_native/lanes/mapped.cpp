#include "mapped.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace kvxfer {
namespace {

constexpr uint64_t kWarmBytes = 16 << 20;
constexpr uint64_t kPageBytes = 4096;

}  // namespace

Mapping::Mapping(const Map& map, Fd fd) : fd_(std::move(fd)), bytes_(map.region_bytes), block_count_(map.block_count) {
  if (!fd_) throw Error(Code::no_lane, "the source sent no descriptor with its pool");
  const int seals = ::fcntl(fd_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & required_seals()) != required_seals()) throw Error(Code::no_lane, "the source's memory is not sealed");
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0 || bytes_ == 0 || static_cast<uint64_t>(status.st_size) < bytes_) {
    throw Error(Code::no_lane, "the source's memory is smaller than it says");
  }
  block_bytes_ = check_segments(map.segments, block_count_, bytes_, 0, Code::no_lane);
  void* mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) throw Error(Code::no_lane, errno_text("cannot map the source's memory"));
  ::madvise(mapped, bytes_, MADV_HUGEPAGE);
  ::madvise(mapped, bytes_, MADV_DONTDUMP);
  layout_ = Layout{static_cast<uint8_t*>(mapped), map.segments};
}

bool Mapping::warm() {
  const off_t data = fd_ ? ::lseek(fd_.get(), static_cast<off_t>(warm_), SEEK_DATA) : -1;
  const auto begin = static_cast<uint64_t>(data) & ~(kPageBytes - 1);
  if (data >= 0 && begin < bytes_) {
    const off_t hole = ::lseek(fd_.get(), data, SEEK_HOLE);
    const uint64_t end = std::min({hole < 0 ? bytes_ : static_cast<uint64_t>(hole), begin + kWarmBytes, bytes_});
    warm_ = std::max(end, begin + 1);
    if (::madvise(layout_.base + begin, end - begin, MADV_POPULATE_READ) == 0) return true;
  }
  fd_.reset();
  return false;
}

Mapping::~Mapping() { ::munmap(layout_.base, bytes_); }

CopyJob::CopyJob(ReadBlocks read, std::shared_ptr<const Mapping> from, std::shared_ptr<const Pool> to)
    : read_(std::move(read)), from_(std::move(from)), to_(std::move(to)) {
  if (from_->block_bytes() != to_->info.block_bytes) throw Error(Code::no_lane, "the source's mapped blocks have another size than ours");
  if (read_.from.size() != read_.to.size()) throw Error(Code::internal, "a read of as many blocks as it fills was due");
  for (uint32_t block : read_.from) {
    if (block >= from_->block_count()) throw Error(Code::no_lane, "the source named a block outside of its pool");
  }
  source_ = BlockWalk(from_->layout(), read_.from);
  target_ = BlockWalk(to_->layout, read_.to);
}

size_t CopyJob::copy(size_t max) {
  size_t copied = 0;
  while (copied < max && !target_.is_done()) {
    const BlockWalk::Span to = target_.peek(max - copied);
    const BlockWalk::Span from = source_.peek(to.size);
    std::memcpy(to.data, from.data, from.size);
    source_.advance(from.size);
    target_.advance(from.size);
    copied += from.size;
  }
  return copied;
}

}  // namespace kvxfer
