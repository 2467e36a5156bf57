"""One end's pool: memory of a named kind, what must be in it, and whether it is.

It decides which kind of pages a pool lies on, what memory is kept from all pools, which blocks a seed chooses, and how
a destination is poisoned and checked. It must never know which contender moves the
bytes: every contender's pool is made here, so all stand on the same ground.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_BYTES = 2 << 20
STEP_BYTES = 4 << 20
"""How much is poisoned or compared at a time, so that temporary copies stay small."""

Ids = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


class Pages:
    """How a pool is backed. ``SMALL`` and ``HUGE`` are private memory, as an engine's own tensors are."""

    SMALL = "4k"
    HUGE = "huge"


def choose(seed: int, blocks: int, count: int) -> Ids:
    """``count`` of ``blocks`` blocks in random order, none twice; the same everywhere for the same seed."""
    return np.random.default_rng(seed).permutation(blocks)[:count].astype(np.uint32)


def choose_pair(seed: int, blocks: int, count: int) -> tuple[Ids, Ids]:
    """(blocks of the source, blocks of the destination) of the transfer with this seed."""
    return choose(2 * seed, blocks, count), choose(2 * seed + 1, blocks, count)


def anonymous(nbytes: int, pages: str) -> Bytes:
    """Zeroed private memory on pages of that kind, all of it resident. Raises RuntimeError where the host has none."""
    padded = (nbytes + HUGE_BYTES - 1) // HUGE_BYTES * HUGE_BYTES + HUGE_BYTES
    mapping = mmap.mmap(-1, padded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if pages == Pages.HUGE else mmap.MADV_NOHUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_BYTES
    pool = np.frombuffer(mapping, np.uint8, nbytes, start)
    pool[:: mmap.PAGESIZE] = 0
    if pages == Pages.HUGE and huge_share(address_of(pool), nbytes) < 0.9:
        raise RuntimeError("no huge pages for private memory: /sys/kernel/mm/transparent_hugepage/enabled says never")
    return pool


def together(array: Bytes) -> float:
    """The share of its pages that lie right behind the one before in physical memory; 0 where that cannot be seen."""
    pages = array.nbytes // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(address_of(array) // mmap.PAGESIZE * 8)
            entries = np.frombuffer(file.read(pages * 8), np.uint64)
    except OSError:
        return 0.0
    return neighbouring(entries)


def neighbouring(entries: npt.NDArray[np.uint64]) -> float:
    """Of pagemap entries: the share of frames that follow the one before. All are 0 without CAP_SYS_ADMIN."""
    frames = (entries & np.uint64((1 << 55) - 1)).astype(np.int64)
    return float(np.mean(np.diff(frames) == 1)) if frames.size > 1 else 0.0


class Scraps:
    """Holds memory that lies in small pieces, so that every pool on 4K pages is made of what lies together.

    The process that starts first would get the pieces, and be read up to a third slower for as long as it runs.
    Without CAP_SYS_ADMIN it is not known how pages lie; then as much is held as may be.
    """

    STEP_BYTES = 128 << 20
    BYTES_MAX = 2 << 30
    OF_AVAILABLE = 8
    ENOUGH = 0.99

    def __init__(self) -> None:
        self.held: list[Bytes] = []

    def hold(self) -> None:
        """Take them, until they are used up, or as much as is fair; once until they are given back."""
        if self.held:
            return
        room = min(self.BYTES_MAX, available() // self.OF_AVAILABLE)
        while len(self.held) * self.STEP_BYTES + self.STEP_BYTES <= room:
            self.held.append(anonymous(self.STEP_BYTES, Pages.SMALL))
            if together(self.held[-1]) >= self.ENOUGH:
                break

    def give_back(self) -> None:
        self.held.clear()


def available() -> int:
    """Bytes of memory that may be taken: of the machine's, and of what this container may have."""
    kib = next(
        line.split()[1] for line in pathlib.Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line
    )
    found = int(kib) << 10
    own = pathlib.Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # none, or "max"
        found = min(found, int((own / "memory.max").read_text()) - int((own / "memory.current").read_text()))
    return max(found, 0)


def address_of(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def huge_share(address: int, nbytes: int) -> float:
    """The share of a mapping that huge pages back now."""
    start, huge_kib = 0, 0
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(part, 16) for part in words[0].split("-"))
            start = low if low < address + nbytes and address < high else 0
        elif start and words[0] in ("AnonHugePages:", "ShmemPmdMapped:"):
            huge_kib += int(words[1])
    return huge_kib * 1024 / nbytes


class Pool:
    """A pool and the bytes that belong in it: the reference, which all processes of a run share."""

    def __init__(self, memory: Bytes, reference_fd: int) -> None:
        self.memory = memory
        view = mmap.mmap(reference_fd, len(memory), mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(reference_fd)
        self.reference = np.frombuffer(view, np.uint8)

    @property
    def address(self) -> int:
        return address_of(self.memory)

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def fill(self) -> None:
        """Make it a source."""
        self.memory[:] = self.reference

    def poison(self, block_bytes: int, source: Ids, destination: Ids) -> None:
        """Set every byte that must arrive to its complement."""
        own, want = self.memory.reshape(-1, block_bytes), self.reference.reshape(-1, block_bytes)
        for at in _steps(block_bytes, len(source)):
            own[destination[at]] = ~want[source[at]]

    def is_right(self, block_bytes: int, source: Ids, destination: Ids) -> bool:
        """Whether every byte of these blocks is what the source held."""
        own, want = self.memory.reshape(-1, block_bytes), self.reference.reshape(-1, block_bytes)
        return all(np.array_equal(own[destination[at]], want[source[at]]) for at in _steps(block_bytes, len(source)))


def _steps(block_bytes: int, count: int) -> list[slice]:
    step = max(1, STEP_BYTES // block_bytes)
    return [slice(i, i + step) for i in range(0, count, step)]
