// The `mapped` lane, the reader's side: a peer's pool or region mapped read-only, and copies out of it.
//
// A descriptor from a peer is believed in nothing: it must carry the seals that keep its size and its contents out of
// reach of surprise (see region.hpp), be as large as it claims, and hold every segment that is claimed to lie in it.
//
// The first touch of a mapped page costs a fault, as much as the copy of it. Idle time is used to take those faults ahead,
// and only for pages that the source has filled: looking at the others would make them.
#pragma once

#include "copy.hpp"
#include "read_job.hpp"

namespace kvxfer {

// Throws Error(no_lane) with the reason.
std::shared_ptr<RemoteMemory> open_mapped(const Map& map, Fd descriptor, std::shared_ptr<Copier> copier);

}  // namespace kvxfer
