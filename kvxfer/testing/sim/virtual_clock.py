"""Virtual time: an integer of nanoseconds and a heap of what will happen; never knows what the events mean.

Two events of the same nanosecond happen in the order in which they were asked for, so a run depends on nothing but
its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

US = 1_000
MS = 1_000_000
S = 1_000_000_000
NEVER = (1 << 63) - 1


class VirtualClock:
    """A clock that jumps from event to event; also a ``kvxfer.clock.Clock``."""

    def __init__(self) -> None:
        self.now = 0
        self.fired = 0
        self._asked = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def now_ns(self) -> int:
        return self.now

    def call_at(self, at_ns: int, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback(*args)`` at ``at_ns``, or now if that has passed."""
        self._asked += 1
        heapq.heappush(self._heap, (max(at_ns, self.now), self._asked, callback, args))

    def call_after(self, delay_ns: int, callback: Callable[..., None], *args: Any) -> None:
        self._asked += 1
        heapq.heappush(self._heap, (self.now + delay_ns, self._asked, callback, args))

    def run_until(self, end_ns: int) -> None:
        """Let everything happen that is due up to and including ``end_ns``; afterwards it is ``end_ns``."""
        heap = self._heap
        while heap and heap[0][0] <= end_ns:
            self.now, _, callback, args = heapq.heappop(heap)
            self.fired += 1
            callback(*args)
        self.now = max(self.now, end_ns)

    def __repr__(self) -> str:
        return f"<VirtualClock {self.now / S:.6f} s, {len(self._heap)} to come>"
