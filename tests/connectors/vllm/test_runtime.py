"""The thread that an agent runs on: how it starts, and how others learn that it ended."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from kvxfer.agent import Agent
from kvxfer.connectors.common.runtime import Runtime
from kvxfer.connectors.vllm.fetch import Fetch
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.shares import RankShare
from kvxfer.connectors.vllm.source import PromptSource
from kvxfer.connectors.vllm.steps import LoadOrder, StepOrders
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.errors import ClosedError
from kvxfer.transport import huge_pages
from kvxfer.types import CompatibilityRecord, Role, TransferId, WorkerInfo


def new_agent() -> Agent:
    return Agent(WorkerInfo("a", Role.BOTH, "m", ""))


def new_worker(rank: int, **extra: object) -> WorkerHalf:
    record = CompatibilityRecord("m", "", "", "f32", 1, 1, 16, 4, "page:HNC", "", "", "none")
    options = ConnectorOptions.from_config("kv_both", "a", {"coordinator": "127.0.0.1:1", **extra})
    half = WorkerHalf(options, lambda _: record, model="m", rank=rank, ranks=2, new_agent=lambda _: new_agent())
    half.register({"layer": torch.zeros(4, 1, 16, 8)})
    return half


def test_an_engine_says_how_long_a_request_it_can_hold() -> None:
    record = CompatibilityRecord("m", "", "", "f32", 1, 1, 16, 4, "page:HNC", "", "", "none")
    options = ConnectorOptions.from_config("kv_both", "a", {"coordinator": "127.0.0.1:1"})
    said: list[WorkerInfo] = []

    def agent_of(info: WorkerInfo) -> Agent:
        said.append(info)
        return new_agent()

    half = WorkerHalf(
        options, lambda _: record, model="m", rank=0, ranks=1, new_agent=agent_of, max_context_tokens=2048
    )
    half.register({"layer": torch.zeros(4, 1, 16, 8)})
    half.shutdown()
    assert [(info.max_context_tokens, info.block_tokens) for info in said] == [(2048, 4)]


async def forever() -> None:
    await asyncio.Event().wait()


def test_calls_run_on_its_thread_until_it_is_stopped() -> None:
    runtime, names = Runtime(new_agent(), forever), []
    runtime.stop()
    with pytest.raises(ClosedError, match="not started"):
        runtime.call(print)
    runtime.start()
    called = threading.Event()
    runtime.call(lambda: (names.append(threading.current_thread().name), called.set()))
    assert called.wait(5.0)
    assert names == ["kvxfer"]
    runtime.stop()
    runtime.stop()
    runtime.call(print)
    runtime.check()


def test_an_agent_that_breaks_is_told_of() -> None:
    async def breaks() -> None:
        raise ZeroDivisionError("seven")

    runtime = Runtime(new_agent(), breaks)
    runtime.start()
    runtime._thread.join(5.0)
    with pytest.raises(ClosedError, match=r"broke.*ZeroDivisionError\('seven'\)"):
        runtime.check()


def test_an_agent_that_ends_without_a_word_is_told_of_too() -> None:
    async def ends() -> None:
        await asyncio.sleep(0.1)

    runtime = Runtime(new_agent(), ends)
    runtime.start()
    runtime._thread.join(5.0)
    with pytest.raises(ClosedError, match="closed by itself"):
        runtime.check()


def test_pending_sends_of_a_dead_agent_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: PromptSource) -> None:
        raise ZeroDivisionError("seven")

    half = new_worker(rank=0)
    monkeypatch.setattr(PromptSource, "sweep", breaks)
    half._runtime._thread.join(5.0)
    with pytest.raises(ClosedError, match=r"broke.*ZeroDivisionError\('seven'\)"):
        half.begin_step(StepOrders())
    half.shutdown()


@pytest.mark.parametrize(("rank", "counted"), [(0, [2, 0]), (1, [0, 0])])
def test_a_prompt_that_expired_is_counted_by_the_first_rank(rank: int, counted: list[int]) -> None:
    half = new_worker(rank)
    half._source.expired = 2
    assert [half.take_expired(), half.take_expired()] == counted
    half.shutdown()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_cache_moves_into_huge_pages_while_the_engine_runs(is_wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, has_begun, was_stopped = [], threading.Event(), threading.Event()

    def collapse(address: int, length_bytes: int, stop: threading.Event) -> int:
        asked.append((address, length_bytes))
        has_begun.set()
        assert stop.wait(10.0)
        was_stopped.set()
        return 0

    monkeypatch.setattr(huge_pages, "collapse", collapse)
    half = new_worker(0, huge_pages=is_wanted)
    assert has_begun.wait(5.0 if is_wanted else 0.1) is is_wanted
    half.shutdown()
    assert was_stopped.is_set() is is_wanted
    regions = [store.region for store in half._source._pages.stores]
    assert asked == [(region.address, region.length_bytes) for region in regions if is_wanted]


def new_load() -> LoadOrder:
    return LoadOrder("l", TransferId(b"i" * 16), ("p",), 0, (1,), 4, b"c" * 32, True)


def test_load_released_in_its_own_step_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    half, begun, received = new_worker(rank=0), [], set()
    monkeypatch.setattr(half._loads, "begin", begun.append)
    half.begin_step(StepOrders(loads=(new_load(),), cancels=("l",)))
    end_s = time.monotonic() + 5.0
    while not received and time.monotonic() < end_s:
        received = half.results().received
    assert (begun, received) == ([], {"l"})
    assert [report.code for report in half.reports()] == ["cancelled"]
    half.shutdown()


def test_loads_that_ended_are_not_looked_after_in_steps_that_compute() -> None:
    half = new_worker(rank=0)
    fetch = Fetch(new_load(), RankShare(0, (0,), range(1)), 1)
    fetch.is_ended = fetch.is_told = True
    half._begun.append(fetch)
    half._freed("another")  # something else ended: no send waits
    half.begin_step(StepOrders(has_forward=True))
    assert half.results().sent == {"another"}
    assert half._begun == []
    half.shutdown()
