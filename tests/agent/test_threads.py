"""What another thread may meet while it pulls and waits: the loop at work, the agent's end, callbacks that raise."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer import Agent
from kvxfer.agent import Transfer
from kvxfer.errors import ClosedError, InvalidArgumentError, PeerGoneError, TransportError
from kvxfer.transport import transfers
from tests.support.agents import fresh_id, until

Pair = tuple[Agent, Agent]


def granted(pair: Pair, ready_blocks: int = 1) -> dict[str, Any]:
    """A grant of 3 blocks; what a pull of them needs."""
    source, _ = pair
    transfer_id = fresh_id()
    source.grant(source.pools[0], [1, 2, 3], transfer_id=transfer_id, reader="destination", ready_blocks=ready_blocks)
    return {"transfer_id": transfer_id, "source": "source"}


async def test_a_transfer_is_told_to_be_drained_after_on_ended(pair: Pair) -> None:
    _, destination = pair
    alive, told = destination._runtime.transfers, []

    def ended(transfer: Transfer) -> None:
        alive.tell()  # the loop may come to it while another thread is here
        told.append(transfer._drained.done())

    transfer = destination.pull(destination.pools[0], [0, 1, 2], **granted(pair, 3), on_ended=ended)
    await transfer.wait_drained()
    assert told == [False]
    assert (await transfer).blocks == 3


async def test_on_ended_that_raises_does_not_hide_the_drain(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, destination = pair
    caught: list[type[Exception]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(type(context["exception"])))
    transfer = destination.pull(destination.pools[0], [0, 1, 2], **granted(pair), on_ended=lambda _: 1 // 0)
    monkeypatch.setattr(transfers, "TRANSFER_EVENTS", SimpleNamespace)
    destination._runtime.transfers.handle(SimpleNamespace(id=transfer.transfer_id.raw))  # its drain, alone
    monkeypatch.undo()
    destination._runtime.transfers.tell()
    await asyncio.wait_for(transfer.wait_drained(), 5.0)
    await until(lambda: bool(caught))  # the loop tells of it later, or earlier, by the version of Python
    assert caught == [ZeroDivisionError]


@pytest.mark.parametrize("error", [ClosedError, TransportError])
async def test_the_end_of_the_agent_may_come_before_the_pull_began(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    _, destination = pair
    runtime, ended = destination._runtime, []

    def shut(*_: Any, **options: Any) -> None:
        runtime.transfers.fail_all(ClosedError("the agent was closed"))
        raise error("the transport is gone")

    monkeypatch.setattr(runtime.transport, "pull", shut)
    arguments = granted(pair)
    with pytest.raises(ClosedError, match="the transport is gone" if error is ClosedError else "the agent was closed"):
        await destination.pull(destination.pools[0], [0, 1, 2], **arguments, on_ended=ended.append)
    assert len(ended) == 1
    assert sum(sum(outcomes.values()) for outcomes in destination.statistics().outcomes.values()) == 1


async def test_progress_with_no_timeout_does_not_block(pair: Pair) -> None:
    _, destination = pair
    looking = threading.Thread(target=destination.progress, args=[0.0])
    with destination._runtime.pump._lock:  # the loop is at its events
        looking.start()
        looking.join(5.0)
        assert not looking.is_alive()


async def test_a_source_without_a_pool_is_not_waited_for_off_the_loop_and_keeps_its_grant(
    pair: Pair,
) -> None:
    source, destination = pair
    arguments = granted(pair, 3)
    destination.connect_peer(source.ref, source.address, bytes(32), [])
    transfer = await asyncio.to_thread(destination.pull, destination.pools[0], [0, 1, 2], **arguments)
    with pytest.raises(PeerGoneError, match="has no pool yet"):
        await transfer
    assert source.statistics().grants.alive == 1


async def test_the_loop_may_not_wait_in_place(pair: Pair) -> None:
    with pytest.raises(InvalidArgumentError, match="await there"):
        pair[1].progress(0.0)


async def test_event_that_a_thread_could_not_handle_reaches_the_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump, handled = pair[1]._runtime.pump, []
    monkeypatch.setattr(pump, "_on_event", handled.append)
    events = ["first", "second", "third"]
    monkeypatch.setattr(pump, "_transport", SimpleNamespace(wait=lambda _: True, drain=lambda: events))

    def take(event: str) -> bool:
        if event == "second":
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        pump.progress(0.01, take)
    await asyncio.sleep(0)
    assert handled == ["first", "third"]


async def test_event_during_an_interrupted_progress_reaches_the_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump, handled = pair[1]._runtime.pump, []

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pump, "_on_event", handled.append)
    monkeypatch.setattr(pump, "_transport", SimpleNamespace(wait=interrupted, drain=lambda: ["first"]))
    with pytest.raises(KeyboardInterrupt):
        pump.progress(0.01, lambda _: True)
    assert handled == []
    pump.drain()
    assert handled == ["first"]


async def test_wait_of_a_broken_transport_ends_the_agent_on_its_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump, failures = pair[1]._runtime.pump, []

    def broken(_: float) -> bool:
        raise ValueError("no such descriptor")

    monkeypatch.setattr(pump, "_on_failure", failures.append)
    monkeypatch.setattr(pump, "_transport", SimpleNamespace(wait=broken))
    await asyncio.to_thread(pump.progress, 0.01, lambda _: True)
    await asyncio.sleep(0)
    assert [str(failure) for failure in failures] == ["the native core broke: ValueError('no such descriptor')"]
    assert not pump.is_running


@pytest.mark.parametrize("pair", ["sockets"], indirect=True)  # a memory network moves with its loop
async def test_progress_of_what_another_thread_pulls_does_not_wake_the_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, destination = pair
    pool, woken = destination.pools[0], []
    await destination.pull(pool, [0, 1, 2], **granted(pair, 3))  # the session is up
    arguments = granted(pair)

    def pull() -> None:
        transfer = destination.pull(pool, [4, 5, 6], **arguments)
        while not transfer.progress().blocks_done:
            destination.progress(0.01)

    pulling = threading.Thread(target=pull, daemon=True)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", lambda *call: woken.append(call))
        pulling.start()
        pulling.join(5.0)  # the loop stands still meanwhile
    assert not pulling.is_alive()
    assert woken == []
