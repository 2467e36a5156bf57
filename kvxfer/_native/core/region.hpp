// A region: memory made by kvxfer, which a same-host reader can be given to look at and can never change.
//
// It is a memfd that its owner maps read-write first and then seals: FUTURE_WRITE (nobody else can map it writable),
// SHRINK and GROW (a reader that checked the size once cannot be made to fault), SEAL (the seals stay).
#pragma once

#include <cstdint>

#include "fd.hpp"

namespace kvxfer {

// What a reader insists on before it maps a descriptor that a peer sent.
int required_seals();

class Region {
 public:
  // `populate`: every page is resident when this returns. Throws Error(invalid_argument, limit_exceeded).
  Region(uint64_t bytes, bool populate);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  uint8_t* address() const { return address_; }
  uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
  uint8_t* address_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace kvxfer
