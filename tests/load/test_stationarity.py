"""Whether a run had come to rest."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvxfer.load.limits import LatencyLimits
from kvxfer.load.run import LoadRun
from kvxfer.load.stationarity import design_effect, mean_in_flight, stationarity, student, trend
from tests.support.load_queues import queue_run
from tests.support.load_records import answered, failed, run_of

LIMITS = LatencyLimits.parse("ttft:200")


def test_requests_in_flight_are_averaged_over_each_block() -> None:
    records = [answered(0, 0.0, ttft_s=1.0, tpot_s=0.1), answered(1, 1.0, end_s=None), failed(2, 2.5, sent_s=None)]
    assert mean_in_flight(records, np.array([0.0, 1.0, 2.0, 4.0])).tolist() == [1.0, 2.0, 1.0]


def test_a_line_has_its_slope_and_no_error() -> None:
    slope, error, degrees = trend(np.arange(20) * 3.0)
    assert (slope, error, degrees) == (pytest.approx(3), pytest.approx(0, abs=1e-6), 18)


def test_a_wave_widens_the_error() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    noise = rng.normal(size=20)
    wave = np.sin(np.arange(20) / 3.2)
    assert trend(wave)[1] / wave.std() > 2 * trend(noise)[1] / noise.std()


def test_quantiles_of_student_fall_to_the_normal_one() -> None:
    values = [student(degrees) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert (student(0.3), student(18)) == (6.314, 1.734)
    assert values[-1] == pytest.approx(1.653, abs=0.001)


def test_few_requests_claim_nothing() -> None:
    found = stationarity(run_of([answered(number, number / 5) for number in range(50)]), LIMITS)
    assert (found.is_known, found.is_stationary, found.growth_per_s) == (False, True, None)
    json.dumps(found.to_json(), allow_nan=False)


def test_requests_at_an_even_pace_are_stationary() -> None:
    found = stationarity(run_of([answered(number, number / 100) for number in range(1000)]), LIMITS)
    assert found.is_known
    assert found.is_stationary
    assert found.effective_requests == 1000


def test_a_stuck_server_is_a_growing_backlog() -> None:
    found = stationarity(run_of([answered(n, n / 100, ttft_s=5 + n / 100) for n in range(1000)]), LIMITS)
    assert found.is_growing
    assert found.growth_per_s == pytest.approx(70, rel=0.3)


def test_a_second_half_that_is_worse_is_told() -> None:
    records = [answered(n, n / 100, ttft_s=0.3 if n > 500 and n % 5 == 0 else 0.1) for n in range(1000)]
    found = stationarity(run_of(records), LIMITS)
    assert found.is_worsening
    assert not found.is_stationary
    assert (found.attainment_first, found.attainment_second) == (1.0, pytest.approx(0.8, abs=0.01))
    better = [answered(n, n / 100, ttft_s=0.3 if n < 500 and n % 5 == 0 else 0.1) for n in range(1000)]
    assert stationarity(run_of(better), LIMITS).is_stationary


def test_misses_that_come_together_count_as_fewer_requests() -> None:
    due = np.full(20, 50.0)
    rng = np.random.Generator(np.random.PCG64(2))
    alone = np.mean([design_effect(rng.binomial(50, 0.9, 20).astype(float), due) for _ in range(50)])
    together = np.where(np.arange(20) % 10 == 0, 0.0, 50.0)
    assert alone < 2 < 10 < design_effect(together, due)
    assert design_effect(due, due) == 1.0


def runs(load: float, count: int) -> list[LoadRun]:
    return [queue_run(20.0, 20.0 / load, 900, warmup=180, seed=seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("load", "low", "high"), [(0.5, 0.0, 0.05), (0.9, 0.0, 0.14), (1.2, 0.9, 1.0), (1.5, 1.0, 1.0)]
)
def test_waves_of_a_queue_are_no_growth_and_overload_mostly_is(load: float, low: float, high: float) -> None:
    """Bounds are those of 60 runs: a share of 5 % has at most 14 % of them in 999 of 1,000 cases."""
    share = np.mean([stationarity(run, LIMITS).is_growing for run in runs(load, 60)])
    assert low <= share <= high
