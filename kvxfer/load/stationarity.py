"""Whether a run had come to rest: its backlog does not grow, and its second half is not worse than its first.

A run above capacity only measures how far its backlog has grown, so its attainment says nothing about the rate. What
makes this hard: the number of requests in flight is correlated over seconds, and a plain regression takes a wave for a
trend. So the window is divided into blocks of equal length, the line is fitted to the blocks' means, and its error is
widened by what correlation is left between neighbouring blocks: (1 + r) / (1 - r) for a first-order autoregression,
with as many degrees fewer (batch means, Law and Kelton). ``r`` is the lag-1 correlation of the residuals, corrected for
its bias in so short a series. A slope of less than 1 % of the rate is no backlog: each run without warm-up has one.

How honest that is (M/M/1 and M/D/1, 900 requests after 180 of warm-up, 600 seeds each): of runs at 80 % of the capacity
0 to 0.5 % are called growing, at 90 % 1 to 4 %, at 95 % 3 to 10 %, at 110 % 75 to 89 %, at 120 % 98 to 100 %.

Decides from records alone. It must never know what rate was asked for, or what the run is for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.load.limits import LatencyLimits
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

BLOCKS = 20
BLOCK_REQUESTS_MIN = 5
"""Due in a block, on average; with fewer nothing is claimed."""
CORRELATION_MAX = 0.8
DEGREES_MIN = 3.0
"""Correlation leaves at least so many: a backlog that grows in a bow is no wave."""
GROWTH_MIN = 0.01
"""Of the requests due that pile up, before a backlog is said to grow."""
T_95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
)
"""One-sided 95 % quantiles of Student's t, from 1 degree of freedom."""

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Stationarity:
    """What the blocks of a window say. All None where there were too few requests."""

    in_flight: tuple[float, ...]
    """Mean number of requests begun and not ended, of each block."""
    growth_per_s: float | None = None
    """Slope of the requests in flight."""
    growth_share: float | None = None
    """The same over the requests due each second: the share of them that piles up."""
    growth_low_per_s: float | None = None
    """The slope is above this with 95 %."""
    attainment_first: float | None = None
    """Share of good requests among those due in the first half."""
    attainment_second: float | None = None
    loss_low: float | None = None
    """The first half is better than the second by more than this with 95 %; below 0 where that is not sure."""
    effective_requests: float = 0.0
    """So many independent requests would say as much about the attainment: slow answers come together."""

    @property
    def is_known(self) -> bool:
        return self.growth_low_per_s is not None

    @property
    def is_growing(self) -> bool:
        """The backlog grows: the slope is positive at 95 %, and at least GROWTH_MIN of the requests due."""
        if self.growth_low_per_s is None or self.growth_share is None:
            return False
        return self.growth_low_per_s > 0 and self.growth_share >= GROWTH_MIN

    @property
    def is_worsening(self) -> bool:
        """The second half's attainment is below the first's by more than the interval."""
        return self.loss_low is not None and self.loss_low > 0

    @property
    def is_stationary(self) -> bool:
        """Nothing speaks against it. Of too few requests nothing does: see ``is_known``."""
        return not self.is_growing and not self.is_worsening

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        flags = ("is_known", "is_growing", "is_worsening", "is_stationary")
        return {**values, "in_flight": list(self.in_flight), **{name: getattr(self, name) for name in flags}}


def stationarity(run: LoadRun, limits: LatencyLimits) -> Stationarity:
    """What the window of ``run`` says about whether it had come to rest. What is left of the window after the last
    request was due is not looked at: there the backlog only falls.
    """
    counted = run.counted
    begin, end = run.window_s
    end = min(end, max((record.due_s for record in counted), default=begin))
    if not end > begin or len(counted) < BLOCKS * BLOCK_REQUESTS_MIN:
        return Stationarity(effective_requests=float(len(counted)), in_flight=())
    edges = np.linspace(begin, end, BLOCKS + 1)
    in_flight = mean_in_flight(run.records, edges)
    slope, slope_error, degrees = trend(in_flight)
    per_s = BLOCKS / (end - begin)
    place = np.searchsorted(edges, [record.due_s for record in counted], side="right") - 1
    place = np.clip(place, 0, BLOCKS - 1)
    due = np.bincount(place, minlength=BLOCKS).astype(float)
    good = np.bincount(place, [limits.is_met(record) for record in counted], minlength=BLOCKS).astype(float)
    first, second, loss_low = _halves(good, due)
    return Stationarity(
        in_flight=tuple(float(value) for value in in_flight),
        growth_per_s=slope * per_s,
        growth_share=slope * per_s * (end - begin) / len(counted),
        growth_low_per_s=(slope - student(degrees) * slope_error) * per_s,
        attainment_first=first,
        attainment_second=second,
        loss_low=loss_low,
        effective_requests=len(counted) / design_effect(good, due),
    )


def mean_in_flight(records: Sequence[MeasuredRequest], edges: Floats) -> Floats:
    """How many requests were begun and not ended, on average between each two neighbouring ``edges``. One without an
    end is in flight until the last.
    """
    begun = [record for record in records if record.acted_s is not None]
    began = np.array([record.acted_s for record in begun], dtype=float)
    ended = np.array([math.inf if record.end_s is None else record.end_s for record in begun], dtype=float)
    ended = np.maximum(ended, began)
    before = [float(np.sum(np.maximum(0.0, at - began) - np.maximum(0.0, at - ended))) for at in edges]
    return np.asarray(np.diff(before) / np.diff(edges), dtype=float)


def trend(values: Floats) -> tuple[float, float, float]:
    """(slope from one value to the next, its standard error, degrees of freedom) of a line through ``values``, with the
    error widened by the correlation of its residuals.
    """
    count = len(values)
    places = np.arange(count) - (count - 1) / 2
    across = float(places @ places)
    slope = float(values @ places) / across
    residuals = values - values.mean() - slope * places
    widened, degrees = correlation(residuals)
    variance = float(residuals @ residuals) / (count - 2)
    return slope, math.sqrt(variance / across * widened), max(DEGREES_MIN, degrees - 2)


def correlation(residuals: Floats) -> tuple[float, float]:
    """(how many times larger the variance of a mean is than that of independent values, as how many independent values
    they count), by the lag-1 correlation.
    """
    count = len(residuals)
    total = float(residuals @ residuals)
    if total <= 1e-12 * count:
        return 1.0, float(count)
    lag = (float(residuals[1:] @ residuals[:-1]) / total + 2 / count) / (1 - 3 / count)
    lag = min(max(lag, 0.0), CORRELATION_MAX)
    widened = (1 + lag) / (1 - lag)
    return widened, count / widened


def student(degrees: float) -> float:
    """The one-sided 95 % quantile of Student's t; above 20 degrees within .003."""
    whole = max(1, int(degrees))
    return T_95[whole - 1] if whole <= len(T_95) else 1.645 + 1.6 / whole


def design_effect(good: Floats, due: Floats) -> float:
    """How many requests say as much as one independent one: the variance of the blocks' shares about the share of all,
    over that of independent requests. 1 to 50.
    """
    total = float(due.sum())
    share = float(good.sum()) / total
    expected = share * (1 - share) * total / len(due)
    if expected <= 1e-12:
        return 1.0
    residuals = good - share * due
    widened, _ = correlation(residuals)
    variance = float(residuals @ residuals) / (len(due) - 1)
    return min(max(variance * widened / expected, 1.0), 50.0)


def _halves(good: Floats, due: Floats) -> tuple[float, float, float]:
    """(share of the first half, of the second, lower bound of their difference)."""
    middle = len(due) // 2
    parts = [(good[:middle], due[:middle]), (good[middle:], due[middle:])]
    shares = [float(got.sum()) / max(1.0, float(of.sum())) for got, of in parts]
    residuals = np.concatenate([got - share * of for share, (got, of) in zip(shares, parts, strict=True)])
    widened, degrees = correlation(residuals)
    counted = [max(1.0, float(of.sum())) for _, of in parts]
    between = float(residuals @ residuals) / (len(due) - 2) * widened * middle * sum(1 / of**2 for of in counted)
    # Adding a miss and a hit to each half keeps the error above 0 where all or none were good.
    smoothed = [(share * of + 1) / (of + 2) for share, of in zip(shares, counted, strict=True)]
    independent = sum(share * (1 - share) / of for share, of in zip(smoothed, counted, strict=True))
    error = math.sqrt(max(between, independent))
    return shares[0], shares[1], shares[0] - shares[1] - student(max(DEGREES_MIN, degrees - 2)) * error
