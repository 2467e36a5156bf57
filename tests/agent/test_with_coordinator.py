"""Agents that find each other through a real coordinator on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvxfer import Agent, AgentConfig, CompatibilityRecord, GrantState, Lane
from kvxfer.errors import (
    AuthenticationError,
    CoordinatorUnavailableError,
    IncompatibleError,
    InvalidArgumentError,
    PeerGoneError,
    RefusedError,
    WeightsUnknownError,
)
from kvxfer.rpc.convert import POOLS_MAX
from kvxfer.types import Load, unknown_fingerprint
from tests.support.agents import BLOCK_BYTES, RECORD, Coordinator, fresh_id, info, until


def make(coordinator: Coordinator, agent_id: str, record: CompatibilityRecord = RECORD) -> Agent:
    config = AgentConfig(stall_s=0.3, reconnect_s=1.0)
    agent = Agent(info(agent_id), coordinator=coordinator.target, token=coordinator.token, config=config, connect_s=10)
    agent.allocate_pool(record, block_count=16, block_bytes=BLOCK_BYTES)
    return agent


@contextlib.asynccontextmanager
async def joined(coordinator: Coordinator) -> AsyncIterator[tuple[Agent, Agent]]:
    async with make(coordinator, "p") as source, make(coordinator, "d") as destination:
        await source.wait_member("d", timeout_s=10)
        await destination.wait_member("p", timeout_s=10)
        yield source, destination


async def move(source: Agent, destination: Agent, value: int) -> Lane:
    """One committed transfer of three blocks full of ``value``."""
    transfer_id = fresh_id()
    source.pools[0].array[:3] = value
    grant = source.grant(source.pools[0], [0, 1, 2], transfer_id=transfer_id, reader=destination.ref.agent_id)
    grant.ready(3, complete=True)
    transfer = destination.pull(
        destination.pools[0], [5, 6, 7], transfer_id=transfer_id, source=source.ref.agent_id, deadline_s=20
    )
    result = await transfer
    await transfer.wait_drained()
    assert (destination.pools[0].array[5:8] == value).all()
    assert await grant.wait_ended() is GrantState.RELEASED
    return result.lane


async def test_the_whole_path(coordinator: Coordinator) -> None:
    async with joined(coordinator) as (source, destination):
        assert source.ref.incarnation.number != destination.ref.incarnation.number
        assert await move(source, destination, 7) is Lane.MAPPED
        assert await move(destination, source, 9) is Lane.MAPPED
        assert source.statistics().is_idle
        assert destination.statistics().is_coordinator_connected
        assert [member.ref for member in destination.members()] == [source.ref]
        source.load(Load(queued_requests=4))


async def test_a_pull_waits_for_a_source_that_is_just_joining(coordinator: Coordinator) -> None:
    async with make(coordinator, "d") as destination:
        transfer_id = fresh_id()
        transfer = destination.pull(destination.pools[0], [1], transfer_id=transfer_id, source="p", deadline_s=20)
        async with make(coordinator, "p") as source:
            source.grant(source.pools[0], [4], transfer_id=transfer_id, ready_blocks=1)
            assert (await transfer).source == source.ref


async def test_a_pool_registered_later_is_published(coordinator: Coordinator) -> None:
    other = dataclasses.replace(RECORD, dtype="bfloat16")
    async with joined(coordinator) as (source, destination):
        into = destination.register_pool(other, np.zeros((4, 512), np.uint8), block_count=4)
        with pytest.raises(IncompatibleError) as caught:
            await destination.pull(into, [0], transfer_id=fresh_id(), source="p")
        assert caught.value.field == "dtype"
        memory = np.full((4, 512), 3, np.uint8)
        pool = source.register_pool(other, memory, block_count=4)
        await until(lambda: any(len(member.pools) == 2 for member in destination.members()))
        transfer_id = fresh_id()
        source.grant(pool, [2], transfer_id=transfer_id, ready_blocks=1)
        result = await destination.pull(into, [0], transfer_id=transfer_id, source="p")
        assert result.lane is Lane.UNIX


async def test_a_pool_that_is_not_published_is_pulled_into_and_known_to_nobody(coordinator: Coordinator) -> None:
    async with joined(coordinator) as (source, destination):
        into = destination.allocate_pool(RECORD, block_count=4, block_bytes=BLOCK_BYTES, is_published=False)
        transfer_id = fresh_id()
        source.pools[0].array[2] = 5
        source.grant(source.pools[0], [2], transfer_id=transfer_id, ready_blocks=1)
        transfer = destination.pull(into, [3], transfer_id=transfer_id, source="p")
        await transfer
        await transfer.wait_drained()
        assert (into.array[3] == 5).all()
        known = destination.allocate_pool(RECORD, block_count=4, block_bytes=BLOCK_BYTES)  # one that is published
        await until(lambda: any(len(member.pools) == 2 for member in source.members()))
        [seen] = source.members()
        assert [pool.pool_id for pool in seen.pools] == [1, known.pool_id]
        destination.remove_pool(into)
        assert into not in destination.pools


async def test_of_a_pool_too_many_nothing_stays(coordinator: Coordinator) -> None:
    async with make(coordinator, "d") as agent:
        for _ in range(POOLS_MAX - 1):
            agent.register_pool(RECORD, bytearray(BLOCK_BYTES), block_count=1)
        memory = np.zeros(BLOCK_BYTES, np.uint8)
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match="POOLS_MAX=64"):
                agent.register_pool(RECORD, memory, block_count=1)
        assert len(agent.pools) == len(agent.statistics().pools) == POOLS_MAX
        agent.remove_pool(agent.pools[-1])
        agent.register_pool(RECORD, memory, block_count=1)


async def test_incompatible_is_named_by_field(coordinator: Coordinator) -> None:
    async with (
        make(coordinator, "p"),
        make(coordinator, "d", dataclasses.replace(RECORD, weights_fingerprint="w1")) as destination,
    ):
        with pytest.raises(IncompatibleError, match="weights_fingerprint is 'w1' here and 'w0' there") as caught:
            await destination.pull(destination.pools[0], [0], transfer_id=fresh_id(), source="p")
        assert caught.value.field == "weights_fingerprint"


async def test_weights_that_become_known_and_unknown_again_are_told_to_others(coordinator: Coordinator) -> None:
    unknown = dataclasses.replace(RECORD, weights_fingerprint=unknown_fingerprint("being read", b"n" * 16))
    async with make(coordinator, "p", unknown) as source, make(coordinator, "d") as destination:

        async def heard(record: CompatibilityRecord) -> None:
            await until(lambda: [pool.record for pool in destination.find_member("p").pools] == [record])  # type: ignore[union-attr]

        await destination.wait_member("p", timeout_s=10)
        with pytest.raises(WeightsUnknownError, match="there being read"):
            await destination.pull(destination.pools[0], [0], transfer_id=fresh_id(), source="p")
        source.pools[0].describe(RECORD)
        await heard(RECORD)
        await move(source, destination, 3)
        source.pools[0].describe(unknown)
        await heard(unknown)


async def test_coordinator_down_and_up(coordinator: Coordinator) -> None:
    async with joined(coordinator) as (source, destination):
        refs = source.ref, destination.ref
        slow = fresh_id()
        grant = source.grant(source.pools[0], [8, 9], transfer_id=slow, reader="d", ready_blocks=1)
        transfer = destination.pull(destination.pools[0], [8, 9], transfer_id=slow, source="p")
        await coordinator.stop()
        await until(lambda: destination.statistics().is_coordinator_connected is False)
        assert await move(source, destination, 3) is Lane.MAPPED
        grant.ready(2, complete=True)
        assert (await transfer).blocks == 2
        with pytest.raises(CoordinatorUnavailableError, match="'stranger'"):
            await destination.pull(destination.pools[0], [0], transfer_id=fresh_id(), source="stranger")
        with pytest.raises(CoordinatorUnavailableError):
            destination.notify("stranger", b"")
        await coordinator.start()
        await until(lambda: bool(source.statistics().is_coordinator_connected))
        await until(lambda: bool(destination.statistics().is_coordinator_connected))
        assert (source.ref, destination.ref) == refs
        assert await move(source, destination, 4) is Lane.MAPPED
        async with make(coordinator, "late") as late:
            await source.wait_member("late", timeout_s=10)
            assert await move(source, late, 5) is Lane.MAPPED


async def test_a_new_life_is_another_source(coordinator: Coordinator) -> None:
    """What was pulled from a life that left fails with its name; the next life serves under its own."""
    async with make(coordinator, "d") as destination:
        async with make(coordinator, "p") as first:
            old = first.ref
            await destination.wait_member("p", timeout_s=10)
            waiting = destination.pull(destination.pools[0], [0], transfer_id=fresh_id(), source="p")
        with pytest.raises(PeerGoneError):
            await waiting
        with pytest.raises(PeerGoneError, match="joined"):
            await destination.wait_member("p", timeout_s=0.05, incarnation=old.incarnation)
        async with make(coordinator, "p") as second:
            assert second.ref != old
            found = await destination.wait_member("p", timeout_s=10, incarnation=second.ref.incarnation)
            assert found.ref == second.ref
            with pytest.raises(PeerGoneError, match="restarted"):
                await destination.wait_member("p", timeout_s=10, incarnation=old.incarnation)
            await until(lambda: [member.ref for member in destination.members()] == [second.ref])
            await second.wait_member("d", timeout_s=10)
            assert await move(second, destination, 6) is Lane.MAPPED
        assert destination.statistics().is_idle


async def test_who_may_not_join(coordinator: Coordinator) -> None:
    stranger = Agent(info("x"), coordinator=coordinator.target, token=b"0123456789abcdef0123456789abcdef")
    with pytest.raises(AuthenticationError, match="cluster token"):
        await stranger.__aenter__()
    async with make(coordinator, "p"):
        with pytest.raises(RefusedError):
            await make(coordinator, "p").__aenter__()
    nobody = Agent(info("x"), coordinator="127.0.0.1:9", token=coordinator.token, connect_s=0.5)
    with pytest.raises(CoordinatorUnavailableError):
        async with asyncio.timeout(20):
            await nobody.__aenter__()
