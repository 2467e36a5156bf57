"""The counter of incarnations, which outlives a coordinator process. Decides that it never goes back; must never know
what a member is.
"""

from __future__ import annotations

from typing import Protocol

from kvxfer.errors import RefusedError

AHEAD_MAX = 1 << 45
"""How far above our own counter the number of a returning agent may lie: about a year of microseconds. No coordinator
of this cluster ever gave a higher one.
"""


class Store(Protocol):
    """Asynchronous, because a durable or shared one has to wait for a disk or a quorum."""

    async def next_number(self) -> int:
        """A number above every one that was ever given or admitted."""
        ...

    async def admit_number(self, number: int) -> None:
        """Stay above a number that a live agent shows. Raises RefusedError for one that no coordinator can have
        given."""
        ...


class MemoryStore:
    """Forgets everything with the process, except that its numbers begin at the wall clock's microseconds.

    A restarted coordinator thus begins above all earlier numbers, as long as fewer than a million are given a second.
    Where the clock was set back meanwhile, the agents that come back raise the counter above theirs.
    """

    def __init__(self, wall_clock_us: int) -> None:
        """``wall_clock_us``: microseconds since 1970, read once by the caller."""
        self._last = wall_clock_us

    async def next_number(self) -> int:
        self._last += 1
        return self._last

    async def admit_number(self, number: int) -> None:
        if number > self._last + AHEAD_MAX:
            raise RefusedError(f"incarnation number {number} is far above every number of this cluster")
        self._last = max(self._last, number)

    def __repr__(self) -> str:
        return f"<MemoryStore at {self._last}>"
