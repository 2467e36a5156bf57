// Memory of the owner, which may have unmapped it since, read and written without trusting that it is there: the kernel
// copies, and says where it found nothing. A load or a store of our own would end the process, which is the owner's.
//
// The kernel's way is process_vm_readv (and writev) on ourselves, which costs one copy and a look at each page. What that cannot
// reach (a filter of system calls forbids it, pages that a driver mapped) goes through a pipe, whose answer is the last word.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace kvxfer {

// Copies the bytes of `runs` to `to`. Returns how many there were before the first that cannot be read: all, as a rule.
// Throws Error(transport) where there is neither that system call nor a descriptor for a pipe.
size_t copy_from_owner(uint8_t* to, const iovec* runs, size_t count);

// The same the other way round, until the first byte that cannot be written.
size_t copy_to_owner(const iovec* runs, size_t count, const uint8_t* from);

// Of the bytes of `runs`, how many can be read before the first that cannot.
size_t readable_bytes(const iovec* runs, size_t count);

}  // namespace kvxfer
