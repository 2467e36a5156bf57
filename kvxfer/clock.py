"""Where time comes from: one method, so that everything above the pure floors can be given another clock. Decides
nothing, and never knows what time of day it is.
"""

from __future__ import annotations

import time
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Clock(Protocol):
    """A monotonic clock; its zero means nothing, and two clocks are not comparable."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The operating system's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def __repr__(self) -> str:
        return "SystemClock()"
