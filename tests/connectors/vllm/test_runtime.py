"""The thread that an agent lives on: how it starts, and how others learn that it ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvxfer.agent import Agent
from kvxfer.connectors.vllm.runtime import Runtime
from kvxfer.errors import Closed
from kvxfer.types import Role, WorkerInfo


def new_agent() -> Agent:
    return Agent(WorkerInfo("a", Role.BOTH, "m", ""))


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
