"""The thread that an agent lives on: how it starts, and how others learn that it ended."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from kvxfer.agent import Agent
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.runtime import Runtime
from kvxfer.connectors.vllm.source import Source
from kvxfer.connectors.vllm.steps import StepOrders
from kvxfer.connectors.vllm.worker import WorkerHalf
from kvxfer.errors import Closed
from kvxfer.types import CompatibilityRecord, Role, WorkerInfo


def new_agent() -> Agent:
    return Agent(WorkerInfo("a", Role.BOTH, "m", ""))


def new_worker(rank: int) -> WorkerHalf:
    record = CompatibilityRecord("m", "", "", "f32", 1, 1, 16, 4, "page:HNC", "", "", "none")
    options = ConnectorOptions.from_config("kv_both", "a", {"coordinator": "127.0.0.1:1"})
    half = WorkerHalf(options, lambda _: record, model="m", rank=rank, ranks=2, new_agent=lambda _: new_agent())
    half.register({"layer": torch.zeros(4, 1, 16, 8)})
    return half


async def forever() -> None:
    await asyncio.Event().wait()


def test_calls_run_on_its_thread_until_it_is_stopped() -> None:
    runtime, names = Runtime(new_agent(), forever), []
    runtime.stop()
    with pytest.raises(Closed, match="not started"):
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
    with pytest.raises(Closed, match=r"broke.*ZeroDivisionError\('seven'\)"):
        runtime.check()


def test_an_agent_that_ends_without_a_word_is_told_of_too() -> None:
    async def ends() -> None:
        await asyncio.sleep(0.1)

    runtime = Runtime(new_agent(), ends)
    runtime.start()
    runtime._thread.join(5.0)
    with pytest.raises(Closed, match="closed by itself"):
        runtime.check()


def test_holds_that_nobody_looks_after_any_more_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Source) -> None:
        raise ZeroDivisionError("seven")

    half = new_worker(rank=0)
    monkeypatch.setattr(Source, "sweep", breaks)
    half._runtime._thread.join(5.0)
    with pytest.raises(Closed, match=r"broke.*ZeroDivisionError\('seven'\)"):
        half.begin_step(StepOrders())
    half.shutdown()


@pytest.mark.parametrize(("rank", "counted"), [(0, [2, 0]), (1, [0, 0])])
def test_a_prompt_that_expired_is_counted_by_the_first_rank(rank: int, counted: list[int]) -> None:
    half = new_worker(rank)
    half._source.expired = 2
    assert [half.take_expired(), half.take_expired()] == counted
    half.shutdown()
