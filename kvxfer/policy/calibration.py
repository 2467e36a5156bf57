"""Decides which of the lanes that can carry a read is likely the fastest, from what earlier transfers of the same pair
took; must never time anything itself, nor decide what is possible (:mod:`kvxfer.policy.lanes`).

Every lane begins with an expectation of what it reaches where nothing is in its way. A lane that was used is judged by
what it did. The one with the highest figure goes first: so the best on paper is tried first and kept while it holds
what it promises, and one that disappoints gives the next its chance: a calibration that costs no byte of its own.
This is "optimism in the face of uncertainty" (Lai and Robbins, 1985) with a fixed prior instead of a confidence bound.

Small transfers are bound by round trips, not by bandwidth, and say nothing of it: they are counted apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from kvxfer.types import Lane

SMALL_BYTES: Final = 256 * 1024
"""Below this a transfer's time is mostly latency."""
WEIGHT: Final = 0.2
"""Of the newest measurement in a lane's running figure."""
ENOUGH: Final = 3
"""Measurements before a lane's own figure replaces what was expected of it."""

EXPECTED_GB_PER_S: Final[Mapping[Lane, float]] = {
    Lane.MEMORY: 100.0,
    Lane.UCX: 20.0,
    Lane.MAPPED: 16.0,
    Lane.CMA: 8.0,
    Lane.UNIX: 4.0,
    Lane.STREAM: 3.9,
}
"""Of a transfer of many blocks. That of UCX is RDMA's or a GPU link's; for one host see :meth:`Calibration.order`."""
EXPECTED_SMALL_S: Final[Mapping[Lane, float]] = {
    Lane.MEMORY: 1e-6,
    Lane.UCX: 20e-6,
    Lane.MAPPED: 40e-6,
    Lane.UNIX: 45e-6,
    Lane.CMA: 50e-6,
    Lane.STREAM: 60e-6,
}
"""Of a transfer of one small block."""


@dataclasses.dataclass(frozen=True)
class LaneFigure:
    """What one lane reached between one pair, as a running mean; ``count`` transfers each."""

    gb_per_s: float
    large_count: int
    small_s: float
    small_count: int


class Calibration:
    """The lanes of one pair (this agent and one life of a peer), as far as they were seen."""

    def __init__(self, *, is_same_host: bool) -> None:
        self._is_same_host = is_same_host
        self._seen: dict[Lane, LaneFigure] = {}

    def __repr__(self) -> str:
        seen = ", ".join(f"{lane.value} {figure.gb_per_s:.1f} GB/s" for lane, figure in self._seen.items())
        return f"<Calibration {seen or 'nothing seen'}>"

    def measured(self, lane: Lane, nbytes: int, seconds: float) -> None:
        """A transfer of ``nbytes`` committed; ``seconds`` from its first read to its verdict, waiting for the source to
        compute not included. Figures that cannot be (zero bytes or time) are left out.
        """
        if nbytes <= 0 or not 0 < seconds < float("inf"):
            return
        old = self._seen.get(lane, LaneFigure(0.0, 0, 0.0, 0))
        if nbytes < SMALL_BYTES:
            value = _mean(old.small_s, old.small_count, seconds)
            self._seen[lane] = LaneFigure(old.gb_per_s, old.large_count, value, old.small_count + 1)
        else:
            value = _mean(old.gb_per_s, old.large_count, nbytes / seconds / 1e9)
            self._seen[lane] = LaneFigure(value, old.large_count + 1, old.small_s, old.small_count)

    def order(self, lanes: Sequence[Lane], nbytes: int) -> tuple[Lane, ...]:
        """``lanes``, likely the fastest for ``nbytes`` first; equals keep their order, which is the operator's."""
        return tuple(sorted(lanes, key=lambda lane: self._seconds(lane, nbytes)))

    def figures(self) -> Mapping[Lane, LaneFigure]:
        """What was measured so far; for statistics and people."""
        return dict(self._seen)

    def _seconds(self, lane: Lane, nbytes: int) -> float:
        seen = self._seen.get(lane)
        if nbytes < SMALL_BYTES:
            if seen is not None and seen.small_count >= ENOUGH:
                return seen.small_s
            is_local_ucx = lane is Lane.UCX and self._is_same_host
            return EXPECTED_SMALL_S[Lane.CMA] * 1.1 if is_local_ucx else EXPECTED_SMALL_S[lane]
        if seen is not None and seen.large_count >= ENOUGH:
            return nbytes / (seen.gb_per_s * 1e9)
        expected = EXPECTED_GB_PER_S[lane]
        if lane is Lane.UCX and self._is_same_host:
            expected = EXPECTED_GB_PER_S[Lane.CMA] * 0.9  # the same system call under it
        return nbytes / (expected * 1e9)


def _mean(old: float, count: int, new: float) -> float:
    """Plain while few, then forgetting: what a lane did an hour ago matters less."""
    weight = max(WEIGHT, 1 / (count + 1))
    return old + weight * (new - old)
