"""The rate that one engine holds: the highest at which enough of its requests are good.

Decides by running the engine of ``one_engine`` at one rate after the other. It must never know what makes a request
good: the caller says so of a whole run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgumentError
from kvxfer.forecast.cost import LinearCost, attended_tokens
from kvxfer.forecast.one_engine import EngineRequest, EngineRun, run_engine
from kvxfer.forecast.step import StepLimits

REQUESTS_MIN = 100
FACTORS = (2.0, 1.05)
"""A first, rough bracket is sought in steps of the first, from few requests; the second corrects it with all."""
STEPS_MAX = 40


@dataclasses.dataclass(frozen=True)
class EngineCapacity:
    """The highest rate at which enough requests are good."""

    rate_per_s: float
    attainment: float
    """At that rate."""
    runs: int
    """Of all requests."""


def engine_capacity(
    limits: StepLimits,
    cost: LinearCost,
    lengths: Sequence[tuple[int, int]],
    is_good: Callable[[EngineRun], NDArray[np.bool_]],
    attainment: float,
    *,
    requests: int = 100_000,
    warmup: int = 0,
    seed: int = 0,
    tolerance: float = 0.002,
) -> EngineCapacity:
    """The highest rate of Poisson arrivals at which a share of ``attainment`` of the requests is good.

    ``lengths`` are (prompt tokens, output tokens), of which each request takes the next in turn. Each rate is run with
    the same arrivals, stretched, so that two rates differ by nothing else; the first ``warmup`` count for nothing. The
    rate is exact to ``tolerance`` of itself for these arrivals. Raises InvalidArgumentError where no rate is low
    enough, or none too high.
    """
    if requests < REQUESTS_MIN or not lengths or not 0 < attainment <= 1 or not tolerance > 0:
        raise InvalidArgumentError(f"a capacity needs {REQUESTS_MIN} requests, their lengths and a share above 0")
    rng = np.random.Generator(np.random.PCG64(seed))
    unit = np.cumsum(rng.exponential(1.0, warmup + requests))
    shares: dict[tuple[float, int], float] = {}

    def share(rate: float, count: int) -> float:
        if (rate, count) not in shares:
            arrivals = unit[: warmup + count] / rate
            served = run_engine(
                limits,
                cost,
                (EngineRequest(float(at), *lengths[number % len(lengths)]) for number, at in enumerate(arrivals)),
            )
            shares[rate, count] = float(np.mean(is_good(served)[warmup:]))
        return shares[rate, count]

    rate = 1 / max(
        cost.seconds(prompt, output, 0, attended_tokens(prompt, 0)) + cost.step_s * (output - 1)
        for prompt, output in lengths
    )
    low = high = rate
    for factor, count in zip(FACTORS, (max(REQUESTS_MIN, requests // 20), requests), strict=True):
        low, high = _bracket(lambda at, of: share(at, of) >= attainment, count, (low * high) ** 0.5, factor)
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if share(middle, requests) >= attainment else (low, middle)
    return EngineCapacity(low, share(low, requests), sum(count == requests for _, count in shares))


def _bracket(
    is_low_enough: Callable[[float, int], bool], count: int, rate: float, factor: float
) -> tuple[float, float]:
    """A rate that is low enough by ``count`` requests, and one that is not, a ``factor`` above."""
    is_first_low = is_low_enough(rate, count)
    for _ in range(STEPS_MAX):
        other = rate * factor if is_first_low else rate / factor
        if is_low_enough(other, count) != is_first_low:
            return (rate, other) if is_first_low else (other, rate)
        rate = other
    raise InvalidArgumentError("there is no rate at which the share of good requests begins to be too low")
