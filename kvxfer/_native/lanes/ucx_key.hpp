// What a MAP of lane `ucx` has in `key`: 1 byte version (1), 2 bytes length of the worker's address (little-endian), that
// address, and the rest is the packed remote key. `address` is where the memory lies at the source.
#pragma once

#include <string>
#include <string_view>

#include "machines/frames.hpp"

namespace kvxfer {

struct UcxKeyParts {
  std::string address;  // of the peer's worker
  std::string packed;   // the remote key
};

// Throws Error(no_lane): they do not fit a MAP frame.
std::string write_ucx_key(std::string_view address, std::string_view packed);
// Of memory that a peer lets us read. Throws Error(no_lane), always with the reason.
UcxKeyParts read_ucx_key(const Map& map);

}  // namespace kvxfer
