"""A search whose server goes away between two probes."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import PeerGoneError
from kvxfer.load import seek
from kvxfer.load.execute import LoadPlan
from kvxfer.load.options import GoalOptions, TargetOptions
from kvxfer.load.search import SearchOptions
from tests.support.load_records import answered, run_of

GOAL = GoalOptions(goodput="ttft:200", attainment=0.9)
PLAN = LoadPlan(TargetOptions())


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
