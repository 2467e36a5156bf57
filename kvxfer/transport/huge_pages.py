"""Moves foreign memory into huge pages, where the host allows them: one call of the kernel copies
out of, or into, such memory up to twice as fast. Decides only which parts are worth it; must never change a byte, nor
overrule a host that is set to ``never``.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import pathlib
import threading
import time
from collections.abc import Sequence

from kvxfer.transport.base import Region

log = logging.getLogger("kvxfer.memory")

HUGE_BYTES = 2 << 20
PIECE_BYTES = 16 * HUGE_BYTES
"""Of one call, some 100 ms of the kernel's work; between two of them it can be stopped."""
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
SWITCHES = pathlib.Path("/sys/kernel/mm/transparent_hugepage")
PASSING = (errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.EINVAL)
"""Errors of one piece, which say nothing of the next: pages in use, no huge page free, a hole, never touched."""


def is_allowed() -> bool:
    """Whether this host lets a program ask for huge pages in memory of its own."""
    for file in (SWITCHES / f"hugepages-{HUGE_BYTES >> 10}kB" / "enabled", SWITCHES / "enabled"):
        try:
            chosen = file.read_text()
        except OSError:  # a kernel that has no switch for each size, or no huge pages
            continue
        if "[inherit]" not in chosen:
            return "[never]" not in chosen
    return False


def collapse(address: int, length_bytes: int, stop: threading.Event) -> int:
    """Have the kernel copy the memory into huge pages, piece by piece, until ``stop``; what it holds stays as it is,
    and may be used meanwhile. Takes about two seconds a GiB. Returns how many bytes lie in huge pages now: 0 on kernels
    before 6.1, which do that by themselves, later, for memory that is touched often."""
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    end = (address + length_bytes) // HUGE_BYTES * HUGE_BYTES
    if first >= end or not is_allowed() or _madvise(first, end - first, MADV_HUGEPAGE) != 0:
        return 0
    if _madvise(first, 0, MADV_COLLAPSE) != 0:  # the kernel does not know it
        return 0
    done = 0
    for at in range(first, end, PIECE_BYTES):
        if stop.is_set():
            break
        size = min(PIECE_BYTES, end - at)
        error = _madvise(at, size, MADV_COLLAPSE)
        if error == 0:
            done += size
        elif error not in PASSING:
            break
    return done


class Collapsing:
    """:func:`collapse` of some regions, one after the other, on a thread of its own, which keeps them alive so long."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvxfer-huge-pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it after the piece that it is at."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        began_s = time.monotonic()
        done = sum(collapse(region.address, region.length_bytes, self._stop) for region in self._regions)
        total = sum(region.length_bytes for region in self._regions)
        log.debug("%d of %d bytes lie in huge pages, after %.1f s", done, total, time.monotonic() - began_s)


def _madvise(address: int, length_bytes: int, advice: int) -> int:
    """An errno, or 0. The GIL is not held."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0
