"""Two agents in two processes, and the death of one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agent_support import BLOCK_BYTES, RECORD, Coordinator, fresh_id, info, until

import kvxfer
from kvxfer import Agent, AgentConfig, Lane
from kvxfer.errors import PeerGone

SCRIPT = pathlib.Path(__file__).with_name("source_process.py")


class SourceProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return json.loads(await self.process.stdout.readline())

    async def tell(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        await self.process.stdin.drain()
        return await self.hear()


@contextlib.asynccontextmanager
async def source_process(coordinator: Coordinator) -> AsyncIterator[SourceProcess]:
    package = str(pathlib.Path(kvxfer.__file__).parent.parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        coordinator.target,
        str(coordinator.token_file),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": package},
    )
    try:
        source = SourceProcess(process)
        await source.hear()
        yield source
    finally:
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(20):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
                raise


def make_destination(coordinator: Coordinator) -> Agent:
    config = AgentConfig(stall_s=0.5, reconnect_s=1.5)
    agent = Agent(info("d"), coordinator=coordinator.target, token=coordinator.token, config=config)
    agent.allocate_pool(RECORD, block_count=16, block_bytes=BLOCK_BYTES)
    return agent


@pytest.mark.parametrize("lane", [Lane.MAPPED, Lane.STREAM])
async def test_bytes_cross_between_processes(coordinator: Coordinator, lane: Lane) -> None:
    async with source_process(coordinator) as source, make_destination(coordinator) as agent:
        transfer_id, into = fresh_id(), agent.pools[0]
        await agent.wait_member("p", timeout_s=10)
        await source.tell(transfer_id=str(transfer_id), blocks=[9, 2], ready=1)
        transfer = agent.pull(into, [3, 4], transfer_id=transfer_id, source="p", lanes=[lane])
        await source.tell(transfer_id=str(transfer_id), blocks=[9, 2], ready=2, wait=True)
        result = await transfer
        assert result.lane is lane
        assert (into.array[3] == 10).all()
        assert (into.array[4] == 3).all()
        assert (await source.hear())["state"] == "RELEASED"
        assert agent.statistics().is_idle


@pytest.mark.parametrize("lanes", [None, [Lane.STREAM]], ids=["all", "stream"])
async def test_a_killed_source_ends_its_pulls_in_bounded_time(
    coordinator: Coordinator, lanes: list[Lane] | None
) -> None:
    async with source_process(coordinator) as source, make_destination(coordinator) as agent:
        transfer_id, into = fresh_id(), agent.pools[0]
        await agent.wait_member("p", timeout_s=10)
        await source.tell(transfer_id=str(transfer_id), blocks=list(range(8)), ready=5)
        transfer = agent.pull(into, range(8), transfer_id=transfer_id, source="p", lanes=lanes)
        await until(lambda: transfer.progress().blocks_done == 5)
        assert transfer.lane is (Lane.MAPPED if lanes is None else Lane.STREAM)
        killed_s = time.monotonic()
        source.process.kill()
        await source.process.wait()
        with pytest.raises(PeerGone):
            await transfer
        await transfer.wait_drained()
        assert time.monotonic() - killed_s < 15
        assert agent.statistics().is_idle
        again = agent.pull(into, range(8), transfer_id=fresh_id(), source="p")
        again.cancel()
        await again.wait_drained()
        await until(lambda: agent.members() == ())
        with pytest.raises(PeerGone):
            await agent.pull(into, [1], transfer_id=fresh_id(), source="p", deadline_s=0.3)
