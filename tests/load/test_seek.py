"""A search of a real plan: a server that goes away between two probes, a trace that is too short for one."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from kvxfer.errors import ConfigError, PeerGoneError
from kvxfer.load import seek
from kvxfer.load.execute import LoadPlan
from kvxfer.load.options import GoalOptions, TargetOptions, WorkloadOptions
from kvxfer.load.search import SearchOptions
from tests.support.load_records import answered, run_of

GOAL = GoalOptions(goodput="ttft:200", attainment=0.9)
PLAN = LoadPlan(TargetOptions())
AZURE = pathlib.Path(__file__).parents[1] / "workload" / "traces" / "azure_2023_conversation_200.csv"


def seek_where(monkeypatch: pytest.MonkeyPatch, *, answered_probes: int) -> seek.SoughtRate:
    made: list[Any] = []

    def execute(plan: LoadPlan, *, name: str, point: dict[str, Any], **_: Any) -> Any:
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


def test_a_trace_that_is_too_short_for_a_later_probe_is_refused_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seek, "execute", lambda *_, **__: pytest.fail("a probe was sent"))
    plan = LoadPlan(TargetOptions(), WorkloadOptions(trace=str(AZURE)))
    options = SearchOptions(start_rate=10.0, probe_requests=900, probe_s_max=12.0)
    with pytest.raises(ConfigError, match="has 200 requests, which is less than the 900"):
        seek.seek(plan, GOAL, options)
