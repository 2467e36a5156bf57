"""When blocks and posts carry checksums, and what a result says of it: each mode on each kind of lane."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvxfer import Agent, AgentConfig, Lane
from kvxfer.agent import TransferResult
from kvxfer.errors import LaneUnavailableError
from kvxfer.policy.checksums import carries_checksums
from kvxfer.transport.base import allocate_region
from kvxfer.transport.batch import BatchStatistics
from kvxfer.transport.engine import Op
from kvxfer.types import ChecksumMode, TransferId
from tests.support.agents import BLOCK_BYTES, RECORD, fresh_id, info, introduce

SIZE = 64 << 10
BLOCKS = 8
ONE_SIDED = [Lane.MAPPED, Lane.CMA]


@contextlib.asynccontextmanager
async def two(checksum: str = "off", pools: tuple[str, str] = ("off", "off")) -> AsyncIterator[tuple[Agent, Agent]]:
    """Source and destination; ``pools``: the checksum mode of each one's pool."""
    config = AgentConfig(post_checksum=ChecksumMode(checksum), calibrate=False)
    agents = Agent(info("source"), config=config), Agent(info("destination"), config=config)
    async with agents[0], agents[1]:
        for agent, mode in zip(agents, pools, strict=True):
            agent.allocate_pool(RECORD, block_count=BLOCKS, block_bytes=BLOCK_BYTES, checksum=ChecksumMode(mode))
        agents[0].pools[0].array[:] = 7
        introduce(*agents)
        yield agents


def move_away(agent: Agent, other: Agent) -> None:
    """As ``agent`` sees it, ``other`` is on another host from now on."""
    address = dataclasses.replace(other.address, host_id="elsewhere", unix_path="")
    agent.connect_peer(other.ref, address, bytes(32), [pool.published for pool in other.pools])


async def pull(
    source: Agent, destination: Agent, *lanes: Lane, transfer_id: TransferId | None = None
) -> TransferResult:
    transfer_id, blocks = transfer_id or fresh_id(), list(range(BLOCKS))
    source.grant(source.pools[0], blocks, transfer_id=transfer_id, ready_blocks=BLOCKS)
    return await destination.pull(
        destination.pools[0], blocks, transfer_id=transfer_id, source="source", lanes=lanes or None
    )


async def post(op: Op, source: Agent, destination: Agent, *lanes: Lane) -> BatchStatistics:
    """16 pieces from the source's memory to the destination's, posted by the one that ``op`` says."""
    one, other = (destination, source) if op is Op.READ else (source, destination)
    mine, theirs = one.register(allocate_region(SIZE)), other.register(allocate_region(SIZE))
    pieces = np.arange(16) * 4096
    local = one.prepare([(mine.record.address + at, 4096, 0) for at in pieces])
    remote = one.prepare(
        [(theirs.record.address + at, 4096, 0) for at in pieces[::-1]], peer=other.ref.agent_id, records=other.memory()
    )
    return await one.post(op, local, None, remote, None, lanes=lanes or None)


@pytest.mark.parametrize("lane", [*ONE_SIDED, Lane.UNIX, Lane.STREAM])
async def test_a_pool_with_checks_is_checked_on_every_lane(lane: Lane) -> None:
    async with two(pools=("on", "on")) as (source, destination):
        result = await pull(source, destination, lane)
    assert (result.lane, result.blocks_checked) == (lane, BLOCKS)
    assert "checksums verified" in result.lane_reason


async def test_a_source_without_checksums_sends_to_a_pool_with_them() -> None:
    """What a reader would copy by itself goes by a lane on which the checksums go along, and the result says why."""
    async with two(pools=("off", "on")) as (source, destination):
        result = await pull(source, destination)
        assert (result.lane, result.blocks_checked) == (Lane.UNIX, BLOCKS)
        assert "no checksums" in result.lane_reason
        with pytest.raises(LaneUnavailableError, match="no checksums"):
            await pull(source, destination, Lane.CMA)


@pytest.mark.parametrize("op", Op)
async def test_posts_with_checks_take_a_lane_that_has_them(op: Op) -> None:
    async with two("on") as (source, destination):
        result = await post(op, source, destination)
        assert (result.lane, result.elements_checked) == (Lane.UNIX, 16)
        assert "checksums are on" in result.lane_reason
        assert "checksums verified" in result.lane_reason
        with pytest.raises(LaneUnavailableError, match="checksums are on"):
            await post(op, source, destination, *ONE_SIDED)


@pytest.mark.parametrize("op", Op)
async def test_mode_auto_checks_transfers_from_another_host(op: Op) -> None:
    async with two("auto", pools=("auto", "auto")) as (source, destination):
        near = await post(op, source, destination, Lane.STREAM)
        assert (near.elements_checked, (await pull(source, destination, Lane.STREAM)).blocks_checked) == (0, 0)
        move_away(destination, source)
        move_away(source, destination)
        lanes = [lane for lane in AgentConfig().lanes if lane is not Lane.UCX]  # where it is, it is tried first
        far, pulled = await post(op, source, destination, *lanes), await pull(source, destination, *lanes)
        assert (far.lane, far.elements_checked) == (pulled.lane, 16) == (Lane.STREAM, 16)
        assert pulled.blocks_checked == BLOCKS


@pytest.mark.parametrize("op", Op)
async def test_mode_off_checks_nothing(op: Op) -> None:
    async with two() as (source, destination):
        move_away(destination, source)
        move_away(source, destination)
        assert (await post(op, source, destination)).elements_checked == 0
        assert (await pull(source, destination)).blocks_checked == 0


@pytest.mark.parametrize("is_chosen", [True, False])
async def test_sampled_transfers_say_where_their_lane_has_no_checksums(is_chosen: bool) -> None:
    ids = (fresh_id() for _ in range(10_000))
    chosen = (one for one in ids if carries_checksums(ChecksumMode.SAMPLED, one.raw, is_same_host=True) is is_chosen)
    async with two(pools=("sampled", "sampled")) as (source, destination):
        sent = await pull(source, destination, Lane.STREAM, transfer_id=next(chosen))
        mapped = await pull(source, destination, Lane.MAPPED, transfer_id=next(chosen))
    assert (sent.blocks_checked, mapped.blocks_checked) == (BLOCKS if is_chosen else 0, 0)
    assert ("without checksums" in mapped.lane_reason) is is_chosen
