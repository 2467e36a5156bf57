// Reads and writes memory of the owner, which may have unmapped it, without trusting that it is there: the kernel copies, and
// reports where memory is missing. A load or a store here would end the owner's process.
//
// The kernel's call is process_vm_readv (and writev) on this process itself: one copy, and a check of each page. Memory that it
// cannot reach (a system call filter, pages that a driver mapped) goes through a pipe, whose result is final.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace kvxfer {

// Copies the bytes of `runs` to `to`. Returns how many it copied before the first unreadable byte, usually all. Throws
// Error(transport) if neither that system call nor a descriptor for a pipe is available.
size_t copy_from_owner(uint8_t* to, const iovec* runs, size_t count);

// The same in the other direction, until the first byte that cannot be written.
size_t copy_to_owner(const iovec* runs, size_t count, const uint8_t* from);

// How many bytes of `runs` can be read before the first unreadable one.
size_t readable_bytes(const iovec* runs, size_t count);

}  // namespace kvxfer
