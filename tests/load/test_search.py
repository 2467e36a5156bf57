"""The search for the highest rate, against queues whose capacity is known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest

from kvxfer.errors import ConfigError
from kvxfer.load.contradictions import ProbedShare, doubted, outvoted
from kvxfer.load.crossing import CrossingPosterior
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.run import LoadRun
from kvxfer.load.search import ProbeResult, SearchOptions, SearchPlan, SearchProbe, SearchResult, search
from tests.support.load_queues import queue_run, waiting_capacity

SERVED = 25.0
LIMITS = LatencyLimits.parse("ttft:400")
CAPACITY = waiting_capacity(SERVED, 0.4, 0.9)
"""19.8 requests/s."""
M_D_1_CAPACITY = 22.34
"""The same with a fixed service time: by Lindley's recursion, 400,000 requests."""


def probing(**more: object) -> Callable[[SearchProbe], LoadRun]:
    def run_at(probe: SearchProbe) -> LoadRun:
        return queue_run(probe.rate, SERVED, probe.requests, warmup=probe.warmup, seed=probe.seed, **more)  # type: ignore[arg-type]

    return run_at


def found(seed: int = 0, *, start: float = 8.0, limits: LatencyLimits = LIMITS, **more: object) -> SearchResult:
    result = search(probing(**more), limits, 0.9, SearchOptions(start_rate=start), seed=seed)
    json.dumps(result.to_json(), allow_nan=False)
    assert len(result.probes) <= 8
    assert [one.probe.number for one in result.probes] == [*range(1, len(result.probes) + 1)]
    assert (result.rate is None) == bool(result.reason)
    assert result.sentence.endswith(".")
    return result


@pytest.mark.parametrize("start", [1.0, 8.0, 300.0])
def test_the_rate_is_found_from_any_guess(start: float) -> None:
    result = found(1, start=start, is_exponential=False)
    assert result.rate == pytest.approx(M_D_1_CAPACITY, rel=0.12)
    assert result.low is not None
    assert result.high is not None
    assert result.low < result.rate < result.high
    assert result.below is not None
    assert result.above is not None


@pytest.mark.deep
@pytest.mark.parametrize(
    ("is_exponential", "capacity", "worst"), [(True, CAPACITY, 0.12), (False, M_D_1_CAPACITY, 0.10)]
)
def test_errors_are_of_the_size_that_the_requests_allow(is_exponential: bool, capacity: float, worst: float) -> None:
    """One server is the hardest case: its slow requests come in bursts, and 900 of them count as about 40. Of 16 seeds
    the typical error is a few percent, the bounds hold the capacity, and two seeds agree.
    """
    results = [found(seed, is_exponential=is_exponential) for seed in range(16)]
    rates = np.array([result.rate for result in results], dtype=float)
    errors = rates / capacity - 1
    assert abs(float(np.mean(errors))) < 0.03
    assert float(np.median(np.abs(errors))) < 0.05
    assert float(np.max(np.abs(errors))) < worst
    held = [(one.low or 0) <= capacity <= (one.high or 0) for one in results]
    assert sum(held) >= 13
    for one, other in zip(results[::2], results[1::2], strict=True):
        assert (one.low or 0) <= (other.high or 0)
        assert (other.low or 0) <= (one.high or 0)


def test_the_same_seed_makes_the_same_search() -> None:
    assert found(3).to_json() == found(3).to_json()


def test_each_probe_is_told_as_it_comes() -> None:
    told: list[ProbeResult] = []
    result = search(probing(), LIMITS, 0.9, SearchOptions(start_rate=9.0, probes_max=2), on_probe=told.append)
    assert tuple(told) == result.probes


def test_no_two_probes_share_a_seed_or_a_salt() -> None:
    results = [found(seed) for seed in (0, 1)]
    probes = [one.probe for result in results for one in result.probes]
    assert len({probe.seed for probe in probes}) == len({probe.salt for probe in probes}) == len(probes)


def test_failures_at_any_rate_lower_the_answer_and_do_not_break_it() -> None:
    clean, failing = found(2, is_exponential=False), found(2, is_exponential=False, failing=0.05)
    assert failing.rate is not None
    assert clean.rate is not None
    assert failing.rate < clean.rate * 1.05
    assert failing.rate > clean.rate * 0.7


def test_limits_that_an_idle_server_misses_end_the_search_soon() -> None:
    result = found(limits=LatencyLimits.parse("e2e:1"), start=2.0)
    assert (result.rate, result.reason) == (None, "too_slow_alone")
    assert len(result.probes) <= 2


@pytest.mark.parametrize(("kind", "reason"), [("lump", "unmeasured"), ("short", "short_answers")])
def test_answers_that_cannot_be_judged_end_the_search_by_name(kind: str, reason: str) -> None:
    """And not as ones that are too slow, at whatever rate."""

    def run_at(probe: SearchProbe) -> LoadRun:
        run = probing(is_exponential=False)(probe)
        for record in run.records:
            record.output_tokens, record.last_s = 20, record.first_s
            record.output_tokens_asked, record.is_length_asked = (200, True) if kind == "short" else (20, True)
        return run

    limits = LatencyLimits.parse("ttft:400 tpot:50" if kind == "lump" else "ttft:400")
    result = search(run_at, limits, 0.9, SearchOptions(start_rate=4.0))
    assert (result.rate, result.reason, len(result.probes)) == (None, reason, 1)
    assert result.sentence.startswith("No rate can be found. ")


def test_more_failures_than_the_target_allows_have_no_rate() -> None:
    result = found(failing=0.3, start=2.0)
    assert (result.rate, result.reason) == (None, "too_slow_alone")
    assert len(result.probes) >= 2


def test_the_highest_rate_that_may_be_asked_can_pass() -> None:
    result = search(probing(), LIMITS, 0.9, SearchOptions(start_rate=4.0, rate_max=10.0))
    assert (result.rate, result.reason, len(result.probes)) == (None, "highest_rate_passes", 3)
    assert max(one.probe.rate for one in result.probes) == 10.0


def test_the_lowest_rate_that_may_be_asked_can_fail() -> None:
    result = search(probing(), LIMITS, 0.9, SearchOptions(start_rate=60.0, rate_min=40.0))
    assert (result.rate, result.reason) == (None, "lowest_rate_fails")


def test_a_late_generator_is_the_answer_where_it_is_always_late() -> None:
    result = found(late_s=0.05)
    assert (result.rate, result.reason) == (None, "generator_late")
    assert len(result.probes) == 4
    assert "late" in result.sentence


def test_a_generator_that_was_late_once_is_not_believed_and_not_the_end() -> None:
    def run_at(probe: SearchProbe) -> LoadRun:
        return probing(late_s=5.0 if probe.rate > 30 else 0.0, is_exponential=False)(probe)

    result = search(run_at, LIMITS, 0.9, SearchOptions(start_rate=31.0))
    assert result.rate == pytest.approx(M_D_1_CAPACITY, rel=0.12)
    assert [one.is_believed for one in result.probes] == [False, False, *[True] * (len(result.probes) - 2)]


def test_a_generator_that_is_late_by_chance_bounds_nothing() -> None:
    """The first probe of two rates is late; the capacity is far above both."""

    def run_at(probe: SearchProbe) -> LoadRun:
        return probing(late_s=5.0 if probe.number in (1, 3) else 0.0, is_exponential=False)(probe)

    result = search(run_at, LIMITS, 0.9, SearchOptions(start_rate=5.0))
    rates = [one.probe.rate for one in result.probes]
    assert rates[:2] == [5.0, 5.0]
    assert rates[2] == rates[3] > 5.0
    assert result.rate == pytest.approx(M_D_1_CAPACITY, rel=0.15)
    assert all(not one.passed for one in result.probes if not one.is_believed)


def test_an_interrupted_probe_ends_the_search() -> None:
    def run_at(probe: SearchProbe) -> LoadRun:
        run = probing()(probe)
        run.ended = "interrupted"
        return run

    result = search(run_at, LIMITS, 0.9, SearchOptions(start_rate=9.0))
    assert (result.rate, result.reason, len(result.probes)) == (None, "interrupted", 1)


def test_a_search_that_was_interrupted_later_says_what_it_knows() -> None:
    def run_at(probe: SearchProbe) -> LoadRun:
        run = probing(is_exponential=False)(probe)
        run.ended = "interrupted" if probe.number == 6 else "complete"
        return run

    result = search(run_at, LIMITS, 0.9, SearchOptions(start_rate=9.0))
    assert result.reason == "interrupted"
    assert result.rate == pytest.approx(M_D_1_CAPACITY, rel=0.2)
    assert result.sentence.endswith("The run was interrupted: what was due later is missing.")


def test_a_server_that_sheds_load_is_asked_for_less() -> None:
    def run_at(probe: SearchProbe) -> LoadRun:
        return probing(failing=1.0 if probe.rate > 25 else 0.0, is_exponential=False)(probe)

    result = search(run_at, LIMITS, 0.9, SearchOptions(start_rate=40.0))
    assert result.rate == pytest.approx(M_D_1_CAPACITY, rel=0.12)


def test_probes_at_low_rates_are_shorter() -> None:
    asked: list[SearchProbe] = []

    def run_at(probe: SearchProbe) -> LoadRun:
        asked.append(probe)
        return queue_run(probe.rate, 0.5, probe.requests, warmup=probe.warmup, seed=probe.seed)

    search(run_at, LatencyLimits.parse("ttft:10000"), 0.9, SearchOptions(start_rate=0.2, probes_max=2))
    assert asked[0].requests == 120


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"start_rate": 0.0}, "start_rate"),
        ({"probes_max": 0}, "probes_max"),
        ({"probe_requests": 99}, "probe_requests"),
        ({"rate_min": 2.0}, "between"),
        ({"rate_max": 0.5}, "between"),
        ({"precision": 0.0}, "precision"),
    ],
)
def test_options_out_of_range_are_told(values: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SearchOptions(**values)  # type: ignore[arg-type]


def test_an_attainment_of_all_cannot_be_searched() -> None:
    with pytest.raises(ConfigError, match="below 1"):
        search(probing(), LIMITS, 1.0, SearchOptions())


def test_a_probe_far_off_does_not_outvote_those_near() -> None:
    posterior = CrossingPosterior(0.1, 1000.0, 0.9)
    for rate, share in ((19.0, 0.93), (21.0, 0.87)):
        posterior.note_share(int(rate), rate, share, 900, 1.0)
    near = posterior.quantile(0.5)
    posterior.note_share(60, 60.0, 0.4, 900, 1.0)
    assert near == pytest.approx(20, rel=0.02)
    assert posterior.quantile(0.5) == pytest.approx(20, rel=0.03)


def test_what_was_served_while_a_backlog_grew_bounds_the_rate() -> None:
    posterior = CrossingPosterior(0.1, 1000.0, 0.9)
    posterior.note_share(1, 16.0, 1.0, 900, 1.0)
    before = posterior.bounds()
    posterior.note_served(2, 22.0, 500, 0.001)
    bounds = posterior.bounds()
    assert 16 < bounds.low < bounds.rate < 23
    posterior.forget(2)
    assert posterior.bounds() == before


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
def test_a_cold_first_probe_is_tried_again_and_counts_for_nothing(seed: int) -> None:
    """Engines that were cold gave 4 % at a rate of which the half is no trouble."""

    def run_at(probe: SearchProbe) -> LoadRun:
        served = 4.0 if probe.number == 1 else SERVED
        return queue_run(probe.rate, served, probe.requests, warmup=probe.warmup, seed=probe.seed, is_exponential=False)

    result = search(run_at, LIMITS, 0.9, SearchOptions(start_rate=12.0), seed=seed)
    assert result.probes[0].is_set_aside
    assert [one.probe.rate for one in result.probes].count(12.0) == 2
    assert result.rate == pytest.approx(M_D_1_CAPACITY, rel=0.15)
    assert not result.is_wide
    [sentence] = result.contradictions
    assert sentence.startswith("Probe 1 contradicts probe ")
    assert "so probe 1 counts for nothing" in sentence


def test_a_lucky_probe_is_outvoted_by_two_at_a_lower_rate() -> None:
    lower, higher = ProbedShare(1, 10.0, 0.1, 0.3), ProbedShare(2, 20.0, 0.9, 1.0)
    assert doubted([higher, lower]) == (lower, higher)
    assert outvoted(lower, higher, ProbedShare(3, 10.0, 0.2, 0.4)) is higher
    assert outvoted(lower, higher, ProbedShare(3, 10.0, 0.8, 1.0)) is lower
    assert doubted([lower, ProbedShare(2, 20.0, 0.3, 0.6)]) is None, "the bounds meet"
    assert doubted([lower, ProbedShare(2, 5.0, 0.9, 1.0)]) is None, "load explains it"


def test_a_contradiction_that_no_probe_was_left_for_is_told() -> None:
    def run_at(probe: SearchProbe) -> LoadRun:
        served = (0.5, 100.0)[probe.number - 1]
        return queue_run(probe.rate, served, probe.requests, warmup=probe.warmup, seed=probe.seed, is_exponential=False)

    plan = SearchPlan(LIMITS, 0.9, SearchOptions(start_rate=8.0, probes_max=2), 0)
    first = plan.next_probe()
    assert first is not None
    plan.note(first, run_at(first))
    higher = dataclasses.replace(first, number=2, rate=40.0)
    plan.note(higher, run_at(higher))
    assert plan.next_probe() is None
    [sentence] = plan.result().contradictions
    assert sentence.endswith("the bounds of the rate do not hold.")
