"""Stamps of files: what the file system says of a file's state (inode, size, times). A write changes the stamp, unless
it comes so soon after another that the file system gives both the same time. Decides when a stamp rules that out; must
never know what a file is for.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import stat
import time

from kvxfer.clock import NS_PER_S

COARSE_NS = 2 * NS_PER_S
"""The time in which a second write may leave the stamp unchanged on a file system that keeps whole seconds (FAT: even
seconds)."""
FINE_NS = NS_PER_S // 10
"""The same on other file systems: the kernel advances the clock of files every 10 ms or more often."""
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
        """When the file was last written, or its times were last set."""
        return max(self.mtime_ns, self.ctime_ns)

    @property
    def is_coarse(self) -> bool:
        """Whether its file system seems to keep whole seconds."""
        return self.ctime_ns % NS_PER_S == 0

    def was_settled(self, now_ns: int) -> bool:
        """Whether any write after ``now_ns``, when the stamp was taken, would change the stamp."""
        return self.unsettled_ns(now_ns) == 0

    def unsettled_ns(self, now_ns: int) -> int:
        """How long to wait until :meth:`was_settled` is true."""
        return max(0, self.ctime_ns + (COARSE_NS if self.is_coarse else FINE_NS) - now_ns)

    def is_older(self, time_ns: int) -> bool:
        """Whether the file was last written before ``time_ns``."""
        return self.newest_ns + (COARSE_NS if self.is_coarse else 0) <= time_ns


def stamp_of(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of the file as it is now. This opens the file, so that a network file system asks its server. Raises
    OSError, also if it is no regular file."""
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
