// A region: memory that kvxfer allocates, and that a reader on this host can map and read, but never change.
//
// It is a memfd that its owner maps read-write first and then seals: FUTURE_WRITE (no other process can map it writable),
// SHRINK and GROW (a reader that checked the size once cannot be made to fault), SEAL (the seals stay). Where the host has
// huge pages reserved, or gives them to shared memory on request, the region uses those: with small pages a copy of
// scattered blocks spends much of its time on address translations (TLB misses).
#pragma once

#include <cstdint>

#include "fd.hpp"

namespace kvxfer {

constexpr uint64_t kSmallPage = 4096;

// What a reader insists on before it maps a descriptor that a peer sent.
int required_seals();
// The size of the pages of a memfd; kSmallPage if no larger pages were reserved for it.
uint64_t page_bytes(int fd);

enum class HugePages : uint8_t {
  Auto,     // where enough are reserved, else where the kernel gives them on request, else small ones
  Never,
  Require,  // or none at all
};

class Region {
 public:
  // `populate`: every page is resident when this returns; required huge pages always are. Throws Error(invalid_argument,
  // limit_exceeded).
  explicit Region(uint64_t bytes, bool populate = true, HugePages huge = HugePages::Auto);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  uint8_t* address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  // The size of most of its pages. If the kernel gives huge pages on request, this is what it had given when the region was populated.
  uint64_t page_bytes() const { return page_bytes_; }

 private:
  bool try_reserved(bool populate);
  void make(unsigned flags, uint64_t mapped, HugePages huge);
  void make_resident();
  void release();
  uint64_t count_page_bytes() const;

  const uint64_t bytes_;
  uint64_t mapped_ = 0, page_bytes_ = kSmallPage;
  Fd fd_;
  uint8_t* address_ = nullptr;
};

}  // namespace kvxfer
