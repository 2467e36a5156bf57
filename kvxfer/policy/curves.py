"""How long work takes by its size, learnt from work that was done: curves in seconds, and factors of single workers.

Decides how few measurements are fitted, and how fast the old ones are forgotten. It must never know what is measured,
nor a clock: every value is the caller's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

MEMORY_ROWS = 256
"""Rows after which a row counts for 1/e of a new one: an engine that was changed is followed within so many prompts."""
PRIOR_ROWS = 0.02
"""Rows that a curve's lesser parts must be worth: any number above 0 tells prompts of one length from an overhead."""
FACTOR_MEMORY = 16
"""Measurements of one worker that its factor remembers: enough that one late answer does not move it by a tenth."""
OUTLIER = 8.0
"""A measurement counts as at most so many times the expected one, and at least its part: a stopped process or a lie is
one row like any other."""


class Curve(NamedTuple):
    """Seconds for a prompt of ``new`` tokens behind ``held`` ones: ``a + b * new + c * new * (held + new / 2)``: a
    prompt's overhead, matrix products, attention (operations of a transformer: arXiv 2001.08361, table 1)."""

    a: float
    b: float
    c: float

    def seconds(self, new: float, held: float = 0.0) -> float:
        return self.a + self.b * new + self.c * attended(new, held)

    def sum_s(self, prompts: float, new: float, pairs: float) -> float:
        """Of several prompts, one after another: ``pairs`` of tokens are attended to."""
        return self.a * prompts + self.b * new + self.c * pairs


def attended(new: float, held: float) -> float:
    """Pairs of tokens that attention looks at where ``new`` ones are computed behind ``held`` ones."""
    return new * (held + new / 2)


class CurveFit:
    """The curve with the least sum of squared relative errors, and with no negative part.

    One row is one or several pieces of work that were measured together: ``count`` of them, with so many new tokens and
    pairs attended to. That a sum of curves is linear in the sums is what lets a busy period be one row.
    """

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self._weight = 0.0
        self.rows = 0
        self._curve: Curve | None = None

    def add(self, count: float, new: float, pairs: float, seconds: float) -> None:
        """Nothing, for what cannot have been measured (no work, or no time)."""
        if not (seconds > 0 and count > 0 and math.isfinite(seconds + new + pairs)):
            return
        curve = self.curve
        if curve is not None and self.rows >= 8:
            expected = curve.sum_s(count, new, pairs)
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER) or seconds
        row = (count / seconds, new / seconds, pairs / seconds)
        keep = 1.0 - 1.0 / MEMORY_ROWS
        for i, left in enumerate(row):
            self._targets[i] = self._targets[i] * keep + left
            for j, right in enumerate(row):
                self._products[i][j] = self._products[i][j] * keep + left * right
        self._weight = self._weight * keep + 1.0
        self.rows += 1
        self._curve = None

    @property
    def curve(self) -> Curve | None:
        """None before the first row."""
        if self._curve is None and self.rows:
            self._curve = self._fitted()
        return self._curve

    def _fitted(self) -> Curve:
        """Of all choices of parts the one with the least error whose parts are all positive. Against ``a`` and ``c``
        stand PRIOR_ROWS that say 0: where all prompts are of one length, the time is that of the tokens."""
        products = [list(row) for row in self._products]
        for part in (0, 2):
            products[part][part] *= 1.0 + PRIOR_ROWS / self._weight
        best, least = (0.0, 0.0, 0.0), math.inf
        for size in range(1, 4):
            for parts in itertools.combinations(range(3), size):
                values = _solved(products, self._targets, parts)
                if values is None or min(values) < 0:
                    continue
                error = -sum(value * self._targets[part] for value, part in zip(values, parts, strict=True))
                if error < least:
                    whole = [0.0, 0.0, 0.0]
                    for value, part in zip(values, parts, strict=True):
                        whole[part] = value
                    best, least = (whole[0], whole[1], whole[2]), error
        return Curve(*best)


def _solved(products: Sequence[Sequence[float]], targets: Sequence[float], parts: Sequence[int]) -> list[float] | None:
    """The normal equations of some of the parts, by Gauss's elimination on scaled rows; None where they say nothing of
    one of them."""
    scale = [math.sqrt(products[i][i]) for i in parts]
    if min(scale) <= 0:
        return None
    rows = [
        [products[i][j] / scale[a] / scale[b] for b, j in enumerate(parts)] + [targets[i] / scale[a]]
        for a, i in enumerate(parts)
    ]
    for at in range(len(rows)):
        pivot = rows[at][at]
        if pivot < 1e-9:  # of 1.0 at most: the parts cannot be told apart
            return None
        for below in rows[at + 1 :]:
            share = below[at] / pivot
            for column in range(at, len(below)):
                below[column] -= share * rows[at][column]
    values = [0.0] * len(rows)
    for at in reversed(range(len(rows))):
        known = sum(rows[at][column] * values[column] for column in range(at + 1, len(rows)))
        values[at] = (rows[at][-1] - known) / rows[at][at]
    return [value / scale[a] for a, value in enumerate(values)]


class Factor:
    """How much longer one worker takes than its kind: 1.0 before anything is known, 2.0 where it takes twice as long.
    Moves by the mean of logarithms, so that half as long and twice as long weigh the same."""

    __slots__ = ("_log", "count")

    def __init__(self) -> None:
        self._log = 0.0
        self.count = 0

    @property
    def value(self) -> float:
        return math.exp(self._log)

    def measured(self, seconds: float, expected: float) -> None:
        """Work for which the kind takes ``expected`` seconds took ``seconds``."""
        if not (seconds > 0 and expected > 0):
            return
        bound = math.log(OUTLIER)
        ratio = min(max(math.log(seconds / expected), -bound), bound)
        # One more than was measured: the kind's own 1.0 is one of them.
        weight = 1.0 / min(self.count + 2, FACTOR_MEMORY)
        self._log += weight * (ratio - self._log)
        self.count += 1


class Slope:
    """Seconds that one more of something adds, from pairs of a count and seconds: least squares over what was seen
    lately, and never less than 0."""

    __slots__ = ("_count", "_mean_x", "_mean_y", "_xx", "_xy")

    def __init__(self) -> None:
        self._count = 0
        self._mean_x = self._mean_y = self._xx = self._xy = 0.0

    def add(self, x: float, seconds: float) -> None:
        self._count += 1
        weight = max(1.0 / self._count, 1.0 / MEMORY_ROWS)
        from_x, from_y = x - self._mean_x, seconds - self._mean_y
        self._mean_x += weight * from_x
        self._mean_y += weight * from_y
        self._xx = (1 - weight) * (self._xx + weight * from_x * from_x)
        self._xy = (1 - weight) * (self._xy + weight * from_x * from_y)

    @property
    def mean_s(self) -> float:
        """Of the seconds; 0.0 before any were seen."""
        return self._mean_y

    @property
    def value(self) -> float:
        """0.0 before two different counts were seen."""
        return max(0.0, self._xy / self._xx) if self._count >= 8 and self._xx > 1e-9 else 0.0
