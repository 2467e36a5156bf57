// The `mapped` lane, the reader's side: a peer's pool or region mapped read-only, and copies out of it.
//
// Nothing is trusted of a peer's descriptor: it must carry the seals that fix its size and protect its contents (see region.hpp),
// be as large as it claims, and hold every segment that it claims.
//
// The first touch of a mapped page costs a page fault, which takes as long as copying the page. prefault() takes those faults in
// idle time. It touches only pages that the source has filled, because touching another page would allocate it.
#pragma once

#include "copy.hpp"
#include "read_job.hpp"

namespace kvxfer {

// Throws Error(no_lane) with the reason.
std::shared_ptr<RemoteMemory> open_mapped(const Map& map, Fd descriptor, std::shared_ptr<Copier> copier);

}  // namespace kvxfer
