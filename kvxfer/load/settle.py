"""Warms a service up before it is measured: rounds of requests, until one is hardly faster than the one before.

A service that has just started compiles, allocates and learns with its first requests. What they measure is not what it
holds. Decides how many rounds there are. It must never know what is measured afterwards, or what is good.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.load.run import LoadRun
from kvxfer.load.verdicts import RunVerdict

ROUNDS_MAX = 5
SETTLED_SHARE = 0.8
"""A round whose median E2E is above this share of that of the round before was no longer warming up."""
ROUND_S = 10.0
"""A round has the requests of so much time,"""
ROUND_REQUESTS_MIN = 8
"""but not fewer than these."""


@dataclasses.dataclass(frozen=True)
class WarmedUp:
    """What the rounds said: the median E2E of each, in seconds, infinite where nothing was answered whole."""

    medians_s: tuple[float, ...]

    @property
    def is_settled(self) -> bool:
        return is_settled(self.medians_s)

    @property
    def findings(self) -> list[RunVerdict]:
        """Empty where the service had settled."""
        if self.is_settled:
            return []
        shown = ", ".join(f"{median * 1e3:.0f} ms" if math.isfinite(median) else "none" for median in self.medians_s)
        return [
            RunVerdict(
                "still_warming",
                f"The service had not settled when it was first measured: the median E2E of its {len(self.medians_s)} "
                f"rounds of warm-up was {shown}.",
                False,
            )
        ]

    def to_json(self) -> dict[str, Any]:
        medians = [median if math.isfinite(median) else "inf" for median in self.medians_s]
        return {"medians_s": medians, "is_settled": self.is_settled}


def is_settled(medians_s: Sequence[float]) -> bool:
    """Whether the last round was hardly faster than the one before; one that was slower has settled too."""
    if len(medians_s) < 2 or not math.isfinite(medians_s[-1]):
        return False
    return medians_s[-1] >= SETTLED_SHARE * medians_s[-2]


def round_requests(rate: float, most: int) -> int:
    """Of a round at ``rate``; at most ``most``."""
    return min(most, max(ROUND_REQUESTS_MIN, math.ceil(rate * ROUND_S)))


def settle(run_round: Callable[[int], LoadRun]) -> WarmedUp:
    """``run_round`` is told the number of each round, from 1 on, and sends it. A round that was cut is the last."""
    medians: list[float] = []
    while len(medians) < ROUNDS_MAX and not is_settled(medians):
        made = run_round(len(medians) + 1)
        whole = [record.e2e_s for record in made.records if math.isfinite(record.e2e_s)]
        medians.append(statistics.median(whole) if whole else math.inf)
        if made.ended != "complete":
            break
    return WarmedUp(tuple(medians))
