"""Where attainment crosses its target, from all probes so far: a posterior over the rate.

Attainment falls with the rate as a logistic curve of the rate's logarithm: near saturation the share of slow requests
grows exponentially with the load, which is that curve's upper branch. Unknown are the rate at which the curve crosses
the target, its steepness, and a share of requests that fail at any rate. All three stand on a grid of probabilities,
each probe multiplies them, and the crossing's are what is left when the others are summed up (Watson and Pelli's QUEST,
1983, for thresholds of any kind). Against bisection this uses what a probe says by *how far* it passed or failed, and a
probe that came out wrong by chance is outvoted by those after it.

Three departures make it honest. A probe counts as many requests as are independent of each other, not as were sent. A
probe far from the target counts less, because the curve is only right near it. A probe whose backlog grew says nothing
by its attainment, which depends on how long it lasted: it says that the crossing lies below what was served meanwhile.

Decides from numbers alone. It must never know requests or runs.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError

Floats = NDArray[np.float64]

RATE_STEP = 0.004
"""Of the grid, in logarithms."""
STEEPNESS = (1.0, 60.0, 18)
"""Lowest, highest, how many: how fast the logit falls with the rate's logarithm."""
STEEPNESS_MEDIAN, STEEPNESS_SPREAD = 10.0, 1.0
"""Before any probe; of M/M/1 it is about 10, of batches of one length up to 30."""
FAILING_SHARES = (0.0, 0.25, 0.5, 0.8)
"""Of the requests that may miss: so many fail at any rate."""
FAILING_WEIGHTS = (0.7, 0.1, 0.1, 0.1)
EFFECT_BEFORE, EFFECT_WEIGHT = 10.0, 60.0
"""Design effect before any probe, and as of how many misses."""
NEAR_LOGIT = 2.0
"""A probe whose logit is so far from the target's counts half."""
SERVED_SPREAD_MIN = 0.02


def logit(share: float) -> float:
    return math.log(share / (1 - share))


@dataclasses.dataclass(frozen=True)
class RateBounds:
    """A rate, between bounds of 95 %."""

    rate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Of the rate itself."""
        return (self.high - self.low) / 2 / self.rate


class CrossingPosterior:
    """``lowest`` to ``highest`` is where the crossing can be, each rate as likely as any of its logarithm."""

    def __init__(self, lowest: float, highest: float, target: float) -> None:
        if not 0 < lowest < highest < math.inf or not 0 < target < 1:
            raise InvalidArgumentError("a crossing needs a lower and a higher rate, and a target between 0 and 1")
        count = max(2, math.ceil(math.log(highest / lowest) / RATE_STEP) + 1)
        self._rates: Floats = np.linspace(math.log(lowest), math.log(highest), count)
        self._target = target
        steepness = np.geomspace(*STEEPNESS[:2], STEEPNESS[2])
        self._steepness = steepness[:, None]
        self._whole = 1 - (1 - target) * np.array(FAILING_SHARES)[:, None, None]
        self._offset = np.log(target / self._whole / (1 - target / self._whole))
        prior = -0.5 * (np.log(steepness / STEEPNESS_MEDIAN) / STEEPNESS_SPREAD) ** 2
        self._prior = np.log(FAILING_WEIGHTS)[:, None, None] + prior[None, :, None] + np.zeros((1, 1, count))
        self._served: dict[int, Floats] = {}
        self._shares: dict[int, tuple[float, float, int, float]] = {}
        """By the probe that said it."""
        self._known: tuple[Floats, Floats] | None = None

    def note_share(self, probe: int, rate: float, share: float, requests: int, effect: float) -> None:
        """At ``rate`` a ``share`` of ``requests`` was good, and so many of them say as much as an independent one."""
        self._shares[probe] = rate, share, requests, effect
        self._known = None

    def forget(self, probe: int) -> None:
        """What a probe said counts no more."""
        self._shares.pop(probe, None)
        self._served.pop(probe, None)
        self._known = None

    @property
    def design_effect(self) -> float:
        """How many requests say as much as an independent one, by all probes together: alone, a probe whose slow
        requests happened to come in a burst would count less than one that had luck, and the answer be too high.
        """
        weights = [
            (share * (1 - share) * requests * self._nearness(share, requests), effect)
            for _, share, requests, effect in self._shares.values()
        ]
        total = EFFECT_WEIGHT + sum(weight for weight, _ in weights)
        return (EFFECT_WEIGHT * EFFECT_BEFORE + sum(weight * effect for weight, effect in weights)) / total

    def _nearness(self, share: float, requests: float) -> float:
        """1 at the target, and less the farther a share is from it."""
        bounded = (share * requests + 0.5) / (requests + 1)
        distance = (logit(bounded) - logit(self._target)) / NEAR_LOGIT
        return 1 / (1 + distance * distance)

    def _of_share(self, rate: float, share: float, requests: float) -> Floats:
        counted = requests * self._nearness(share, requests)
        slope = self._offset - self._steepness * (math.log(rate) - self._rates)
        expected = np.clip(self._whole / (1 + np.exp(-np.clip(slope, -30, 30))), 1e-4, 1 - 1e-4)
        found: Floats = counted * (share * np.log(expected) + (1 - share) * np.log(1 - expected))
        return found

    def _below(self) -> tuple[Floats, Floats]:
        """(probability up to each rate, of each rate), not normalised."""
        if self._known is not None:
            return self._known
        effect = self.design_effect
        log = self._prior + sum(self._served.values(), np.zeros(1))
        for rate, share, requests, _ in self._shares.values():
            log = log + self._of_share(rate, share, requests / effect)
        weights = np.exp(log - log.max()).sum(axis=(0, 1))
        self._known = np.cumsum(weights), weights
        return self._known

    def note_served(self, probe: int, per_s: float, answers: int, doubt: float) -> None:
        """A backlog grew while so many answers per second were given, ``answers`` altogether. ``doubt`` is the
        probability that it did not grow.
        """
        spread = max(SERVED_SPREAD_MIN, 1 / math.sqrt(max(1, answers)))
        below = (math.log(per_s) - self._rates) / spread
        chance = 1 / (1 + np.exp(-np.clip(1.702 * below, -30, 30)))  # the normal distribution within .01
        self._known = None
        self._served[probe] = np.log(doubt + (1 - doubt) * chance)

    def quantile(self, share: float) -> float:
        """The rate below which the crossing is with that probability."""
        below, weights = self._below()
        return float(np.exp(np.interp(share * below[-1], below - weights / 2, self._rates)))

    def bounds(self) -> RateBounds:
        """The median, and what 95 % of the probability lies between."""
        return RateBounds(self.quantile(0.5), self.quantile(0.025), self.quantile(0.975))
