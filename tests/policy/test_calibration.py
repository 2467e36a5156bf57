"""The lane that is likely the fastest: by expectation, then by what it did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import DEFAULT_LANES
from kvxfer.policy.calibration import ENOUGH, SMALL_BYTES, Calibration
from kvxfer.types import Lane

MIB = 1 << 20
HERE = (Lane.MAPPED, Lane.UCX, Lane.CMA, Lane.UNIX, Lane.STREAM)


def test_by_expectation_at_first() -> None:
    here, there = Calibration(is_same_host=True), Calibration(is_same_host=False)
    assert here.order(DEFAULT_LANES, 64 * MIB).lanes == (Lane.MAPPED, Lane.CMA, Lane.UCX, Lane.UNIX, Lane.STREAM)
    assert there.order((Lane.STREAM, Lane.UCX), 64 * MIB).lanes == (Lane.UCX, Lane.STREAM)
    assert here.figures() == {}


def test_a_lane_that_disappoints_gives_the_next_its_chance_and_gets_another_where_that_is_worse() -> None:
    calibration = Calibration(is_same_host=True)
    lanes = (Lane.MAPPED, Lane.CMA, Lane.STREAM)
    truth = {Lane.MAPPED: 1e9, Lane.CMA: 5e9, Lane.STREAM: 3e9}
    used = []
    for _ in range(3 * ENOUGH):
        lane = calibration.order(lanes, 64 * MIB).lanes[0]
        used.append(lane)
        calibration.measured(lane, 64 * MIB, 64 * MIB / truth[lane])
    assert used == [Lane.MAPPED] * ENOUGH + [Lane.CMA] * 2 * ENOUGH
    for _ in range(30):
        calibration.measured(Lane.CMA, 64 * MIB, 64 * MIB / 0.5e9)
    assert calibration.order(lanes, 64 * MIB).lanes[0] is Lane.STREAM


def test_small_transfers_say_nothing_about_large_ones() -> None:
    calibration = Calibration(is_same_host=True)
    before = calibration.order(HERE, 64 * MIB).lanes
    for _ in range(10):
        calibration.measured(Lane.MAPPED, 4096, 1.0)
    assert calibration.order(HERE, 64 * MIB).lanes == before
    assert calibration.order(HERE, 4096).lanes[-1] is Lane.MAPPED
    figure = calibration.figures()[Lane.MAPPED]
    assert (figure.large_count, figure.small_count, figure.small_s) == (0, 10, 1.0)


@pytest.mark.parametrize(
    ("slow", "fast", "why"),
    [
        (120e-6, 99.8e-6, "measured at 120 us where stream is measured at 100 us"),
        (120e-6, 119.6e-6, "measured at 120 us where stream is measured at 119.6 us"),
        (0.25, 45e-6, "measured at 250 ms where stream is measured at 45 us"),
        (1e-3 + 1e-12, 1e-3, "measured at 1 ms where stream is measured at 1 ms"),
    ],
)
def test_figures_are_told_as_exactly_as_they_differ(slow: float, fast: float, why: str) -> None:
    calibration = Calibration(is_same_host=True)
    for _ in range(ENOUGH):
        calibration.measured(Lane.MAPPED, 4096, slow)
        calibration.measured(Lane.STREAM, 4096, fast)
    order = calibration.order((Lane.MAPPED, Lane.STREAM), 4096)
    assert order.passed_over(Lane.STREAM) == {Lane.MAPPED: f"possible, {why}"}
    assert order.passed_over(Lane.MAPPED) == order.passed_over(Lane.UCX) == {}


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (4096, 0.0), (4096, -1.0), (4096, float("nan"))])
def test_impossible_figures_are_left_out(nbytes: int, seconds: float) -> None:
    calibration = Calibration(is_same_host=True)
    calibration.measured(Lane.CMA, nbytes, seconds)
    assert calibration.figures() == {}


@given(
    st.lists(st.tuples(st.sampled_from(HERE), st.integers(1, 1 << 34), st.floats(1e-9, 1e3)), max_size=40),
    st.lists(st.sampled_from(HERE), unique=True),
    st.integers(1, 1 << 34),
)
def test_an_order_is_a_permutation_and_the_best_figure_leads(
    seen: list[tuple[Lane, int, float]], lanes: list[Lane], nbytes: int
) -> None:
    calibration = Calibration(is_same_host=True)
    for measurement in seen:
        calibration.measured(*measurement)
    ordered = calibration.order(lanes, nbytes).lanes
    assert sorted(ordered) == sorted(lanes)
    figures = calibration.figures()
    known = [lane for lane in lanes if lane in figures and figures[lane].large_count >= ENOUGH]
    if len(known) == len(lanes) > 0 and nbytes >= SMALL_BYTES:
        assert figures[ordered[0]].gb_per_s == max(figures[lane].gb_per_s for lane in lanes)
