"""Due times: their distributions, and that one seed gives the same beginning for every count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload import arrivals

rates = st.floats(1e-3, 1e5)
seeds = st.integers(-(1 << 70), 1 << 70)
Draw = Callable[[int, int], arrivals.Times]
KINDS: dict[str, Draw] = {
    "constant": lambda count, seed: arrivals.constant(count, 20.0),
    "poisson": lambda count, seed: arrivals.poisson(count, 20.0, seed),
    "gamma": lambda count, seed: arrivals.gamma(count, 20.0, 0.25, seed),
    "ramp": lambda count, seed: arrivals.ramp(count, 5.0, 35.0, seed, ramp_s=50.0),
}


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 300), st.integers(0, 300), seeds)
def test_more_arrivals_begin_with_the_same_ones(kind: str, few: int, more: int, seed: int) -> None:
    shorter, longer = KINDS[kind](few, seed), KINDS[kind](few + more, seed)
    assert longer[:few].tolist() == shorter.tolist()
    assert np.all(np.diff(longer) >= 0)
    assert np.all(longer >= 0)


@given(st.sampled_from(["poisson", "gamma", "ramp"]), seeds, seeds)
def test_another_seed_gives_other_times(kind: str, one: int, other: int) -> None:
    is_same = KINDS[kind](10, one).tolist() == KINDS[kind](10, other).tolist()
    assert is_same == (one == other)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_variation_that_were_asked_for(burstiness: float) -> None:
    gaps = np.diff(arrivals.gamma(400_000, 50.0, burstiness, 3), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.02)


def test_the_rate_over_all_requests_is_unbiased() -> None:
    """Over many seeds: each has its own count in a window, and their mean is the asked one."""
    ends = np.array([arrivals.poisson(200, 10.0, seed)[-1] for seed in range(2000)])
    assert ends.mean() == pytest.approx(20.0, abs=4 * ends.std() / 2000**0.5)
    assert ends.std() == pytest.approx(200**0.5 / 10, rel=0.1), "the gaps were rescaled"


def test_counts_in_windows_vary_as_a_poisson_process_says() -> None:
    times = arrivals.poisson(200_000, 100.0, 1)
    counts = np.histogram(times, bins=np.arange(0, 1900, 1.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


@given(st.floats(0.1, 1e3), st.floats(0.1, 1e3), st.integers(1, 200), seeds)
def test_the_ramps_cumulative_rate_gives_the_points_back(begin: float, end: float, count: int, seed: int) -> None:
    ramp_s = 2 * count / (begin + end)
    times = arrivals.ramp(count, begin, end, seed)
    on = np.minimum(times, ramp_s)
    points = begin * on + (end - begin) * on**2 / (2 * ramp_s) + end * np.maximum(times - ramp_s, 0)
    unit = arrivals.ramp(count, 1.0, 1.0, seed)
    assert points == pytest.approx(unit, rel=1e-6)


def test_a_ramp_of_one_rate_is_that_rate() -> None:
    assert arrivals.ramp(5000, 40.0, 40.0, 0)[-1] == pytest.approx(125.0, rel=0.06)


def test_a_ramp_rises() -> None:
    times = arrivals.ramp(20_000, 10.0, 190.0, 0)
    counts = np.histogram(times, bins=np.linspace(0, 200, 5))[0]
    assert counts == pytest.approx([10 * 50 + 0.9 * 50**2 * k for k in (0.5, 1.5, 2.5, 3.5)], rel=0.08)


@given(st.sampled_from(sorted(KINDS)), st.floats(0.01, 200.0), seeds)
def test_until_gives_every_arrival_before_the_end(kind: str, end_s: float, seed: int) -> None:
    found = arrivals.until(lambda count: KINDS[kind](count, seed), 1.0, end_s)
    many = KINDS[kind](len(found) + 1, seed)
    assert many[: len(found)].tolist() == found.tolist()
    assert many[-1] >= end_s
    assert np.all(found < end_s)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(InvalidArgumentError, match="rate must be above 0"):
        arrivals.poisson(5, rate, 0)
    with pytest.raises(InvalidArgumentError, match="rate must be above 0"):
        arrivals.ramp(5, 1.0, rate, 0)


def test_too_many_arrivals_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be 0 to 10000000"):
        arrivals.constant(1 << 40, 1.0)
    with pytest.raises(InvalidArgumentError, match="more than 10000000"):
        arrivals.until(lambda count: arrivals.constant(count, 1e6), 1e6, 1e3)
