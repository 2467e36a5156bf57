"""benchmarks/coordinator_scale.py: that it sees each thing that must not be, and that no wrong metric reads as 0."""

from __future__ import annotations

import argparse
import copy
import importlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.checkout

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
BEATS = {"count": 1000, "cpu_us_each": 149.0, "lost_connections": 0}
WELL: dict[str, Any] = {
    "joined": 100,
    "heartbeats": BEATS,
    "with_a_watcher": {**BEATS, "cpu_us_each": 199.0},
    "gone_heard_by_the_watcher": 0,
    "ended_at_first_coordinator": 0,
    "restart": {
        "connected": 100,
        "is_settled": True,
        "settled_s": 20.0,
        "gone_heard_by_agents": 0,
        "ended_at_coordinator": 0,
    },
}


@pytest.fixture(scope="module")
def scale() -> Iterator[Any]:
    """The benchmark as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("coordinator_scale")
    for name in [name for name in sys.modules if name.split(".")[0] in ("coordinator_scale", "control")]:
        del sys.modules[name]


def missed(scale: Any, found: dict[str, Any], **more: Any) -> list[str]:
    given = {"agents": 100, "bar_us": scale.BAR_US, "watched_bar_us": scale.WATCHED_BAR_US, "only_heartbeats": False}
    return list(scale.misses(argparse.Namespace(**{**given, **more}), found))


def test_a_run_in_which_all_went_well(scale: Any) -> None:
    assert missed(scale, WELL) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("joined", 99, "of 100 agents 99 joined"),
        ("heartbeats.cpu_us_each", 151.0, "a heartbeat costs 151.0 us of processor time, the bar is 150"),
        ("heartbeats.lost_connections", 2, "a heartbeat: 2 connections were lost meanwhile"),
        ("heartbeats.count", 0, "a heartbeat: there was none"),
        (
            "with_a_watcher.cpu_us_each",
            201.0,
            "a heartbeat with a watcher costs 201.0 us of processor time, the bar is 200",
        ),
        ("with_a_watcher.lost_connections", 1, "a heartbeat with a watcher: 1 connections were lost meanwhile"),
        ("gone_heard_by_the_watcher", 1, "the watcher heard of 1 more ended agents than ended"),
        ("ended_at_first_coordinator", 3, "ended_at_first_coordinator: 3"),
        ("restart.connected", 98, "of 100 agents 98 came back"),
        ("restart.is_settled", False, "the restarted coordinator was not settled after 20.0 s"),
        ("restart.gone_heard_by_agents", 1, "gone_heard_by_agents: 1"),
        ("restart.ended_at_coordinator", 1, "ended_at_coordinator: 1"),
    ],
)
def test_what_must_not_be(scale: Any, path: str, value: Any, said: str) -> None:
    found = copy.deepcopy(WELL)
    *outer, name = path.split(".")
    (found[outer[0]] if outer else found)[name] = value
    assert missed(scale, found) == [said]


@pytest.mark.parametrize("path", ["joined", "heartbeats"])
def test_what_must_not_be_in_heartbeats_alone(scale: Any, path: str) -> None:
    found = {name: WELL[name] for name in ("joined", "heartbeats")}
    assert missed(scale, found, only_heartbeats=True) == []
    found[path] = 99 if path == "joined" else {**BEATS, "lost_connections": 2}
    assert len(missed(scale, found, only_heartbeats=True)) == 1


def test_a_metric_is_the_sum_of_its_series_and_must_be_there(scale: Any) -> None:
    from kvxfer.coordinator.metrics import CoordinatorMetrics

    metrics = CoordinatorMetrics()
    assert scale.sum_of(metrics.text(), scale.ENDED) == 0
    for cause in ("lost", "lost", "left"):
        metrics.ended(cause)
    assert scale.sum_of(metrics.text(), scale.ENDED) == 3
    with pytest.raises(KeyError):
        scale.sum_of(metrics.text(), "kvxfer_coordinator_ended_total")
    for name in ("kvxfer_coordinator_heartbeat_interval_seconds", "kvxfer_coordinator_settled"):
        assert scale.sum_of(metrics.text(), name) == 0
