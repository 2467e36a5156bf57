"""Curves, factors and slopes: what was put in comes out, and nothing wild does."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.policy.curves import OUTLIER, Curve, CurveFit, Factor, Slope, attended

CURVES = st.builds(Curve, st.floats(1e-4, 1.0), st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-7))


def fitted(curve: Curve, rows: int, *, noise: float = 0.0, seed: int = 0, scale: float = 1.0) -> CurveFit:
    draw = random.Random(seed)
    fit = CurveFit()
    for _ in range(rows):
        work = [(draw.uniform(1, 8000), draw.choice([0.0, draw.uniform(0, 60000)])) for _ in range(draw.randint(1, 3))]
        seconds = sum(curve.seconds(*one) for one in work) * math.exp(draw.gauss(0, noise)) * scale
        fit.add(len(work), sum(new for new, _ in work), sum(attended(*one) for one in work), seconds)
    return fit


@given(CURVES, st.integers(0, 1000))
def test_a_curve_is_found_again(curve: Curve, seed: int) -> None:
    found = fitted(curve, 200, seed=seed).curve
    assert found is not None
    for new, held in ((1000, 0), (8000, 0), (4000, 30000)):
        assert found.seconds(new, held) == pytest.approx(curve.seconds(new, held), rel=0.06)


@given(CURVES, st.integers(0, 1000), st.integers(1, 60))
def test_no_part_is_negative_however_few_and_noisy_the_rows(curve: Curve, seed: int, rows: int) -> None:
    found = fitted(curve, rows, noise=0.5, seed=seed).curve
    assert found is not None
    assert min(found) >= 0 < max(found)


@given(CURVES, st.integers(0, 1000), st.integers(1, 40), st.sampled_from([0.1, 10.0, 1000.0]))
def test_all_times_scaled_are_a_curve_scaled(curve: Curve, seed: int, rows: int, scale: float) -> None:
    one, other = fitted(curve, rows, noise=0.2, seed=seed), fitted(curve, rows, noise=0.2, seed=seed, scale=scale)
    assert one.curve is not None
    assert other.curve is not None
    for new, held in ((10, 0), (8000, 0), (500, 30000)):
        assert other.curve.seconds(new, held) == pytest.approx(one.curve.seconds(new, held) * scale, rel=1e-3)


def test_a_curve_before_and_after_its_first_row() -> None:
    fit = CurveFit()
    assert fit.curve is None
    for nothing in ((1.0, 10.0, 50.0, 0.0), (0.0, 0.0, 0.0, 1.0), (1.0, math.inf, 1.0, 1.0), (1.0, 1.0, 1.0, math.nan)):
        fit.add(*nothing)
    assert fit.curve is None
    fit.add(1.0, 1000.0, attended(1000.0, 0.0), 0.5)
    assert fit.curve == pytest.approx(Curve(0.0, 0.0005, 0.0))


def test_prompts_of_one_length_take_the_time_of_their_tokens() -> None:
    fit, draw = CurveFit(), random.Random(1)
    for _ in range(50):
        fit.add(1.0, 2048.0, attended(2048.0, 0.0), 0.2 * math.exp(draw.gauss(0, 0.05)))
    assert fit.curve is not None
    assert fit.curve.seconds(2048.0) == pytest.approx(0.2, rel=0.05)
    assert fit.curve.seconds(20.0, 2028.0) < 0.01


def test_a_stopped_process_is_one_row_like_any_other() -> None:
    curve = Curve(0.01, 1e-4, 1e-9)
    fit = fitted(curve, 100)
    fit.add(1.0, 1000.0, attended(1000.0, 0.0), 3600.0)
    assert fit.curve is not None
    assert fit.curve.seconds(1000.0) < 1.2 * curve.seconds(1000.0)


def test_a_changed_engine_is_followed() -> None:
    fit = fitted(Curve(0.01, 1e-4, 1e-9), 300)
    draw = random.Random(1)
    for _ in range(1500):
        new = draw.uniform(10, 8000)
        fit.add(1.0, new, attended(new, 0.0), Curve(0.01, 4e-4, 4e-9).seconds(new))
    assert fit.curve is not None
    assert fit.curve.seconds(4000.0) == pytest.approx(Curve(0.01, 4e-4, 4e-9).seconds(4000.0), rel=0.05)


def test_a_factor_goes_to_what_is_measured_and_no_lie_moves_it_far_at_once() -> None:
    factor = Factor()
    assert factor.value == 1.0
    for _ in range(64):
        factor.measured(2.0, 1.0)
    assert factor.value == pytest.approx(2.0, rel=0.05)
    factor.measured(1e9, 1.0)
    assert factor.value < 2.0 * OUTLIER ** (1 / 8)
    before = factor.value
    for nothing in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        factor.measured(*nothing)
    assert factor.value == before


@given(st.floats(0.001, 10), st.integers(0, 100))
def test_a_slope_is_found_again_and_is_never_negative(slope: float, seed: int) -> None:
    draw = random.Random(seed)
    rising, falling, still = Slope(), Slope(), Slope()
    for _ in range(300):
        x = draw.uniform(0, 20)
        rising.add(x, 5.0 + slope * x + draw.gauss(0, slope / 10))
        falling.add(x, 500.0 - slope * x)
        still.add(4.0, draw.uniform(1, 2))
    assert rising.value == pytest.approx(slope, rel=0.1)
    assert falling.value == still.value == 0.0
    assert rising.mean_s > 5.0
