"""Two agents in two processes, and the death of one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentConfig, Lane
from kvxfer.errors import DeadlineExceededError, LaneUnavailableError, PeerGoneError
from kvxfer.transport import ucx
from kvxfer.transport.base import allocate_region
from kvxfer.transport.engine import Op
from kvxfer.types import RegionRecord
from tests.support import child
from tests.support.agents import BLOCK_BYTES, RECORD, Coordinator, fresh_id, info, until


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
    process = await asyncio.create_subprocess_exec(
        *child.command("agent_source", coordinator.target, str(coordinator.token_file)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child.environment(),
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
    config = AgentConfig(stall_s=0.5, reconnect_s=1.0)
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
        with pytest.raises(PeerGoneError):
            await transfer
        await transfer.wait_drained()
        assert time.monotonic() - killed_s < 15
        assert agent.statistics().is_idle
        again = agent.pull(into, range(8), transfer_id=fresh_id(), source="p")
        again.cancel()
        await again.wait_drained()
        await until(lambda: agent.members() == ())
        with pytest.raises(PeerGoneError):
            await agent.pull(into, [1], transfer_id=fresh_id(), source="p", deadline_s=0.3)


REGION_BYTES = 64 << 20
LANES = [lane for lane in Lane if lane is not Lane.MEMORY and (lane is not Lane.UCX or ucx.find_library().path)]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("op", Op)
async def test_a_peer_that_dies_under_a_post(
    coordinator: Coordinator, op: Op, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle it ends the post in bounded time, and our memory is ours again: nothing lands any more."""
    monkeypatch.setenv("KVXFER_LANES", lane.value)
    async with source_process(coordinator) as peer, make_destination(coordinator) as agent:
        mine = agent.register(allocate_region(REGION_BYTES))
        array = mine.region.owner
        assert isinstance(array, np.ndarray)
        rows = np.zeros((REGION_BYTES >> 16, 3), np.uint64)
        rows[:, 0], rows[:, 1] = mine.record.address + np.arange(len(rows)) * (1 << 16), 1 << 16
        local = agent.prepare(rows)
        await agent.wait_member("p", timeout_s=10)
        record = RegionRecord.from_json(json.dumps(await peer.tell(register=REGION_BYTES, fill=7)))
        rows[:, 0] = record.address + np.arange(len(rows)) * (1 << 16)
        remote = agent.prepare(rows, peer="p", records=[record])
        array[:] = 1
        await agent.post(op, local, [0], remote, [1], lanes=[lane])
        post = agent.post(op, local, None, remote, None, lanes=[lane])
        await asyncio.sleep(0.004)
        peer.process.kill()
        await peer.process.wait()
        killed_s = time.monotonic()
        # UCX may find before the session does that the peer is gone.
        with contextlib.suppress(PeerGoneError, *([LaneUnavailableError] if lane is Lane.UCX else [])):
            await post
        await post.wait_drained()
        assert time.monotonic() - killed_s < 15
        array[:] = 2
        await asyncio.sleep(0.02)
        assert (array == 2).all()
        agent.deregister(mine)
        assert agent.statistics().is_idle


def is_stopped(pid: int) -> bool:
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return all("\nState:\tT" in (task / "status").read_text() for task in tasks)


@pytest.mark.parametrize("op", Op)
async def test_a_peer_that_stops_is_not_waited_for(coordinator: Coordinator, op: Op) -> None:
    """SIGSTOP: the deadline ends the post. What was read of a stopped peer's memory is not committed."""
    async with source_process(coordinator) as peer, make_destination(coordinator) as agent:
        await agent.wait_member("p", timeout_s=10)
        record = RegionRecord.from_json(json.dumps(await peer.tell(register=1 << 20, fill=7)))
        mine = agent.register(allocate_region(1 << 20))
        local = agent.prepare([(mine.record.address, 1 << 20, 0)])
        remote = agent.prepare([(record.address, 1 << 20, 0)], peer="p", records=[record])
        await agent.post(op, local, None, remote, None)
        peer.process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: is_stopped(peer.process.pid))  # a thread on another processor runs on for a moment
            post = agent.post(op, local, None, remote, None, deadline_s=0.5)
            with pytest.raises((DeadlineExceededError, PeerGoneError)):
                await post
            async with asyncio.timeout(15):
                await post.wait_drained()
        finally:
            peer.process.send_signal(signal.SIGCONT)
        agent.deregister(mine)
