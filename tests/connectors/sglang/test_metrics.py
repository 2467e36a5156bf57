"""A rank's figures: what each room adds, and that SGLang's main process finds them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvxfer.connectors.sglang.destination import DestinationCallbacks
from kvxfer.connectors.sglang.metrics import PREFIX, RankMetrics
from kvxfer.connectors.sglang.source import SourceCallbacks
from kvxfer.types import Role
from tests.support.sglang_core.cores import Rank, begin, new_id, options, running, until

PAGE, ROW = 1536, 640
"""Bytes of a page and an auxiliary row of ``cores``."""


class Read:
    """A rank with figures, and what these are."""

    def __init__(self, name: str, role: Role, directory: pathlib.Path) -> None:
        self.registry = CollectorRegistry()
        self.figures = RankMetrics({"tp_rank": "3"}, self.registry)
        self.rank = Rank(name, role, options(directory, unknown_wait_s=0.2))
        core = self.rank.core
        core.sources._on_over = SourceCallbacks(on_over=self.figures.sent).on_over
        core.destinations._on_over = DestinationCallbacks(on_over=self.figures.loaded).on_over

    def __call__(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(PREFIX + name, {"tp_rank": "3", **labels}) or 0.0

    def look(self) -> None:
        self.figures.look(self.rank.core.statistics())


@pytest.fixture
def both(tmp_path: pathlib.Path) -> Iterator[tuple[Read, Read]]:
    p, d = Read("p", Role.PREFILL, tmp_path), Read("d", Role.DECODE, tmp_path)
    with running(p.rank, d.rank):
        yield p, d


def test_a_prompt_that_came_is_counted_with_its_bytes_and_lane(both: tuple[Read, Read]) -> None:
    p, d = both
    p.rank.sources.accept(5)
    begin(p.rank, d.rank, 5, (1, 2, 3), 0)
    p.rank.sources.send(5, 0, (7, 8), is_last=False)
    until(lambda: p.rank.core.statistics().agent.grants.released == 1)
    p.rank.sources.send(5, 2, (9,), is_last=True, aux_row=0)
    d.rank.wait("done", 5)
    p.rank.wait("sent", 5)
    [lane] = [lane.value for lane in d.rank.core.statistics().agent.bytes]
    until(lambda: d("loads_total", outcome="committed", lane=lane) == p("sends_total", outcome="committed") == 1)
    total = d.rank.destinations.received(5).bytes
    assert d("bytes_total") == total == 3 * PAGE + ROW
    assert 2 * PAGE <= d("early_bytes_total") < total
    assert d("load_duration_seconds_count") == d("wire_duration_seconds_count") == d("wait_duration_seconds_count") == 1
    assert 0 < d("wire_duration_seconds_sum") <= d("load_duration_seconds_sum")
    d.rank.destinations.clear(5)
    p.rank.sources.clear(5)
    assert d("loads_total", outcome="committed", lane=lane) == 1


def test_prompts_that_did_not_come_are_counted_by_their_codes(both: tuple[Read, Read]) -> None:
    p, d = both
    for room in (5, 6):
        p.rank.sources.accept(room)
        begin(p.rank, d.rank, room, (room,), 0)
    until(lambda: d.rank.core.statistics().agent.pulls.queued == 2)
    p.rank.sources.abort(5, "the client left")
    d.rank.wait("failed", 5)
    d.rank.destinations.clear(6)
    d.rank.destinations.begin(7, new_id(), [("p", 0)], (7,), 0)
    p.rank.core.pulses.step(False)
    d.rank.wait("failed", 7)
    until(lambda: d("loads_total", outcome="cancelled", lane="none") == p("sends_total", outcome="cancelled") == 2)
    assert d("loads_total", outcome="grant_unknown", lane="none") == 1
    assert d("wait_duration_seconds_count") == 3
    assert d("bytes_total") == d("load_duration_seconds_count") == 0
    for room in (5, 6, 7):
        d.rank.destinations.clear(room)
        p.rank.sources.clear(room)
    assert d("loads_total", outcome="cancelled", lane="none") == 2


def test_open_and_waiting_rooms_are_counted(both: tuple[Read, Read]) -> None:
    p, d = both
    p.rank.sources.accept(5)
    begin(p.rank, d.rank, 5, (1,), 0)
    d.rank.destinations.begin(6, new_id(), [("p", 0)], (2,), 1)
    p.rank.core.pulses.step(True)
    pulls: Any = lambda: d.rank.core.statistics().agent.pulls  # noqa: E731
    until(lambda: (pulls().queued, pulls().unknown) == (1, 1))
    p.look()
    d.look()
    assert (p("rooms", side="source"), p("rooms", side="destination")) == (1, 0)
    assert (d("rooms", side="source"), d("rooms", side="destination")) == (0, 2)
    assert [d("awaited_prompts", state=state) for state in ("unknown", "queued", "granted")] == [1, 1, 0]
    p.rank.sources.abort(5, "x")
    d.rank.destinations.clear(6)
    d.rank.wait("failed", 5)
    until(lambda: pulls().queued == pulls().unknown == 0)
    p.look()
    d.look()
    assert p("rooms", side="source") == d("rooms", side="destination") == d("awaited_prompts", state="queued") == 0


RANK = """
from kvxfer.connectors.sglang.destination_room import RoomReport
from kvxfer.connectors.sglang.metrics import RankMetrics
figures = RankMetrics({"tp_rank": "TP"})
figures.loaded(RoomReport(1, "committed", "mapped", 100, 50, 0.5, 0.2, 0.1))
figures.sent(1, "peer_gone")
figures._of(figures._rooms, "source").set(2)
"""
MAIN = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_the_main_process_finds_those_of_every_rank(tmp_path: pathlib.Path) -> None:
    """As SGLang has it: ranks write files, and another process reads them."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def run(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        ).stdout

    for rank in ("0", "1"):
        run(RANK.replace("TP", rank))
    said = run(MAIN)
    for rank in ("0", "1"):
        assert f'sglang:kvxfer_loads_total{{lane="mapped",outcome="committed",tp_rank="{rank}"}} 1.0' in said
        assert f'sglang:kvxfer_bytes_total{{tp_rank="{rank}"}} 100.0' in said
        assert f'sglang:kvxfer_sends_total{{outcome="peer_gone",tp_rank="{rank}"}} 1.0' in said
        assert f'sglang:kvxfer_rooms{{side="source",tp_rank="{rank}"}} 2.0' in said
        assert f'sglang:kvxfer_wait_duration_seconds_count{{tp_rank="{rank}"}} 1.0' in said


def test_the_plugin_leaves_prometheus_to_sglang() -> None:
    """SGLang's main process says where the files lie before it imports prometheus_client, which looks then."""
    code = "import sys, kvxfer.connectors.sglang.plugin; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
