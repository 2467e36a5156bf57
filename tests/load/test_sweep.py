"""A sweep over engines without a model: each point has its own service, failures stay with their point."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import sys
from typing import Any

import pytest

from kvxfer.errors import TransportError
from kvxfer.load.descendants import Seen, descendants
from kvxfer.load.run import LoadRun
from kvxfer.load.sweep import PointResult, SweepResult, sweep
from kvxfer.load.sweep_points import SweepOptions, SweepPoint

MOCK = SweepOptions(splits=("1:1",), mock="--itl-ms 0", start_s=60.0)
COMPLETE = json.dumps({"model": "mock", "prompt": [1, 2, 3], "max_tokens": 2})


def made_run(name: str = "run", **values: Any) -> LoadRun:
    return LoadRun(name, "native", 0.0, (0.0, 1.0), **values)


def ask(url: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/v1/completions", COMPLETE, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def workers(url: str) -> list[str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", "/v1/workers")
        return sorted(worker["role"] for worker in json.loads(connection.getresponse().read())["data"])
    finally:
        connection.close()


def test_each_point_has_its_own_service() -> None:
    before = descendants(os.getpid())
    seen, urls, told = [], [], []

    def run_point(url: str, model: str, point: SweepPoint) -> LoadRun:
        assert model == "mock"
        assert ask(url) == 200
        urls.append(url)
        seen.append((point.prefill, point.decode, workers(url)))
        return made_run(point.name, point={"rate": 3.0})

    options = dataclasses.replace(MOCK, splits=("2:1", "1:2"))
    result = sweep(options, run_point, on_point=lambda *what: told.append(what[:2]))
    assert seen == [(2, 1, ["decode", "prefill", "prefill"]), (1, 2, ["decode", "decode", "prefill"])]
    assert len(set(urls)) == 2
    assert told == [(0, 2), (1, 2)]
    assert [each.failure for each in result.points] == ["", ""]
    assert [run.point["prefill"] for run in result.runs] == [2, 1]
    assert result.runs[0].point == {"prefill": 2, "decode": 1, "devices": 3, "rate": 3.0}
    assert not result.is_interrupted
    assert not started(before)


def test_a_point_that_fails_keeps_its_reason_and_the_sweep_goes_on() -> None:
    def run_point(url: str, model: str, point: SweepPoint) -> list[LoadRun]:
        if point.policy == "local-prefill=on":
            raise TransportError("nothing\nanswers")
        return [made_run("a"), made_run("b")]

    policies = ("local-prefill=maybe", "local-prefill=on", "local-prefill=off")
    result = sweep(dataclasses.replace(MOCK, policies=policies), run_point)
    failures = [each.failure for each in result.points]
    assert "the service ended with code 2: router could not start" in failures[0]
    assert failures[1:] == ["nothing answers", ""]
    assert [len(each.runs) for each in result.points] == [0, 0, 2]


def test_a_lost_process_is_said_with_the_runs_that_were_made() -> None:
    def run_point(url: str, model: str, point: SweepPoint) -> LoadRun:
        [engines] = [seen for seen in descendants(os.getpid()) if "mock-engine" in command_of(seen.pid)]
        os.kill(engines.pid, signal.SIGKILL)
        while ask(url) == 200:
            pass
        return made_run()

    [made] = sweep(MOCK, run_point).points
    assert len(made.runs) == 1
    assert made.failure.startswith("lost mock-engine (process ")
    assert "SIGKILL" in made.failure


def started(before: set[Seen]) -> set[Seen]:
    """Processes that are left of those that were started meanwhile; a helper of multiprocessing stays for good."""
    return {
        seen for seen in descendants(os.getpid()) - before if "resource_tracker" not in " ".join(command_of(seen.pid))
    }


def command_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().split("\0")


def test_an_interrupted_sweep_has_what_ran() -> None:
    before = descendants(os.getpid())

    def run_point(url: str, model: str, point: SweepPoint) -> LoadRun:
        if point.prefill == 2:
            raise KeyboardInterrupt
        return made_run()

    result = sweep(dataclasses.replace(MOCK, splits=("1:1", "2:1", "3:1")), run_point)
    assert [each.failure for each in result.points] == ["", "interrupted"]
    assert result.is_interrupted
    assert not started(before)


def test_a_stopped_sweep_begins_no_more_points() -> None:
    stopped: list[bool] = []

    def run_point(url: str, model: str, point: SweepPoint) -> LoadRun:
        stopped.append(True)
        return made_run()

    result = sweep(dataclasses.replace(MOCK, splits=("1:1", "2:1")), run_point, is_stopped=lambda: bool(stopped))
    assert len(result.points) == 1
    assert result.is_interrupted


def test_a_stack_of_another_maker() -> None:
    before = descendants(os.getpid())
    command = f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}} --directory {{prefill}}{{decode}}"
    options = SweepOptions(splits=("1:1",), stack=command, start_s=1.0)
    [made] = sweep(options, lambda url, model, point: made_run()).points
    assert made.failure.startswith("the service was not ready within 1 s: it has none of the routes /ready, /health, ")
    assert not started(before)


@pytest.mark.quick
def test_the_best_point_is_that_of_most_goodput_per_device() -> None:
    goodput = {"1P1D": 4.0, "2P1D": 9.0, "1P3D": 9.0, "3P3D": 60.0}
    result = SweepResult([PointResult(SweepPoint(int(name[0]), int(name[2]))) for name in goodput])
    result.points[-1].failure = "lost decode-0"
    best = result.best(lambda made: goodput[made.point.name])
    assert best is not None
    assert best.point.name == "2P1D"
    assert result.best(lambda made: 0.0) is None
    assert result.best(lambda made: None) is None


@pytest.mark.nightly
def test_the_built_in_engine_over_two_lanes() -> None:
    """Slow for its two starts of torch."""
    statuses = []

    def run_point(url: str, model: str, point: SweepPoint) -> LoadRun:
        statuses.append((point.lane, ask(url)))
        return made_run()

    options = SweepOptions(splits=("1:1",), lanes=("unix", "mapped+stream"), threads=1)
    result = sweep(options, run_point)
    assert [each.failure for each in result.points] == ["", ""]
    assert [lane for lane, _ in statuses] == ["unix", "mapped+stream"]
