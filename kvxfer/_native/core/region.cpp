#include "region.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvxfer {

int required_seals() { return F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW; }

Region::Region(uint64_t bytes, bool populate) : bytes_(bytes) {
  if (bytes == 0 || bytes > (uint64_t{1} << 46)) throw Error(Code::invalid_argument, "a region needs 1 byte to 64 TiB, not " + std::to_string(bytes));
  fd_ = Fd(::memfd_create("kvxfer region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd_) fail_errno(Code::limit_exceeded, "memfd_create");
  if (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) fail_errno(Code::limit_exceeded, "cannot size a region of " + std::to_string(bytes) + " bytes");
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) fail_errno(Code::limit_exceeded, "cannot map a region of " + std::to_string(bytes) + " bytes");
  address_ = static_cast<uint8_t*>(mapped);
  ::madvise(address_, bytes, MADV_HUGEPAGE);  // taken where the host consents, harmless elsewhere
  const bool is_sealed = ::fcntl(fd_.get(), F_ADD_SEALS, required_seals() | F_SEAL_SEAL) == 0;
  const int seal_error = errno;
  // EINVAL: a kernel before 5.14, where the pages come one fault at a time.
  const bool is_populated = !populate || ::madvise(address_, bytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
  if (is_sealed && is_populated) return;
  const std::string text = is_sealed ? errno_text("cannot make " + std::to_string(bytes) + " bytes resident") : errno_text("cannot seal a region", seal_error);
  ::munmap(address_, bytes);
  throw Error(Code::limit_exceeded, text);
}

Region::~Region() { ::munmap(address_, bytes_); }

}  // namespace kvxfer
