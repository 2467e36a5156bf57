"""The prompts that one worker was given and has not computed yet, in seconds of its work.

Decides how long a new one would wait, and what the ends of the others tell of the worker's speed: while it is busy, the
time between two ends is the time that the second took, whatever the worker says of itself. It must never know a clock,
nor how a prompt's seconds are estimated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvxfer.policy.curves import attended

WINDOW = 64
"""Mean prompts' seconds over which the rate of arrivals is taken: long enough for a rate, short enough to follow an
hour's change."""
BURST_MAX = 8
"""Prompts of one busy period that are measured together; then a new period begins."""


class Amount(NamedTuple):
    """So many prompts, their new tokens, and the pairs of tokens attended to."""

    prompts: float
    new: float
    pairs: float

    def and_one(self, new: float, held: float) -> Amount:
        """With one prompt more."""
        return Amount(self.prompts + 1.0, self.new + new, self.pairs + attended(new, held))


NO_AMOUNT = Amount(0.0, 0.0, 0.0)


class Measured(NamedTuple):
    """What was computed within ``seconds`` in which the worker was busy: by its own words of its cache, and by what was
    presumed of it."""

    said: Amount
    presumed: Amount
    seconds: float


class Line:
    """Of one worker. Times are seconds of the caller's clock."""

    __slots__ = (
        "_arrivals",
        "_arrived_s",
        "_first_s",
        "_presumed",
        "_said",
        "_since_s",
        "_total_s",
        "_unheard_s",
        "_works",
    )

    def __init__(self) -> None:
        self._works: dict[int, float] = {}
        """The seconds expected of each by the caller's number, in the order in which they came."""
        self._total_s = 0.0
        self._first_s = 0.0
        """When the first of them was begun: when the one before it ended, or when it came."""
        self._since_s = 0.0
        """When the busy period began that is being measured."""
        self._said = self._presumed = NO_AMOUNT
        """Of those that ended in this busy period."""
        self._unheard_s = 0.0
        """Until when the worker computes the prompts whose ends are not heard."""
        self._arrivals = 0.0
        self._arrived_s = 0.0

    def __len__(self) -> int:
        return len(self._works)

    def add(self, number: int | None, seconds: float, now_s: float, mean_s: float) -> None:
        """One more came, of which ``seconds`` are expected. ``mean_s``: those of a prompt of this kind on the average,
        0 where none is known. ``number`` is None where its end will not be heard: it is over when its time is."""
        self._arrivals = self._arrivals * self._kept(now_s, mean_s) + 1.0
        self._arrived_s = now_s
        if number is None:
            self._unheard_s = max(now_s, self._unheard_s) + seconds
            return
        if not self._works:
            self._first_s = now_s
            self._begin_period(now_s)
            self._total_s = 0.0  # not what rounding left
        self._works[number] = seconds
        self._total_s += seconds

    def _kept(self, now_s: float, mean_s: float) -> float:
        span_s = WINDOW * mean_s
        return math.exp(-max(0.0, now_s - self._arrived_s) / span_s) if span_s > 0 else 1.0

    def rate(self, now_s: float, mean_s: float) -> float:
        """Prompts a second that come lately, with those of a while ago counted less and less."""
        return self._arrivals * self._kept(now_s, mean_s) / (WINDOW * mean_s) if mean_s > 0 else 0.0

    def wait_s(self, now_s: float) -> float:
        """Until all that came are computed. The first counts for less the longer it is under way."""
        unheard_s = max(0.0, self._unheard_s - now_s)
        if not self._works:
            return unheard_s
        first = next(iter(self._works.values()))
        return unheard_s + max(0.0, self._total_s - min(max(0.0, now_s - self._first_s), first))

    def ended(self, number: int, tokens: float, said: float, presumed: float, now_s: float) -> Measured | None:
        """One of ``tokens`` was computed, of which by the worker's words ``said`` were in its cache, and ``presumed``
        by the caller's. Returns what was measured, where a busy period of some work is over."""
        if not self._remove(number, now_s):
            return None
        self._said = self._said.and_one(tokens - said, said)
        self._presumed = self._presumed.and_one(tokens - presumed, presumed)
        if self._works and self._said.prompts < BURST_MAX:
            return None
        measured = Measured(self._said, self._presumed, now_s - self._since_s)
        self._begin_period(now_s)
        return measured if measured.seconds > 0 else None

    def lost(self, number: int, now_s: float) -> None:
        """One was not computed: it failed, or nobody wants it any more. Nothing is learnt of this busy period."""
        if self._remove(number, now_s):
            self._begin_period(now_s)

    def _begin_period(self, now_s: float) -> None:
        self._since_s = now_s
        self._said = self._presumed = NO_AMOUNT

    def _remove(self, number: int, now_s: float) -> bool:
        seconds = self._works.pop(number, None)
        if seconds is None:
            return False
        self._total_s -= seconds
        self._first_s = now_s
        return True
