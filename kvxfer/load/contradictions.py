"""Probes that contradict each other: a lower rate was clearly worse than a higher one, which no load explains.

Something else does: engines that were cold, another tenant, a worker that came back. A first probe that alone failed is
doubted as well: all later ones stay below it, and none of them can contradict it. Decides which probe is doubted, and
what a second one at its rate means. It must never know requests, or where a search goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

DOUBTS_MAX = 2
"""So many rates a search probes again for their sake."""
PASSED_SINCE = 2


@dataclasses.dataclass(frozen=True)
class ProbedShare:
    """What one probe said: the share of good requests at a rate, with bounds for requests that are not independent."""

    number: int
    rate: float
    low: float
    high: float

    passed: bool = False

    def is_worse_than(self, other: ProbedShare) -> bool:
        return self.high < other.low


def doubted(shares: Sequence[ProbedShare]) -> tuple[ProbedShare, ProbedShare | None] | None:
    """(the lower rate, the higher one) of the first pair that contradicts itself; (the first probe, None) where it
    alone failed, and PASSED_SINCE or more passed since. None: there is none."""
    for one in shares:
        better = [other for other in shares if other.rate > one.rate and one.is_worse_than(other)]
        if better:
            return one, max(better, key=lambda other: other.low)
    first = min(shares, key=lambda one: one.number, default=None)
    if first is not None and not first.passed and sum(one.passed for one in shares) == len(shares) - 1 >= PASSED_SINCE:
        return first, None
    return None


def outvoted(lower: ProbedShare, higher: ProbedShare | None, again: ProbedShare) -> ProbedShare | None:
    """Which of those that were doubted stands alone, once the lower rate was probed again; None: it is confirmed."""
    if higher is None:
        return lower if lower.is_worse_than(again) else None
    return higher if again.is_worse_than(higher) else lower
