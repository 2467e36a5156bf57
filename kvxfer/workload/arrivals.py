"""When requests are due, as seconds after the beginning. Decides the distributions; knows nothing of the requests.

All are open: a due time depends on no answer. Gaps are never rescaled so that n of them fill n/rate seconds exactly (as
some tools do): the count in a window then varies as the process says, and only its mean is n/rate. One seed gives the
same beginning for every ``count``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.request import REQUESTS_MAX
from kvxfer.workload.seeds import stream

Times = npt.NDArray[np.float64]
"""Seconds, never falling."""
DrawArrivals = Callable[[int], Times]


def _check(count: int, **rates: float) -> None:
    if not 0 <= count <= REQUESTS_MAX:
        raise InvalidArgumentError(f"the number of arrivals must be 0 to {REQUESTS_MAX}, not {count}")
    for name, rate in rates.items():
        if not (math.isfinite(rate) and rate > 0):
            raise InvalidArgumentError(f"{name} must be above 0, not {rate}")


def constant(count: int, rate: float) -> Times:
    """One each 1/rate seconds, the first at 0. Raises InvalidArgumentError for a value out of range, as all here."""
    _check(count, rate=rate)
    return np.arange(count, dtype=np.float64) / rate


def poisson(count: int, rate: float, seed: int) -> Times:
    """Exponential gaps of mean 1/rate, the first of them before the first request."""
    _check(count, rate=rate)
    return np.cumsum(stream(seed, "arrivals", "poisson").standard_exponential(count)) / rate


def gamma(count: int, rate: float, burstiness: float, seed: int) -> Times:
    """Gaps of a gamma distribution with mean 1/rate and shape ``burstiness``, so that their coefficient of variation is
    1/sqrt(burstiness): 1 is Poisson, less comes in bursts, more is more regular (the definition of vLLM's benchmark).
    """
    _check(count, rate=rate, burstiness=burstiness)
    gaps = stream(seed, "arrivals", "gamma").standard_gamma(burstiness, count)
    return np.cumsum(gaps) / (burstiness * rate)


def ramp(count: int, begin_rate: float, end_rate: float, seed: int, *, ramp_s: float | None = None) -> Times:
    """A Poisson process whose rate goes linearly from ``begin_rate`` to ``end_rate`` in ``ramp_s`` seconds, and stays
    there. By default ``ramp_s`` is the time that ``count`` requests take on average: 2*count/(begin_rate + end_rate).

    The points of a Poisson process of rate 1 are taken through the inverse of the cumulative rate
    a*t + (b-a)*t^2/(2*T).
    """
    _check(count, begin_rate=begin_rate, end_rate=end_rate)
    if ramp_s is None:
        ramp_s = 2 * max(count, 1) / (begin_rate + end_rate)
    _check(count, ramp_s=ramp_s)
    points = np.cumsum(stream(seed, "arrivals", "ramp").standard_exponential(count))
    inside = ramp_s * (begin_rate + end_rate) / 2
    on_ramp = np.minimum(points, inside)
    # The form with the root below the line: it does not lose digits where both rates are nearly equal.
    root = np.sqrt(begin_rate**2 + 2 * (end_rate - begin_rate) * on_ramp / ramp_s)
    return np.asarray(2 * on_ramp / (begin_rate + root) + np.maximum(points - inside, 0) / end_rate)


def until(draw: DrawArrivals, rate: float, end_s: float) -> Times:
    """The arrivals that ``draw(count)`` gives before ``end_s``. ``draw`` begins the same for every count.

    Raises InvalidArgumentError where there would be more than REQUESTS_MAX.
    """
    if rate * end_s > REQUESTS_MAX:
        raise InvalidArgumentError(f"{end_s:g} s at {rate:g} requests/s are more than {REQUESTS_MAX} requests")
    count = min(REQUESTS_MAX, 64 + math.ceil(rate * end_s + 6 * math.sqrt(rate * end_s)))
    while True:
        times = draw(count)
        if times[-1] >= end_s:
            return times[times < end_s]
        if count == REQUESTS_MAX:
            raise InvalidArgumentError(f"more than {REQUESTS_MAX} requests are due within {end_s:g} s")
        count = min(REQUESTS_MAX, 2 * count)
