"""Which place of the shared memory something has: a worker, a holder of API keys.

Decides when a place may be another's. It must never know what is counted there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvxfer.router.group.messages import NO_SEAT

OwnerT = TypeVar("OwnerT", bound=Hashable)


class Seats(Generic[OwnerT]):
    """A seat is free again once every member has said that it no longer knows its owner, and nothing is in flight
    there: a member that knew the owner might still count.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._seats: dict[OwnerT, int] = {}
        self._left: dict[OwnerT, int] = {}
        """Gone in that version."""

    def take(self, owner: OwnerT) -> int:
        """The seat of one that is listed; NO_SEAT where all are taken."""
        self._left.pop(owner, None)
        if owner not in self._seats and self._free:
            self._seats[owner] = heapq.heappop(self._free)
        return self._seats.get(owner, NO_SEAT)

    def leave(self, owner: OwnerT, version: int) -> None:
        if owner in self._seats:
            self._left[owner] = version

    def freed(self, applied: int, inflight: Callable[[int], int]) -> tuple[OwnerT, ...]:
        """Every member has applied that version. Returns those whose seats are free now."""
        done = [one for one, version in self._left.items() if version <= applied and not inflight(self._seats[one])]
        for owner in done:
            del self._left[owner]
            heapq.heappush(self._free, self._seats.pop(owner))
        return tuple(done)
