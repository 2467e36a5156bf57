"""The rate that one engine holds."""

from __future__ import annotations

import pytest

from kvxfer.errors import InvalidArgumentError
from kvxfer.forecast.capacity import engine_capacity
from kvxfer.forecast.cost import LinearCost
from kvxfer.forecast.step import StepLimits

ONE_AT_A_TIME = StepLimits(batch_max=1, has_prefix_cache=False)
SERVICE_S = 0.05
FIXED = LinearCost(SERVICE_S, 0, 0, 0)


def test_a_request_that_never_waits_is_the_share_of_idle_time() -> None:
    """P(wait = 0) = 1 - rho, by PASTA: half of the requests never wait at half of the service rate."""
    found = engine_capacity(
        ONE_AT_A_TIME, FIXED, [(64, 1)], lambda run: run.ttft_s <= SERVICE_S + 1e-9, 0.5, requests=6000
    )
    assert found.rate_per_s == pytest.approx(10, rel=0.05)
    assert found.attainment == pytest.approx(0.5, abs=0.005)
    assert found.attainment >= 0.5


def test_loose_limits_find_the_rate_that_can_be_served() -> None:
    found = engine_capacity(ONE_AT_A_TIME, FIXED, [(64, 1)], lambda run: run.are_within(ttft_s=5), 0.9, requests=6000)
    assert found.rate_per_s == pytest.approx(20, rel=0.05)


def test_lengths_take_turns() -> None:
    cost = LinearCost(0.0, 0.001, 0, 0)
    found = engine_capacity(
        ONE_AT_A_TIME, cost, [(20, 1), (60, 1)], lambda run: run.are_within(ttft_s=3), 0.9, requests=3000
    )
    assert found.rate_per_s == pytest.approx(25, rel=0.08)


def test_long_prompts_hold_a_lower_rate_where_tokens_cost_what_they_attend_to() -> None:
    """A prompt of 100 tokens: 100 ms in proportion, and 50 ms for the 4,950 tokens that they attend to."""
    cost = LinearCost(0.0, 0.001, 0, 0, 0.05 / 4950)
    found = engine_capacity(ONE_AT_A_TIME, cost, [(100, 1)], lambda run: run.are_within(ttft_s=6), 0.9, requests=3000)
    assert found.rate_per_s == pytest.approx(1 / 0.15, rel=0.08)


def test_the_same_seed_gives_the_same_rate() -> None:
    def found(seed: int) -> float:
        return engine_capacity(
            StepLimits(), FIXED, [(64, 4)], lambda run: run.are_within(ttft_s=0.09), 0.9, requests=1000, seed=seed
        ).rate_per_s

    assert found(1) == found(1)


def test_goals_that_no_rate_decides_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no rate"):
        engine_capacity(ONE_AT_A_TIME, FIXED, [(64, 1)], lambda run: run.are_within(ttft_s=0.01), 0.9, requests=100)
    with pytest.raises(InvalidArgumentError, match="needs"):
        engine_capacity(ONE_AT_A_TIME, FIXED, [], lambda run: run.are_within(), 0.9)
