"""What the holders of API keys have used, in memory that all processes of one router share.

Each process shows in its own row what it ever used of a limit, and adds up the other rows. Decides how often a process
looks at what others used where no request makes it look, and that a holder in which nothing happened costs nothing. It
must never know a key or a limit.

A number goes round where it passes 63 bits: only differences count.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from kvxfer.policy.keylimits import BOUND_MAX, KeyMeter
from kvxfer.router.group.segment import KEY_INFLIGHT, KEY_REQUESTS, KEY_SEATS, KEY_TOKENS, Cells, SharedCounts

MICRO = 1_000_000
LOOK_S = 0.05
"""Between two looks a bucket may fill without what others used meanwhile."""
_USES = (KEY_REQUESTS, KEY_TOKENS)
_HALF = 1 << 63


def _wrapped(number: int) -> int:
    """As a cell holds it."""
    return (number + _HALF) % (2 * _HALF) - _HALF


class KeyCells:
    """The holders of which one process counts something, in the row of that process."""

    def __init__(self, segment: SharedCounts, row: int) -> None:
        self._all = segment.keys
        self._own = segment.keys[row]
        self._seen: Cells = np.zeros((len(_USES), KEY_SEATS), dtype=np.int64)
        """What the other processes had used when it was looked at last, by limit and seat."""
        self._seats: dict[int, SeatUse] = {}
        self._is_used = asyncio.Event()
        self._width = 0
        self.quiet_s = 0.0

    def seat(self, seat: int) -> SeatUse:
        """A holder counts there from now on."""
        use = self._seats[seat] = SeatUse(self._all, self._own, self._seen, self, seat)
        self._width = max(self._seats) + 1
        self._is_used.set()
        return use

    def leave(self, use: SeatUse) -> None:
        """Nothing is counted there any more by this process."""
        if self._seats.get(use.seat) is use:
            del self._seats[use.seat]
            self._width = max(self._seats, default=-1) + 1
            if not self._seats:
                self._is_used.clear()

    def look(self, now: float) -> None:
        """Have each bucket take note of what other processes used since it was looked at last."""
        width = self._width
        used = self._all[:, _USES[0] :, :width].sum(axis=0) - self._own[_USES[0] :, :width]
        for seat in np.flatnonzero((used != self._seen[:, :width]).any(axis=0)).tolist():
            use = self._seats.get(seat)
            if use is not None and use.meter is not None:
                use.meter.look(now)
        self.quiet_s = now

    async def look_often(self) -> None:
        """Until cancelled."""
        while True:
            await self._is_used.wait()
            self.look(time.monotonic())
            await asyncio.sleep(LOOK_S)


class LimitUse:
    """As `policy.keylimits.SharedUse`."""

    def __init__(self, column: Cells, own: Cells, seen: Cells, cells: KeyCells, seat: int) -> None:
        self._column = column
        self._own = own
        self._seen = seen
        self._cells = cells
        self._seat = seat
        self._told: tuple[float, float, int] | None = None

    @property
    def quiet_s(self) -> float:
        return self._cells.quiet_s

    @property
    def seen(self) -> int:
        """What all had used when a bucket looked last: the others then, and this process now."""
        return _wrapped(int(self._seen[self._seat]) + int(self._own[self._seat]))

    def tell(self, level: float, at_s: float, seen: int) -> None:
        """A bucket that begins here begins as that of another process was, which had ``seen`` so much."""
        self._told = level, at_s, seen

    def begin(self, full: float, now: float) -> tuple[float, float]:
        if self._told is None:
            self._seen[self._seat] = self._others()
            return full, now
        level, at_s, seen = self._told
        self._seen[self._seat] = _wrapped(seen - int(self._own[self._seat]))
        return min(full, level), at_s

    def add(self, amount: float) -> None:
        bounded = max(-BOUND_MAX, min(BOUND_MAX, amount))
        self._own[self._seat] = _wrapped(int(self._own[self._seat]) + round(bounded * MICRO))

    def news(self) -> float:
        others, before = self._others(), int(self._seen[self._seat])
        if others == before:
            return 0.0
        self._seen[self._seat] = others
        return _wrapped(others - before) / MICRO

    def _others(self) -> int:
        return _wrapped(int(self._column.sum()) - int(self._own[self._seat]))


class SeatUse:
    """As `policy.keylimits.SharedMeter`: one holder's numbers."""

    def __init__(self, whole: Cells, own: Cells, seen: Cells, cells: KeyCells, seat: int) -> None:
        self.seat = seat
        self.meter: KeyMeter | None = None
        self._inflight = whole[:, KEY_INFLIGHT, seat]
        self._own_inflight = own[KEY_INFLIGHT]
        requests, tokens = (
            LimitUse(whole[:, number, seat], own[number], seen[place], cells, seat)
            for place, number in enumerate(_USES)
        )
        self.requests: LimitUse = requests
        self.tokens: LimitUse = tokens

    def inflight(self) -> int:
        return int(self._inflight.sum())

    def add_inflight(self, count: int) -> None:
        self._own_inflight[self.seat] += count

    def attend(self, meter: KeyMeter | None) -> None:
        self.meter = meter
