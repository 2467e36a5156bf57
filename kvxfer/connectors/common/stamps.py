"""Stamps of files: the state in which a file was seen, which no later write leaves unchanged. Decides when a stamp can
be trusted; must never know what a file is for.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import stat
import time

from kvxfer.clock import NS_PER_S

COARSE_NS = 2 * NS_PER_S
"""File systems that keep whole seconds, FAT's even ones: a write so soon after another may leave the stamp as it
was."""
FINE_NS = NS_PER_S // 10
"""The kernel's clock for files goes by ticks of at most 10 ms."""
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """One state of one file. ``ctime_ns`` cannot be set by programs, ``mtime_ns`` can; both since the epoch."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def newest_ns(self) -> int:
        """When it was last written, or given another time."""
        return max(self.mtime_ns, self.ctime_ns)

    @property
    def is_coarse(self) -> bool:
        """Whether its file system keeps whole seconds, as it seems."""
        return self.ctime_ns % NS_PER_S == 0

    def was_settled(self, now_ns: int) -> bool:
        """Whether a write after ``now_ns``, when the stamp was taken, would have changed it: its tick was over."""
        return self.unsettled_ns(now_ns) == 0

    def unsettled_ns(self, now_ns: int) -> int:
        """How long it is until that is so."""
        return max(0, self.ctime_ns + (COARSE_NS if self.is_coarse else FINE_NS) - now_ns)

    def is_older(self, time_ns: int) -> bool:
        """Whether the file was not written since then."""
        return self.newest_ns + (COARSE_NS if self.is_coarse else 0) <= time_ns


def stamp_of(path: str | os.PathLike[str]) -> Stamp:
    """The file as it is now. It is opened for that, so that a network file system asks its server. Raises OSError, also
    where it is no regular file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return stamp_of_open(file)
    finally:
        os.close(file)


def stamp_of_open(file: int) -> Stamp:
    """As :func:`stamp_of`, of a descriptor."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def process_start_ns() -> int | None:
    """When this process began, in nanoseconds since the epoch, to a hundredth of a second; ``None`` where the kernel
    does not say."""
    try:
        after_name = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_s
    except (OSError, ValueError, IndexError):
        return None
    return time.time_ns() - round(age_s * NS_PER_S) if start_s > 0 and age_s >= 0 else None


def boot_id() -> str:
    """Of the running kernel; empty where it does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
