"""Registered memory and posts of whole agents: awaited, polled, counted."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvxfer import Agent, AgentConfig, Lane
from kvxfer.agent import AgentPost
from kvxfer.errors import BlocksBusyError, ClosedError, InvalidArgumentError, PeerGoneError, TransferCancelledError
from kvxfer.transport.base import allocate_region
from kvxfer.transport.engine import Op
from kvxfer.types import RegionRecord, TransferState
from tests.support.agents import info, introduce, until

SIZE = 64 * 1024


def fill(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


def rows(record: RegionRecord, blocks: list[int], block_bytes: int = 4096) -> np.ndarray:
    return np.array([[record.address + block * block_bytes, block_bytes, 0] for block in blocks], dtype=np.uint64)


@pytest.mark.parametrize("op", Op)
async def test_read_and_write(pair: tuple[Agent, Agent], op: Op) -> None:
    peer, agent = pair
    mine, theirs = np.full(SIZE, 0xEE, np.uint8), np.full(SIZE, 0xEE, np.uint8)
    ours, other = agent.register(mine), peer.register(theirs)
    source, destination = (theirs, mine) if op is Op.READ else (mine, theirs)
    source[:] = fill(1)
    records = tuple(RegionRecord.from_json(record.to_json()) for record in peer.memory())
    assert records == (other.record,)
    local = agent.prepare(rows(ours.record, list(range(16))))
    remote = agent.prepare(rows(other.record, list(range(16))), peer="source", records=records)
    result = await agent.post(op, local, [3, 1], remote, [7, 8], notification=b"there")
    assert (result.bytes, result.elements, result.parts) == (8192, 2, 1)
    pairs = [(7, 3), (8, 1)] if op is Op.READ else [(3, 7), (1, 8)]
    for from_, to in pairs:
        assert (destination[to * 4096 : (to + 1) * 4096] == source[from_ * 4096 : (from_ + 1) * 4096]).all()
    assert (np.delete(destination.reshape(16, 4096), [to for _, to in pairs], axis=0) == 0xEE).all()
    async for notification in peer.notifications():
        assert (notification.sender, notification.payload) == (agent.ref, b"there")
        break
    statistics = agent.statistics()
    assert result.lane is not None
    assert statistics.outcomes[result.lane.value] == {"committed": 1}
    assert statistics.bytes[result.lane] == 8192
    assert statistics.lanes[str(peer.ref)][result.lane].small_count == 1
    assert [region.region_id for region in statistics.regions] == [ours.record.region_id]
    if op is Op.WRITE:
        await until(lambda: peer.statistics().offers == {result.lane.value: {"committed": 1}})
    metric = agent.registry.get_sample_value
    labels = {"lane": result.lane.value, "outcome": "committed"}
    assert metric("kvxfer_transfers_total", labels) == 1
    assert metric("kvxfer_transfer_bytes_total", {"lane": result.lane.value}) == 8192
    assert statistics.as_dict()["lanes"][str(peer.ref)][result.lane.value]["small_count"] == 1
    agent.deregister(ours)
    peer.deregister(other)
    assert agent.memory() == peer.memory() == ()
    await until(lambda: agent.statistics().is_idle and peer.statistics().is_idle)


async def test_polled_instead_of_awaited(pair: tuple[Agent, Agent]) -> None:
    peer, agent = pair
    theirs = fill(2)
    mine = agent.register(np.zeros(SIZE, np.uint8))
    record = peer.register(theirs).record
    local = agent.prepare([(mine.record.address, SIZE, 0)])
    remote = agent.prepare([(record.address, SIZE, 0)], peer="source", records=peer.memory())
    again = agent.prepare([(record.address, SIZE, 0)], peer="source")
    assert again.peer is remote.peer
    post = agent.post(Op.READ, local, None, remote, None)
    assert isinstance(post, AgentPost)
    for _ in range(10_000):
        if post.poll().is_final:
            break
        await asyncio.sleep(0.001)
    assert post.poll() is TransferState.COMMITTED
    await post.wait_drained()
    assert post.is_drained
    assert post.statistics().bytes == SIZE
    assert (await post).lane_reason


async def test_awaiting_posts_in_turn_lets_other_tasks_run(pair: tuple[Agent, Agent]) -> None:
    """Each is over before the task would sleep."""
    peer, agent = pair
    mine = agent.register(np.zeros(SIZE, np.uint8))
    record = peer.register(fill(2)).record
    local = agent.prepare([(mine.record.address, SIZE, 0)])
    remote = agent.prepare([(record.address, SIZE, 0)], peer="source", records=peer.memory())
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    for _ in range(50):
        await agent.post(Op.READ, local, None, remote, None)
    other.cancel()
    assert turns >= 50


async def test_a_scope_cancels(pair: tuple[Agent, Agent]) -> None:
    peer, agent = pair
    mine = agent.register(np.zeros(SIZE, np.uint8))
    local = agent.prepare([(mine.record.address, SIZE, 0)])
    record = peer.register(np.zeros(SIZE, np.uint8)).record
    remote = agent.prepare([(record.address, SIZE, 0)], peer="source", records=[record])
    async with agent.post(Op.READ, local, None, remote, None) as post:
        with pytest.raises(BlocksBusyError):
            agent.deregister(mine)
    assert post.is_drained
    agent.deregister(mine)
    try:
        await post
    except TransferCancelledError:
        assert agent.statistics().outcomes["none" if post.statistics().lane is None else post.statistics().lane.value]


async def test_post_with_wrong_arguments_raises_at_once(pair: tuple[Agent, Agent]) -> None:
    peer, agent = pair
    mine = agent.register(np.zeros(SIZE, np.uint8))
    with pytest.raises(InvalidArgumentError, match="inside no registered region"):
        agent.prepare([(mine.record.address + SIZE - 1, 2, 0)])
    with pytest.raises(InvalidArgumentError, match="name the peer"):
        agent.prepare([(1, 2, 0)], records=[mine.record])
    with pytest.raises(InvalidArgumentError, match="give its records"):
        agent.prepare([(1, 2, 0)], peer="source")
    with pytest.raises(PeerGoneError):
        agent.prepare([(1, 2, 0)], peer="absent", records=[mine.record])
    local = agent.prepare([(mine.record.address, 64, 0)])
    theirs = peer.register(allocate_region(SIZE))
    remote = agent.prepare([(theirs.record.address, 64, 0)], peer="source", records=peer.memory())
    agent.disconnect_peer(peer.ref)
    with pytest.raises(PeerGoneError):
        agent.post(Op.READ, local, None, remote, None)
    await agent.close()
    with pytest.raises(ClosedError):
        agent.register(np.zeros(SIZE, np.uint8))


async def test_a_closing_agent_ends_its_posts() -> None:
    agents = [Agent(info(name), config=AgentConfig(lanes=(Lane.STREAM,))) for name in ("source", "destination")]
    source, destination = agents
    async with source:
        async with destination:
            introduce(*agents)
            size = 32 << 20
            theirs = source.register(np.zeros(size, np.uint8))
            mine = destination.register(np.full(size, 0xEE, np.uint8))
            local = destination.prepare([(mine.record.address, size, 0)])
            remote = destination.prepare([(theirs.record.address, size, 0)], peer="source", records=source.memory())
            post = destination.post(Op.READ, local, None, remote, None)
        with pytest.raises(ClosedError):
            await post
        await post.wait_drained()
        assert destination.statistics().is_idle
        await until(lambda: source.statistics().is_idle)
        source.deregister(theirs)


async def test_without_a_socket(pair: tuple[Agent, Agent]) -> None:
    """Memory made by kvxfer may be mapped; the post says what it went over and why."""
    peer, agent = pair
    theirs, mine = peer.register(allocate_region(SIZE)), agent.register(allocate_region(SIZE))
    theirs.region.owner[:] = fill(3)  # type: ignore[index]
    local = agent.prepare([(mine.record.address, SIZE, 0)])
    remote = agent.prepare([(theirs.record.address, SIZE, 0)], peer="source", records=peer.memory())
    lane = Lane.MEMORY if peer.address.host_id.startswith("memory") else Lane.MAPPED
    result = await agent.post(Op.READ, local, None, remote, None, lanes=[lane])
    assert result.lane is lane
    assert result.lane_reason.startswith(lane.value)
    assert (mine.region.owner == theirs.region.owner).all()  # type: ignore[attr-defined]
