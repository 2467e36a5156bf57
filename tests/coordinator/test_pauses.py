"""Clients that were stopped for a moment read what came meanwhile, before they say that the coordinator was silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import AsyncIterator

from kvxfer.coordinator import CoordinatorOptions
from kvxfer.rpc import MembershipWatch, load_or_create_token
from tests.support.coordinator import Cluster, Recorder, until

DEAD_AFTER_S = 4.0
PAUSE_S = 3.0
"""Longer than a client of several coordinators waits for an answer, and shorter than what ends an agent."""


@contextlib.asynccontextmanager
async def other_process(token_file: pathlib.Path) -> AsyncIterator[str]:
    """The address of a coordinator that runs on while this process stands still."""
    words = ["-m", "kvxfer.cli", "coordinator", "--port=0", f"--token-file={token_file}", "--log-level=error"]
    words += ["--heartbeat-s=0.2", "--suspect-after-s=3.5", f"--dead-after-s={DEAD_AFTER_S}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, f"--exit-with-parent={os.getpid()}", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield str(json.loads(await process.stdout.readline())["address"])
    finally:
        process.terminate()
        await process.wait()


async def test_a_client_that_stood_still_keeps_its_coordinator(tmp_path: pathlib.Path) -> None:
    token_file = tmp_path / "token"
    token = load_or_create_token(str(token_file))
    async with other_process(token_file) as address:
        targets = f"{address},127.0.0.1:9"  # the second is not there; with one alone, patience is the agent's death
        agent = Recorder(Cluster(CoordinatorOptions(token_file=str(token_file))), "a", target=targets)
        states: list[bool] = []
        watch = MembershipWatch(targets, token, on_state=states.append)
        await agent.session.start()
        watch.start()
        await watch.wait_connected()
        await until(lambda: agent.session.heartbeats > 2, "heartbeats")
        time.sleep(PAUSE_S)  # noqa: ASYNC251  stands for a process that gets no processor
        before = agent.session.heartbeats
        await until(lambda: agent.session.heartbeats > before + 2, "heartbeats after the pause")
        assert agent.states == [True]
        assert states == [True]
        await asyncio.gather(agent.session.close(), watch.close())
