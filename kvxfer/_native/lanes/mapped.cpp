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
constexpr size_t kRunsMax = 1024;
constexpr uint64_t kPastCacheBytes = 512 * 1024;  // of a read that bypasses the cache: more than one core's own
constexpr size_t kVerifyBytes = 256 * 1024;       // copied before they are verified, while they are in the cache

class MappedMemory final : public RemoteMemory {
 public:
  MappedMemory(const Map& map, Fd fd, std::shared_ptr<Copier> copier) : RemoteMemory(map), fd_(std::move(fd)), copier_(std::move(copier)) {
    if (!fd_) throw Error(Code::no_lane, "the source sent no descriptor with its memory");
    const int seals = ::fcntl(fd_.get(), F_GET_SEALS);
    if (seals < 0 || (seals & required_seals()) != required_seals()) throw Error(Code::no_lane, "the source's memory is not sealed");
    struct stat status {};
    if (::fstat(fd_.get(), &status) != 0 || static_cast<uint64_t>(status.st_size) < bytes()) {
      throw Error(Code::no_lane, "the source's memory is smaller than it says");
    }
    const uint64_t page = page_bytes(fd_.get());
    mapped_ = (bytes() + page - 1) / page * page;  // only whole pages can be unmapped again, if they are huge
    void* const at = ::mmap(nullptr, mapped_, PROT_READ, MAP_SHARED, fd_.get(), 0);
    if (at == MAP_FAILED) throw Error(Code::no_lane, errno_text("cannot map the source's memory"));
    ::madvise(at, mapped_, MADV_HUGEPAGE);
    ::madvise(at, mapped_, MADV_DONTDUMP);
    set_base(static_cast<uint8_t*>(at));
    if (page > kSmallPage) fd_.reset();  // so few faults are not worth prefaulting
  }
  ~MappedMemory() override { ::munmap(base(), mapped_); }

  std::unique_ptr<ReadJob> open(ReadBlocks read, RemotePlace from, OwnMemory to) const override;
  bool prefault() override;

 private:
  Fd fd_;  // until all of it is prefaulted
  const std::shared_ptr<Copier> copier_;
  uint64_t prefaulted_ = 0, mapped_ = 0;
};

bool MappedMemory::prefault() {
  const off_t data = fd_ ? ::lseek(fd_.get(), static_cast<off_t>(prefaulted_), SEEK_DATA) : -1;
  const auto begin = static_cast<uint64_t>(data) & ~(kSmallPage - 1);
  if (data >= 0 && begin < bytes()) {
    const off_t hole = ::lseek(fd_.get(), data, SEEK_HOLE);
    const uint64_t end = std::min({hole < 0 ? bytes() : static_cast<uint64_t>(hole), begin + kWarmBytes, bytes()});
    prefaulted_ = std::max(end, begin + 1);
    if (::madvise(base() + begin, end - begin, MADV_POPULATE_READ) == 0) return true;
  }
  fd_.reset();
  return false;
}

class MappedRead final : public ReadJob {
 public:
  MappedRead(ReadBlocks read, RemotePlace from, OwnMemory to, Copier& copier)
      : ReadJob(std::move(read), std::move(from), std::move(to)), copier_(copier), walk_(walk_source(), walk_target()), runs_(kRunsMax) {
    // Verification reads the bytes right after the copy: they should be in the cache.
    stores_ = !has_checksums() && bytes() >= kPastCacheBytes ? Stores::PastCache : Stores::InCache;
  }

  bool is_done() const override { return walk_.is_done(); }

  size_t read(size_t max) override {
    size_t done = 0;
    while (done < max && !walk_.is_done()) {
      size_t bytes = 0;
      const size_t count = walk_.take(runs_.data(), runs_.size(), has_checksums() ? std::min(max - done, kVerifyBytes) : max - done, bytes);
      effort_.runs += count;
      copier_.copy(runs_.data(), count, stores_);
      verify(bytes);
      done += bytes;
    }
    return done;
  }

 private:
  Copier& copier_;  // of a memory that this read keeps
  RunWalk walk_;
  std::vector<Run> runs_;
  Stores stores_;
};

std::unique_ptr<ReadJob> MappedMemory::open(ReadBlocks read, RemotePlace from, OwnMemory to) const {
  return std::make_unique<MappedRead>(std::move(read), std::move(from), std::move(to), *copier_);
}

}  // namespace

std::shared_ptr<RemoteMemory> open_mapped(const Map& map, Fd descriptor, std::shared_ptr<Copier> copier) {
  return std::make_shared<MappedMemory>(map, std::move(descriptor), std::move(copier));
}

}  // namespace kvxfer
