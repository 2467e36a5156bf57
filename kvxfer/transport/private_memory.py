"""Memory of this process alone, for hosts that forbid shared memory (a seccomp profile without ``memfd_create``).

Decides how it is made resident; must never know what lies in it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap

import numpy as np
import numpy.typing as npt

from kvxfer.errors import LimitExceededError

log = logging.getLogger("kvxfer.memory")


def allocate_private(length_bytes: int, why: Exception) -> npt.NDArray[np.uint8]:
    """Zeroed, page-aligned, resident memory; ``why`` it cannot be shared is logged. Raises LimitExceededError where the
    host has not so much.
    """
    log.warning("memory is private to this process, so lane mapped cannot carry it: %s", why)
    try:
        memory = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise LimitExceededError(f"cannot map {length_bytes} bytes of private memory: {error}") from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array.fill(0)  # makes it resident
    return array
