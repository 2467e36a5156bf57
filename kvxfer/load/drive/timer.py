"""A timer that an epoll waits for, to the microsecond: epoll's own time-outs are whole milliseconds.

Decides nothing. Linux's timerfd, by ctypes where Python has no name for it yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time

CLOCK_MONOTONIC, ABSOLUTE, FLAGS = 1, 1, os.O_NONBLOCK | os.O_CLOEXEC


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class WakeTimer:
    """Wakes at or before the time it was told: it is set anew only where it would wake too late."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(CLOCK_MONOTONIC, FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._spec = _TimerSpec()
        self._reference = ctypes.byref(self._spec)
        self.set_s = math.inf
        """When it will wake, by the monotonic clock."""

    def fileno(self) -> int:
        return self._fd

    def wake_by(self, at_s: float) -> None:
        if at_s < self.set_s:
            self.set_s = at_s
            at_ns = max(1, int(at_s * 1e9))
            self._spec.value_s, self._spec.value_ns = divmod(at_ns, 1_000_000_000)
            self._libc.timerfd_settime(self._fd, ABSOLUTE, self._reference, None)

    def woke(self) -> float:
        """It is readable: how late that is, in seconds."""
        late_s = time.monotonic() - self.set_s
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self.set_s = math.inf
        return late_s

    def close(self) -> None:
        os.close(self._fd)
