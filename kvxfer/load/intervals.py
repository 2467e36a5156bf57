"""What counts and samples say, with how sure that is: shares with Wilson bounds, and percentiles that bear infinities.

Pure arithmetic. It must never know what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvxfer.errors import InvalidArgumentError

Z_95 = 1.959964
"""Two-sided, of the normal distribution."""


@dataclasses.dataclass(frozen=True)
class CountedShare:
    """``good`` out of ``total``, with 95 % bounds."""

    good: int
    total: int
    share: float
    """0 where there is none."""
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def wilson(good: float, total: float, z: float = Z_95) -> tuple[float, float]:
    """Bounds of a share (Wilson 1927, score interval without continuity correction); 0 and 1 of no trial.

    The trials count as independent. Raises InvalidArgumentError unless ``0 <= good <= total``.
    """
    if not 0 <= good <= total:
        raise InvalidArgumentError(f"good must be 0 to {total}, not {good}")
    if not total:
        return 0.0, 1.0
    share = good / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def counted_share(good: int, total: int) -> CountedShare:
    low, high = wilson(good, total)
    return CountedShare(good, total, good / total if total else 0.0, low, high)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values are, linear between neighbours as numpy's default is.

    ``ordered`` rises and may end in infinities: beside one, the percentile is infinite too, never NaN. Raises
    InvalidArgumentError of no values.
    """
    if not ordered:
        raise InvalidArgumentError("there is no percentile of no values")
    place = share * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    part = place - below
    if part <= 1e-9 or below + 1 == len(ordered):
        return ordered[below]
    low, high = ordered[below], ordered[below + 1]
    return high if math.isinf(high) else low + (high - low) * part


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of one quantity. Infinite values come from failures. All None where there are no values."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        ordered = sorted(values)
        if not ordered:
            return cls(0)
        mean = math.inf if math.isinf(ordered[-1]) else math.fsum(ordered) / len(ordered)
        p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(len(ordered), mean, p50, p90, p95, p99, ordered[-1])

    def to_json(self) -> dict[str, Any]:
        """Seconds stay seconds; an infinity is the text ``inf``, and what does not exist is null."""
        return {name: json_number(value) for name, value in dataclasses.asdict(self).items()}


def json_number(value: float | None) -> float | str | None:
    """``value`` as JSON can say it: ``inf`` is a text, NaN is null."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
