"""A search of a real plan: a server that goes away between two probes, a trace that is too short for one."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import pytest

from kvxfer.errors import ConfigError, PeerGoneError
from kvxfer.load import seek
from kvxfer.load.execute import LoadPlan
from kvxfer.load.options import GoalOptions, TargetOptions, WorkloadOptions
from kvxfer.load.search import SearchOptions, SearchResult
from kvxfer.load.settle import WarmedUp, settle
from tests.support.load_records import answered, failed, run_of

GOAL = GoalOptions(goodput="ttft:200", attainment=0.9)
PLAN = LoadPlan(TargetOptions())
AZURE = pathlib.Path(__file__).parents[1] / "workload" / "traces" / "azure_2023_conversation_200.csv"


def seek_where(monkeypatch: pytest.MonkeyPatch, *, answered_probes: int) -> seek.SoughtRate:
    made: list[Any] = []

    def execute(plan: LoadPlan, *, name: str, point: dict[str, Any] | None = None, **_: Any) -> Any:
        if name.startswith("warm-up") and answered_probes:
            return run_of([answered(number, number / 10) for number in range(20)])
        if len(made) == answered_probes:
            raise PeerGoneError("nothing answers")
        made.append(run_of([answered(number, number / 10) for number in range(100)], point=point))
        made[-1].name = name
        return made[-1]

    monkeypatch.setattr(seek, "execute", execute)
    return seek.seek(PLAN, GOAL, SearchOptions(start_rate=10.0, probe_requests=100))


def test_a_server_that_is_gone_ends_the_search_and_keeps_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    sought = seek_where(monkeypatch, answered_probes=2)
    assert [(one.run.name, one.run.ended) for one in sought.judged] == [
        ("probe 1", "complete"),
        ("probe 2", "complete"),
        ("probe 3", "unreachable"),
    ]
    assert (sought.result.rate, sought.result.reason) == (None, "unreachable")
    assert sought.verdict.is_failure


def test_a_server_that_was_never_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerGoneError):
        seek_where(monkeypatch, answered_probes=0)


def test_engines_are_warm_before_the_first_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on while each is much faster than the one before, with prompts of their own, and are no records."""
    asked: list[tuple[str, int, str]] = []
    kept: list[str] = []

    def execute(plan: LoadPlan, *, name: str, on_record: Any = kept.append, **_: Any) -> Any:
        asked.append((name, plan.workload.requests, plan.workload.salt))
        slow_s = {"warm-up 1": 4.0, "warm-up 2": 1.0}.get(name, 0.1)
        if name.startswith("warm-up"):
            assert on_record == kept.append, "the rounds are not told of as requests of the search"
        return run_of([answered(number, number / 10, ttft_s=slow_s) for number in range(100)], 10.0)

    monkeypatch.setattr(seek, "execute", execute)
    options = SearchOptions(start_rate=4.0, probe_requests=200, rate_max=4.0, rate_min=1.0)
    sought = seek.seek(PLAN, GOAL, options)
    names = [name for name, _, _ in asked]
    assert names[:5] == ["warm-up 1", "warm-up 2", "warm-up 3", "warm-up 4", "probe 1"]
    assert {count for name, count, _ in asked if name.startswith("warm-up")} == {40}, "ten seconds at 4/s"
    assert len({salt for _, _, salt in asked}) == len(asked)
    assert sought.warmed.medians_s == pytest.approx((4.1, 1.1, 0.2, 0.2))
    assert sought.warmed.findings == []
    assert sought.to_json()["search"]["warmup"]["is_settled"] is True


def test_a_service_that_gets_faster_for_ever_is_told() -> None:
    rounds = [4.0, 3.0, 2.0, 1.0, 0.5, 0.2]
    warmed = settle(lambda number: run_of([answered(0, 0.0, ttft_s=rounds[number - 1])]))
    assert len(warmed.medians_s) == 5
    [finding] = warmed.findings
    assert finding.name == "still_warming"
    assert "4100 ms, 3100 ms, 2100 ms, 1100 ms, 600 ms" in finding.sentence
    silent = settle(lambda number: run_of([failed(0, 0.0)]))
    assert "none, none" in silent.findings[0].sentence
    assert settle(lambda number: run_of([failed(0, 0.0)], ended="interrupted")).medians_s == (math.inf,)


def test_bounds_that_hardly_say_a_rate_are_told() -> None:
    result = SearchResult(20.0, 4.5, 41.0, 4.5, 18.0, (), "", "It holds 20.")
    found = seek.SoughtRate(result, [], WarmedUp((1.0, 1.0))).findings
    assert [one.name for one in found] == ["wide"]
    assert "between 4.5 and 41 requests/s" in found[0].sentence
    assert seek.SoughtRate(dataclasses.replace(result, low=21.0), [], WarmedUp((1.0, 1.0))).findings == []


def test_a_trace_that_is_too_short_for_a_later_probe_is_refused_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seek, "execute", lambda *_, **__: pytest.fail("a probe was sent"))
    plan = LoadPlan(TargetOptions(), WorkloadOptions(trace=str(AZURE)))
    options = SearchOptions(start_rate=10.0, probe_requests=900, probe_s_max=12.0)
    with pytest.raises(ConfigError, match="has 200 requests, which is less than the 900"):
        seek.seek(plan, GOAL, options)
