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
"""Of a transfer of many blocks. That of UCX is RDMA's or a GPU link's."""
EXPECTED_SMALL_S: Final[Mapping[Lane, float]] = {
    Lane.MEMORY: 1e-6,
    Lane.UCX: 20e-6,
    Lane.MAPPED: 40e-6,
    Lane.UNIX: 45e-6,
    Lane.CMA: 50e-6,
    Lane.STREAM: 60e-6,
}
"""Of a transfer of one small block."""
_LOCAL_GB_PER_S: Final = {**EXPECTED_GB_PER_S, Lane.UCX: EXPECTED_GB_PER_S[Lane.CMA] * 0.9}
_LOCAL_SMALL_S: Final = {**EXPECTED_SMALL_S, Lane.UCX: EXPECTED_SMALL_S[Lane.CMA] * 1.1}
"""Within one host UCX makes the same system call as ``cma``."""


@dataclasses.dataclass(frozen=True)
class LaneFigure:
    """What one lane reached between one pair, as a running mean; ``count`` transfers each."""

    gb_per_s: float
    large_count: int
    small_s: float
    small_count: int


_UNSEEN = LaneFigure(0.0, 0, 0.0, 0)


@dataclasses.dataclass(frozen=True)
class LaneOrder:
    """Lanes, likely the fastest first, and the figures by which they were judged then: a result says later why."""

    lanes: tuple[Lane, ...]
    nbytes: int
    is_same_host: bool
    seen: Mapping[Lane, LaneFigure]

    def passed_over(self, used: Lane) -> dict[Lane, str]:
        """For each lane that was to be tried after ``used`` only, one clause that says why, with both figures."""
        behind = self.lanes[self.lanes.index(used) + 1 :] if used in self.lanes else ()
        return {lane: self._compared(lane, used) for lane in behind}

    def _compared(self, lane: Lane, used: Lane) -> str:
        (value, how), (best, best_how) = self._figure(lane), self._figure(used)
        digits = next((digits for digits in range(2, 6) if f"{value:.{digits}g}" != f"{best:.{digits}g}"), 6)
        shown, best_shown = (self._shown(number, digits) for number in (value, best))
        return f"possible, {how} at {shown} where {used.value} is {best_how} at {best_shown}"

    def _figure(self, lane: Lane) -> tuple[float, str]:
        """Seconds of a small transfer, GB/s of another; and what that is."""
        figure = self.seen.get(lane, _UNSEEN)
        if self.nbytes < SMALL_BYTES:
            expected = _LOCAL_SMALL_S if self.is_same_host else EXPECTED_SMALL_S
            value, count = figure.small_s, figure.small_count
        else:
            expected = _LOCAL_GB_PER_S if self.is_same_host else EXPECTED_GB_PER_S
            value, count = figure.gb_per_s, figure.large_count
        return (value, "measured") if count >= ENOUGH else (expected[lane], "expected")

    def _shown(self, number: float, digits: int) -> str:
        if self.nbytes >= SMALL_BYTES:
            return f"{_plain(number, digits)} GB/s"
        return f"{_plain(number * 1e6, digits)} us" if number < 1e-3 else f"{_plain(number * 1e3, digits)} ms"


class Calibration:
    """The lanes of one pair (this agent and one incarnation of a peer), as far as they were seen."""

    def __init__(self, *, is_same_host: bool) -> None:
        self._is_same_host = is_same_host
        self._seen: Mapping[Lane, LaneFigure] = {}  # replaced, never changed: orders keep it
        self._gb_per_s = dict(_LOCAL_GB_PER_S if is_same_host else EXPECTED_GB_PER_S)
        self._small_s = dict(_LOCAL_SMALL_S if is_same_host else EXPECTED_SMALL_S)

    def __repr__(self) -> str:
        seen = ", ".join(f"{lane.value} {figure.gb_per_s:.1f} GB/s" for lane, figure in self._seen.items())
        return f"<Calibration {seen or 'nothing seen'}>"

    def measured(self, lane: Lane, nbytes: int, seconds: float) -> None:
        """A transfer of ``nbytes`` committed; ``seconds`` from its first read to its verdict, waiting for the source to
        compute not included. Figures that cannot be (zero bytes or time) are left out.
        """
        if nbytes <= 0 or not 0 < seconds < float("inf"):
            return
        old = self._seen.get(lane, _UNSEEN)
        if nbytes < SMALL_BYTES:
            value = _mean(old.small_s, old.small_count, seconds)
            figure = LaneFigure(old.gb_per_s, old.large_count, value, old.small_count + 1)
            if figure.small_count >= ENOUGH:
                self._small_s[lane] = value
        else:
            value = _mean(old.gb_per_s, old.large_count, nbytes / seconds / 1e9)
            figure = LaneFigure(value, old.large_count + 1, old.small_s, old.small_count)
            if figure.large_count >= ENOUGH:
                self._gb_per_s[lane] = value
        self._seen = {**self._seen, lane: figure}

    def order(self, lanes: Sequence[Lane], nbytes: int) -> LaneOrder:
        """``lanes``, likely the fastest for ``nbytes`` first; equals keep their order, which is the operator's."""
        if nbytes < SMALL_BYTES:
            best = sorted(lanes, key=self._small_s.__getitem__)
        else:
            best = sorted(lanes, key=self._gb_per_s.__getitem__, reverse=True)
        return LaneOrder(tuple(best), nbytes, self._is_same_host, self._seen)

    def figures(self) -> Mapping[Lane, LaneFigure]:
        """What was measured so far; for statistics and people."""
        return dict(self._seen)


def _mean(old: float, count: int, new: float) -> float:
    """Plain while few, then forgetting: what a lane did an hour ago matters less."""
    weight = max(WEIGHT, 1 / (count + 1))
    return old + weight * (new - old)


def _plain(number: float, digits: int) -> str:
    """In so many digits, or in more instead of an exponent."""
    text = f"{number:.{digits}g}"
    return f"{number:.0f}" if "e+" in text else text
