"""Budgets of retries and of prompts that are computed again."""

from __future__ import annotations

import pytest

from kvxfer.errors import ConfigError
from kvxfer.policy.budget import Budget


def test_a_budget_begins_full_and_is_used_up() -> None:
    budget = Budget(share=0.0, floor_per_s=1.0, burst_s=3.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]


def test_time_fills_a_budget_up_to_its_burst() -> None:
    budget = Budget(share=0.0, floor_per_s=2.0, burst_s=1.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert [budget.take(0.5) for _ in range(2)] == [True, False]
    assert [budget.take(100.0) for _ in range(3)] == [True, True, False]


def test_each_request_earns_its_share() -> None:
    budget = Budget(share=0.25, floor_per_s=0.0, burst_s=0.01)
    assert budget.take(0.0)
    assert not budget.take(0.0)
    for _ in range(3):
        budget.earn()
    assert not budget.take(0.0)
    budget.earn()
    assert budget.take(0.0)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    budget = Budget(share=0.0, floor_per_s=1.0, burst_s=1.0)
    assert budget.take(10.0)
    assert not budget.take(10.0)
    assert not budget.take(5.0)


@pytest.mark.parametrize("wrong", [{"share": -1.0}, {"floor_per_s": -1.0}, {"burst_s": 0.0}])
def test_a_budget_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Budget(**{"share": 0.1, "floor_per_s": 1.0, "burst_s": 1.0, **wrong})
