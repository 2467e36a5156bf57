#include "region.hpp"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <cstdio>
#include <fstream>
#include <string>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvxfer {
namespace {

constexpr uint64_t kBytesMax = uint64_t{1} << 46;
constexpr uint64_t kHugeFrom = 2 << 20;  // a smaller region would waste most of a huge page
constexpr long kHugetlbfs = 0x958458f6;
constexpr const char* kShmemSwitch = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

// The kernel's setting for huge pages in shared memory: "never", "advise", "always" and so on; empty if it does not say.
std::string shmem_switch() {
  std::string line;
  std::ifstream file(kShmemSwitch);
  std::getline(file, line);
  const size_t begin = line.find('['), end = line.find(']');
  return begin == std::string::npos || end == std::string::npos ? "" : line.substr(begin + 1, end - begin - 1);
}

// The number in the first line that begins with `key`, after the first line that begins with `from` (empty: in the whole file); 0 if
// there is none. A kernel file such as /proc/meminfo gives KiB or pages.
uint64_t find_number(const char* path, const std::string& from, const std::string& key) {
  std::ifstream file(path);
  bool is_inside = from.empty();
  for (std::string line; std::getline(file, line);) {
    if (!is_inside) {
      is_inside = line.compare(0, from.size(), from) == 0;
    } else if (line.compare(0, key.size(), key) == 0) {
      const size_t digits = line.find_first_of("0123456789");
      return digits == std::string::npos ? 0 : std::stoull(line.substr(digits));
    }
  }
  return 0;
}

uint64_t round_up(uint64_t bytes, uint64_t page) { return (bytes + page - 1) / page * page; }

}  // namespace

int required_seals() { return F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW; }

uint64_t page_bytes(int fd) {
  struct statfs status {};
  if (::fstatfs(fd, &status) != 0 || static_cast<long>(status.f_type) != kHugetlbfs) return kSmallPage;
  return static_cast<uint64_t>(status.f_bsize);
}

Region::Region(uint64_t bytes, bool populate, HugePages huge) : bytes_(bytes) {
  if (bytes == 0 || bytes > kBytesMax) throw Error(Code::invalid_argument, "a region needs 1 byte to 64 TiB, not " + std::to_string(bytes));
  const bool is_wanted = huge == HugePages::Require || (huge == HugePages::Auto && bytes >= kHugeFrom);
  if (is_wanted && try_reserved(populate)) return;
  make(0, bytes, huge);
  // The kernel accepts the request for huge pages in any case. Only the resident memory shows whether it gave them.
  if (populate || huge == HugePages::Require) make_resident();
  if (is_wanted) page_bytes_ = count_page_bytes();
  if (huge != HugePages::Require || page_bytes_ > kSmallPage) return;
  release();
  const uint64_t page = find_number("/proc/meminfo", "", "Hugepagesize:") * 1024;
  const uint64_t needed = page == 0 ? 0 : round_up(bytes, page) / page;
  const uint64_t free = find_number("/proc/meminfo", "", "HugePages_Free:");
  throw Error(Code::limit_exceeded, "no huge pages for a region of " + std::to_string(bytes) + " bytes: " + std::to_string(needed) + " are needed, " +
                                        std::to_string(free) + " are free, and shared memory is given them '" + shmem_switch() +
                                        "'; as root reserve more (sysctl vm.nr_hugepages) or write 'advise' to " + kShmemSwitch);
}

// Huge pages of the host's pool: mapping reserves them, so that a later write cannot miss one.
bool Region::try_reserved(bool populate) {
  const uint64_t page = find_number("/proc/meminfo", "", "Hugepagesize:") * 1024;
  const uint64_t free = find_number("/proc/meminfo", "", "HugePages_Free:");
  if (page == 0 || free < round_up(bytes_, page) / page) return false;
  try {
    make(MFD_HUGETLB, round_up(bytes_, page), HugePages::Never);
  } catch (const Error&) {
    return false;  // another process was faster, or the kernel cannot seal them
  }
  page_bytes_ = page;
  if (populate) make_resident();
  return true;
}

void Region::make(unsigned flags, uint64_t mapped, HugePages huge) {
  mapped_ = mapped;
  fd_ = Fd(::memfd_create("kvxfer region", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!fd_) {
    // A system call filter, the setting vm.memfd_noexec, or a kernel without memfd_create: more memory would not help.
    const bool is_forbidden = errno == EPERM || errno == EACCES || errno == ENOSYS;
    fail_errno(is_forbidden ? Code::no_lane : Code::limit_exceeded, "memfd_create");
  }
  if (::ftruncate(fd_.get(), static_cast<off_t>(mapped_)) != 0) fail_errno(Code::limit_exceeded, "cannot size a region of " + std::to_string(bytes_) + " bytes");
  void* const at = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (at == MAP_FAILED) fail_errno(Code::limit_exceeded, "cannot map a region of " + std::to_string(bytes_) + " bytes");
  address_ = static_cast<uint8_t*>(at);
  ::madvise(address_, mapped_, huge == HugePages::Never ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);  // harmless where the host does not consent
  if (::fcntl(fd_.get(), F_ADD_SEALS, required_seals() | F_SEAL_SEAL) == 0) return;
  const std::string text = errno_text("cannot seal a region (that needs Linux 5.1 or newer)");
  release();
  throw Error(Code::no_lane, text);
}

void Region::make_resident() {
  // EINVAL: a kernel before 5.14, where each page comes with its first fault.
  if (::madvise(address_, mapped_, MADV_POPULATE_WRITE) == 0 || errno == EINVAL) return;
  const std::string text = errno_text("cannot make " + std::to_string(bytes_) + " bytes resident");
  release();
  throw Error(Code::limit_exceeded, text);
}

// The size of a huge page if the kernel has mapped at least half of the region with huge ones, else that of a small one.
uint64_t Region::count_page_bytes() const {
  const std::string consent = shmem_switch();
  if (consent.empty() || consent == "never" || consent == "deny") return kSmallPage;
  char from[32];
  std::snprintf(from, sizeof from, "%lx-", static_cast<unsigned long>(reinterpret_cast<uintptr_t>(address_)));
  if (find_number("/proc/self/smaps", from, "ShmemPmdMapped:") * 1024 < mapped_ / 2) return kSmallPage;
  return find_number("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "", "");
}

void Region::release() {
  if (address_ != nullptr) ::munmap(address_, mapped_);
  address_ = nullptr;
}

Region::~Region() { release(); }

}  // namespace kvxfer
