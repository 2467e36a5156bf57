"""The agent API without a coordinator, on sockets and in a memory network."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvxfer import Agent, AgentConfig, GrantState, Lane, TransferState
from kvxfer.agent import Transfer
from kvxfer.errors import (
    BlocksBusyError,
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    GrantExpiredError,
    GrantRevokedError,
    IncompatibleError,
    InvalidArgumentError,
    LaneUnavailableError,
    PeerGoneError,
    TransferCancelledError,
    TransportError,
)
from kvxfer.types import EncryptMode, Exposure
from tests.support.agents import BLOCK_BYTES, RECORD, fresh_id, info, introduce, until

Pair = tuple[Agent, Agent]


def fill(agent: Agent) -> np.ndarray:
    array = agent.pools[0].array
    array[:] = np.random.default_rng(1).integers(0, 256, array.shape, dtype=np.uint8)
    return array


async def test_a_pull_moves_the_bytes_and_says_how(source: Agent, destination: Agent) -> None:
    data, into = fill(source), destination.pools[0].array
    transfer_id = fresh_id()
    grant = source.grant(source.pools[0], [5, 3, 1], transfer_id=transfer_id, reader="destination", ready_blocks=2)
    transfer = destination.pull(destination.pools[0], [0, 1, 2], transfer_id=transfer_id, source="source")
    await until(lambda: transfer.progress().blocks_done == 2)
    progress = transfer.progress()
    assert (progress.blocks_total, progress.bytes_done, progress.state) == (3, 2 * BLOCK_BYTES, TransferState.READING)
    assert destination.statistics().pools[0].reserved == 3
    assert source.statistics().pools[0].granted == 3
    grant.ready(3, layers=2, complete=True)
    result = await transfer
    assert (into[:3] == data[[5, 3, 1]]).all()
    assert result.lane in (Lane.MAPPED, Lane.MEMORY)
    assert result.lane_reason.startswith(result.lane.value)
    assert (result.blocks, result.bytes, result.bytes_before_complete) == (3, 3 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert set(result.seconds) == {"queue", "plan", "wire", "confirm"}
    assert result.attempts == 1
    assert result.source == source.ref
    assert await transfer == result
    await transfer.wait_drained()
    assert await grant.wait_ended() is GrantState.RELEASED
    assert grant.revoke() is GrantState.RELEASED
    assert source.statistics().is_idle
    assert destination.statistics().is_idle


async def test_lanes_can_be_named(source: Agent, destination: Agent) -> None:
    if source.address.tcp_port == 0:
        with pytest.raises(LaneUnavailableError, match="not served here"):
            await destination.pull(
                destination.pools[0], [0], transfer_id=fresh_id(), source="source", lanes=[Lane.STREAM]
            )
        return
    data, transfer_id = fill(source), fresh_id()
    source.grant(source.pools[0], [7], transfer_id=transfer_id, ready_blocks=1)
    result = await destination.pull(
        destination.pools[0], [0], transfer_id=transfer_id, source="source", lanes=[Lane.MEMORY, Lane.STREAM]
    )
    assert result.lane is Lane.STREAM
    assert result.lane_reason == (
        "stream: the source is reached over TCP (not memory: the two agents do not share an in-process network)"
    )
    assert (destination.pools[0].array[0] == data[7]).all()


async def test_why_a_lane_was_passed_over(source: Agent, destination: Agent) -> None:
    """The lane that is likely faster goes first, and the other says so."""
    if source.address.tcp_port == 0:
        return
    transfer_id = fresh_id()
    source.grant(source.pools[0], [7], transfer_id=transfer_id, ready_blocks=1)
    result = await destination.pull(
        destination.pools[0], [0], transfer_id=transfer_id, source="source", lanes=[Lane.STREAM, Lane.UNIX]
    )
    assert result.lane_reason == (
        "unix: same host, sent over its Unix socket "
        "(not stream: possible, expected at 60 us where unix is expected at 45 us)"
    )


async def test_failures_have_names(source: Agent, destination: Agent) -> None:
    pool, into = source.pools[0], destination.pools[0]
    revoked, expired, waiting = fresh_id(), fresh_id(), fresh_id()
    grant = source.grant(pool, [1], transfer_id=revoked)
    transfer = destination.pull(into, [1], transfer_id=revoked, source="source")
    await until(lambda: transfer.progress().state is TransferState.READING)
    assert grant.revoke("the test wants it") is GrantState.REVOKED
    with pytest.raises(GrantRevokedError):
        await transfer
    with pytest.raises(GrantRevokedError):
        grant.ready(1)
    short = source.grant(pool, [1], transfer_id=expired, ttl_s=0.05)
    await asyncio.sleep(0.06)
    assert short.state is GrantState.EXPIRED
    with pytest.raises(GrantExpiredError):
        await destination.pull(into, [2], transfer_id=expired, source="source")
    with pytest.raises(DeadlineExceededError):
        await destination.pull(into, [2], transfer_id=waiting, source="source", timeout_s=0.05)
    with pytest.raises(PeerGoneError, match="'absent'"):
        await destination.pull(into, [2], transfer_id=fresh_id(), source="absent")
    outcomes = destination.statistics().as_dict()["outcomes"]
    lane = "memory" if source.address.tcp_port == 0 else "mapped"
    assert outcomes == {lane: {"grant_revoked": 1, "grant_expired": 1, "deadline": 1}, "none": {"peer_gone": 1}}
    assert destination.statistics().is_idle


async def test_wrong_calls_raise_where_they_are_made(source: Agent, destination: Agent) -> None:
    pool, into = source.pools[0], destination.pools[0]
    transfer_id = fresh_id()
    source.grant(pool, [1], transfer_id=transfer_id)
    with pytest.raises(InvalidArgumentError, match="used before"):
        source.grant(pool, [2], transfer_id=transfer_id)
    with pytest.raises(InvalidArgumentError, match="outside"):
        source.grant(pool, [32], transfer_id=fresh_id())
    with pytest.raises(InvalidArgumentError, match="not a pool of agent"):
        source.grant(into, [1], transfer_id=fresh_id())
    for blocks in ([], [[1]], [-1], [0.5]):
        with pytest.raises(InvalidArgumentError):
            destination.pull(into, blocks, transfer_id=fresh_id(), source="source")
    with pytest.raises(InvalidArgumentError, match="itself"):
        destination.pull(into, [1], transfer_id=fresh_id(), source="destination")
    async with destination.pull(into, [1], transfer_id=fresh_id(), source="source"):
        with pytest.raises(BlocksBusyError, match="reserved"):
            destination.pull(into, [1], transfer_id=fresh_id(), source="source")
        with pytest.raises(BlocksBusyError):
            destination.remove_pool(into)
    destination.remove_pool(into)
    assert destination.pools == ()


async def test_incompatible_pools_are_refused_by_field_before_a_byte(source: Agent, destination: Agent) -> None:
    other = destination.allocate_pool(
        dataclasses.replace(RECORD, rope="yarn", tp_size=2), block_count=4, block_bytes=BLOCK_BYTES
    )
    transfer_id = fresh_id()
    grant = source.grant(source.pools[0], [0], transfer_id=transfer_id, reader="destination")
    with pytest.raises(IncompatibleError, match="rope is 'yarn' here and 'none' there") as caught:
        await destination.pull(other, [0], transfer_id=transfer_id, source="source")
    assert caught.value.field == "rope"
    async with asyncio.timeout(10):  # the source need not keep its blocks for a reader that will not come
        assert await grant.wait_ended() is GrantState.RELEASED


async def test_cancelling_a_waiter_leaves_the_transfer(source: Agent, destination: Agent) -> None:
    transfer_id = fresh_id()
    transfer = destination.pull(destination.pools[0], [1], transfer_id=transfer_id, source="source")

    async def wait() -> None:
        await transfer

    waiter = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not transfer.is_final
    source.grant(source.pools[0], [1], transfer_id=transfer_id, ready_blocks=1)
    assert (await transfer).blocks == 1


async def test_a_scope_cancels_and_drains(source: Agent, destination: Agent) -> None:
    into = destination.pools[0]
    into.array[:] = 0xEE
    transfer_id = fresh_id()
    grant = source.grant(source.pools[0], [1, 2], transfer_id=transfer_id)
    async with destination.pull(into, [1, 2], transfer_id=transfer_id, source="source") as transfer:
        await until(lambda: transfer.progress().state is TransferState.READING)
    assert transfer.is_final
    assert transfer.is_drained
    with pytest.raises(TransferCancelledError):
        await transfer
    assert await grant.wait_ended() is GrantState.RELEASED
    assert (into.array == 0xEE).all()
    assert destination.statistics().is_idle


async def test_the_end_of_a_grant_is_told_once_on_the_loop(source: Agent, destination: Agent) -> None:
    loop_thread, seen = threading.get_ident(), []
    transfer_id = fresh_id()

    def work() -> None:
        grant = source.grant(source.pools[0], [1, 2], transfer_id=transfer_id, reader="destination")
        grant.on_ended(lambda state: seen.append(("early", state, threading.get_ident())))
        for blocks in (1, 2):
            grant.ready(blocks, complete=blocks == 2)
        source.report_load(dataclasses.replace(source._load, queued_requests=3))
        grants.append(grant)

    grants: list = []
    thread = threading.Thread(target=work)
    thread.start()
    await destination.pull(destination.pools[0], [1, 2], transfer_id=transfer_id, source="source")
    await asyncio.to_thread(thread.join)
    assert await grants[0].wait_ended() is GrantState.RELEASED
    grants[0].on_ended(lambda state: seen.append(("late", state, threading.get_ident())))
    await until(lambda: len(seen) == 2)
    await asyncio.sleep(0.02)
    assert seen == [(when, GrantState.RELEASED, loop_thread) for when in ("early", "late")]


async def test_notifications(source: Agent, destination: Agent) -> None:
    deliveries = [source.notify("destination", b"%d" % number) for number in range(5)]
    received = []
    async for notification in destination.notifications():
        received.append((notification.sender, notification.sequence, notification.payload))
        if len(received) == 5:
            break
    assert received == [(source.ref, number + 1, b"%d" % number) for number in range(5)]
    for delivery in deliveries:
        await delivery
    with pytest.raises(PeerGoneError):
        source.notify("absent", b"")
    with pytest.raises(InvalidArgumentError, match="notification_bytes_max"):
        source.notify("destination", bytes(1 << 20))
    await destination.close()
    lost = source.notify("destination", b"lost")
    source.disconnect_peer(destination.ref)
    with pytest.raises(PeerGoneError):
        await lost
    statistics = source.statistics().notifications
    assert (statistics.sent, statistics.delivered, statistics.failed) == (6, 5, 1)


async def test_close_ends_everything_and_can_be_repeated(source: Agent, destination: Agent) -> None:
    granted, pulled = fresh_id(), fresh_id()
    grant = source.grant(source.pools[0], [1], transfer_id=granted)
    transfers = [
        destination.pull(destination.pools[0], [1], transfer_id=granted, source="source"),
        destination.pull(destination.pools[0], [2], transfer_id=pulled, source="source"),
    ]
    inbox = asyncio.create_task(anext(destination.notifications(), None))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        await asyncio.gather(destination.close(), destination.close())
        await destination.close()
        for transfer in transfers:
            with pytest.raises(ClosedError):
                await transfer
            await transfer.wait_drained()
        assert await inbox is None
        await source.close()
        assert await grant.wait_ended() in (GrantState.REVOKED, GrantState.RELEASED)
    assert destination.statistics().is_idle
    assert "closed" in repr(destination)
    with pytest.raises(ClosedError):
        destination.pull(destination.pools[0], [1], transfer_id=fresh_id(), source="source")
    with pytest.raises(ClosedError):
        source.grant(source.pools[0], [1], transfer_id=fresh_id())
    with pytest.raises(ClosedError):
        await destination.__aenter__()


async def test_statistics_and_metrics_agree(source: Agent, destination: Agent) -> None:
    transfer_id = fresh_id()
    grant = source.grant(source.pools[0], range(8), transfer_id=transfer_id, ready_blocks=8)
    result = await destination.pull(destination.pools[0], range(8), transfer_id=transfer_id, source="source")
    await grant.wait_ended()
    values = destination.statistics().as_dict()
    assert json.loads(json.dumps(values)) == values
    lane = result.lane.value
    assert values["bytes"] == {lane: 8 * BLOCK_BYTES}
    assert source.statistics().grants.by_state()[GrantState.RELEASED] == 1
    text = generate_latest(destination.registry).decode()
    assert f'kvxfer_transfers_total{{lane="{lane}",outcome="committed"}} 1.0' in text
    assert f'kvxfer_transfer_bytes_total{{lane="{lane}"}} {float(8 * BLOCK_BYTES)}' in text
    for phase in ("queue", "plan", "wire", "confirm"):
        assert f'kvxfer_transfer_duration_seconds_count{{phase="{phase}"}} 1.0' in text
    assert 'kvxfer_pool_blocks_in_use{pool="1",state="reserved"} 0.0' in text
    assert 'kvxfer_grants_ended_total{state="released"} 1.0' in generate_latest(source.registry).decode()
    assert "kvxfer_sessions" in text
    assert "kvxfer_notifications_total" in text


@pytest.mark.parametrize("mode", [EncryptMode.ALWAYS, EncryptMode.NEVER])
async def test_metrics_say_which_sessions_are_encrypted(mode: EncryptMode) -> None:
    config = AgentConfig(lanes=(Lane.STREAM,), encrypt=mode)
    async with Agent(info("source"), config=config) as source, Agent(info("destination"), config=config) as destination:
        for agent in (source, destination):
            agent.allocate_pool(RECORD, block_count=4, block_bytes=BLOCK_BYTES)
        introduce(source, destination)
        transfer_id = fresh_id()
        source.grant(source.pools[0], [1], transfer_id=transfer_id, ready_blocks=1)
        result = await destination.pull(destination.pools[0], [2], transfer_id=transfer_id, source="source")
        assert result.lane is Lane.STREAM
        told = {"yes": 0.0, "no": 0.0} | {"yes" if mode is EncryptMode.ALWAYS else "no": 1.0}
        for agent in (source, destination):
            lines = generate_latest(agent.registry).decode().splitlines()
            for encrypted, count in told.items():
                assert f'kvxfer_sessions_tcp{{encrypted="{encrypted}"}} {count}' in lines
            assert "kvxfer_tls_failures_total 0.0" in lines
            assert "kvxfer_checksum_failures_total 0.0" in lines


async def test_a_given_registry_can_be_used_again() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        async with Agent(info("a"), registry=registry):
            assert "kvxfer_grants" in generate_latest(registry).decode()
    assert generate_latest(registry) == b""


async def test_a_broken_core_fails_everything_loudly(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, destination = pair
    transfer = destination.pull(destination.pools[0], [1], transfer_id=fresh_id(), source="source")
    grant = destination.grant(destination.pools[0], [2], transfer_id=fresh_id())
    assert destination._runtime is not None

    class Broken:
        def drain(self) -> list[object]:
            raise RuntimeError("seeded")

    monkeypatch.setattr(destination._runtime.pump, "_transport", Broken())
    destination._runtime.pump.drain()
    with pytest.raises(TransportError, match="seeded"):
        await transfer
    await transfer.wait_drained()
    assert await grant.wait_ended() is GrantState.REVOKED
    with pytest.raises(TransportError, match="seeded"):
        destination.pull(destination.pools[0], [1], transfer_id=fresh_id(), source="source")


async def test_a_native_core_that_breaks_ends_everything_that_is_awaited(breaker: Any) -> None:
    config = AgentConfig(lanes=(Lane.MAPPED, Lane.UNIX))  # UCX has an epoll of its own, and does not survive its loss
    async with Agent(info("source"), config=config) as source:
        source.allocate_pool(RECORD, block_count=4, block_bytes=BLOCK_BYTES)
        break_loop = breaker()
        async with Agent(info("breaks"), config=config) as agent, asyncio.timeout(10):
            pool = agent.allocate_pool(RECORD, block_count=4, block_bytes=BLOCK_BYTES)
            introduce(source, agent)
            transfer = agent.pull(pool, [1], transfer_id=fresh_id(), source="source")
            grant = agent.grant(pool, [2], transfer_id=fresh_id())
            inbox = asyncio.create_task(anext(agent.notifications(), None))
            await agent.notify("source", b"a session is up")
            break_loop()
            source.notify("breaks", b"what wakes the loop")
            with pytest.raises(TransportError, match="the native core failed"):
                await transfer
            await transfer.wait_drained()
            assert await grant.wait_ended() is GrantState.REVOKED
            await inbox
            with pytest.raises(TransportError, match="the native core failed"):
                await agent.notify("source", b"")


async def test_a_registered_pool_is_sent() -> None:
    async with Agent(info("source")) as source, Agent(info("destination")) as destination:
        memory = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
        pool = source.register_pool(RECORD, memory, block_count=4, exposure=Exposure.GRANT)
        into = destination.register_pool(RECORD, bytearray(4 * 64), block_count=4, exposure=Exposure.GRANT)
        introduce(source, destination)
        transfer_id = fresh_id()
        source.grant(pool, [2], transfer_id=transfer_id, ready_blocks=1)
        transfer = destination.pull(into, [3], transfer_id=transfer_id, source="source")
        assert isinstance(transfer, Transfer)
        result = await transfer
        assert result.lane is Lane.UNIX
        assert "exposed by grant only" in result.lane_reason
        with pytest.raises(InvalidArgumentError, match="caller's"):
            _ = pool.array


async def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="not loopback"):
        await Agent(info("a"), config=AgentConfig(bind_host="0.0.0.0", encrypt=EncryptMode.NEVER)).__aenter__()
    with pytest.raises(ConfigError, match="advertise_host"):
        await Agent(info("a"), config=AgentConfig(bind_host="0.0.0.0", insecure=True)).__aenter__()
    async with Agent(info("a")) as agent:
        config = AgentConfig(bind_port=agent.address.tcp_port)
        with pytest.raises(ConfigError, match=f"port {agent.address.tcp_port}"):
            await Agent(info("b"), config=config).__aenter__()
    with pytest.raises(ClosedError, match="not started"):
        _ = Agent(info("c")).ref


@pytest.mark.parametrize(
    "wrong", [{"deadline_s": math.inf}, {"deadline_s": 1e12}, {"deadline_s": math.nan}, {"first": 1 << 33}]
)
async def test_a_pull_with_impossible_numbers_leaves_nothing_behind(
    source: Agent, destination: Agent, wrong: dict[str, Any]
) -> None:
    transfer_id = fresh_id()
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        destination.pull(destination.pools[0], [0], transfer_id=transfer_id, source="source", **wrong)
    with pytest.raises(InvalidArgumentError, match="ttl_s"):
        source.grant(source.pools[0], [0], transfer_id=transfer_id, ttl_s=math.inf)
    source.grant(source.pools[0], [0], transfer_id=transfer_id, reader="destination", ready_blocks=1)
    await destination.pull(destination.pools[0], [0], transfer_id=transfer_id, source="source")


async def test_a_search_that_was_cancelled_does_not_take_its_successor_along(pair: Pair) -> None:
    destination = pair[1]
    assert destination._runtime is not None
    destination._runtime.peers.coordinator_is(True)  # the coordinator may still announce it
    transfer_id, pool = fresh_id(), destination.pools[0]
    first = destination.pull(pool, [0], transfer_id=transfer_id, source="absent")
    await asyncio.sleep(0)
    first.cancel()
    second = destination.pull(pool, [0], transfer_id=transfer_id, source="absent")
    await asyncio.sleep(0.01)
    assert destination.statistics().transfers_live == 1
    second.cancel()
    with pytest.raises(TransferCancelledError):
        await asyncio.wait_for(second, 10.0)
    await second.wait_drained()


async def test_another_thread_pulls_and_waits_itself(source: Agent, destination: Agent) -> None:
    data, into = fill(source), destination.pools[0].array
    transfer_id, heard = fresh_id(), []
    source.grant(source.pools[0], [5, 3], transfer_id=transfer_id, reader="destination", ready_blocks=2)
    inbox = destination.notifications()

    def pull() -> Transfer:
        pool, ended = destination.pools[0], []
        transfer = destination.pull(pool, [0, 1], transfer_id=transfer_id, source="source", on_ended=ended.append)
        while not ended:
            destination.progress(0.05)
        heard.append((ended, transfer.is_drained, transfer.result().bytes, bool((into[:2] == data[[5, 3]]).all())))
        return transfer

    source.notify("destination", b"this is the loop's")
    transfer = await asyncio.to_thread(pull)
    assert heard == [([transfer], True, 2 * BLOCK_BYTES, True)]
    assert (await transfer).bytes == 2 * BLOCK_BYTES
    await transfer.wait_drained()
    assert (await asyncio.wait_for(anext(inbox), 5.0)).payload == b"this is the loop's"
    assert destination.statistics().outcomes[transfer.lane.value] == {"committed": 1}
    await until(lambda: source.statistics().is_idle and destination.statistics().is_idle)


async def test_pull_of_an_unknown_source_on_another_thread_raises_a_named_error(pair: Pair) -> None:
    _, destination = pair
    pool = destination.pools[0]

    def pull(source: str) -> Transfer:
        return destination.pull(pool, [0], transfer_id=fresh_id(), source=source, timeout_s=1.5)

    ghost = await asyncio.to_thread(pull, "ghost")
    with pytest.raises(PeerGoneError, match="ghost"):
        ghost.result()
    with pytest.raises(PeerGoneError, match="ghost"):
        await ghost
    assert ghost.is_drained
    ungranted = await asyncio.to_thread(pull, "source")
    with pytest.raises(InvalidArgumentError, match="not over"):
        ungranted.result()
    with pytest.raises(DeadlineExceededError):
        await ungranted
    await ungranted.wait_drained()
    await until(lambda: destination.statistics().is_idle)


async def test_a_callback_that_raises_keeps_nothing_from_the_others(source: Agent, destination: Agent) -> None:
    loop, caught = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: caught.append(type(context["exception"])))

    def pull() -> Transfer:
        transfer_id, pool = fresh_id(), destination.pools[0]
        source.grant(source.pools[0], [1], transfer_id=transfer_id, reader="destination", ready_blocks=1)
        transfer = destination.pull(pool, [0], transfer_id=transfer_id, source="source", on_ended=lambda _: 1 // 0)
        while not transfer.is_drained:
            destination.progress(0.05)
        return transfer

    transfer = await asyncio.to_thread(pull)
    assert (await transfer).blocks == 1
    await transfer.wait_drained()
    await until(lambda: caught == [ZeroDivisionError])
