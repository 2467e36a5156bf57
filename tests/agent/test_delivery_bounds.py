"""A delivery to a peer that cannot be reached, and whose end nobody tells, ends too."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time

import pytest

from kvxfer import Agent, AgentConfig, AgentRef, Lane
from kvxfer.errors import ClosedError, DeadlineExceededError
from kvxfer.types import Incarnation
from tests.support.agents import info, until

KEY = bytes(range(32))
DEADLINE_S = 0.2
CONFIG = AgentConfig(lanes=(Lane.STREAM,), stall_s=0.05, reconnect_s=0.5, transfer_deadline_s=DEADLINE_S)


def absent(sender: Agent) -> AgentRef:
    """A peer that ``sender`` knows, at a port where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    ref = AgentRef("absent", Incarnation(1, bytes(16)))
    sender.connect_peer(ref, dataclasses.replace(sender.address, tcp_port=port, unix_path=""), KEY)
    return ref


async def test_deliveries_to_a_peer_that_is_never_reached_end_and_count_once() -> None:
    async with Agent(info("sender"), config=CONFIG) as sender:
        ref, began_s = absent(sender), time.monotonic()
        deliveries = [sender.notify("absent", b"%d" % number) for number in range(3)]
        async with asyncio.timeout(10):
            for number, delivery in enumerate(deliveries, 1):
                said = rf"notification {number} to absent.* was not confirmed within transfer_deadline_s \(0.2 s\)"
                with pytest.raises(DeadlineExceededError, match=said):
                    await delivery
        assert time.monotonic() - began_s >= DEADLINE_S * 0.99
        later = sender.notify("absent", b"later")
        sender.disconnect_peer(ref)  # now the transport gives all four up
        await until(lambda: sender.statistics().notifications.pending == 0)
        assert later._future.done()
        counted = sender.statistics().notifications
        assert (counted.sent, counted.delivered, counted.failed) == (4, 0, 4)
        assert not sender._notifications._given_up


async def test_a_process_that_stood_still_reads_confirmations_first() -> None:
    async with Agent(info("sender"), config=CONFIG) as sender:
        absent(sender)
        delivery = sender.notify("absent", b"x")
        time.sleep(2 * DEADLINE_S)  # noqa: ASYNC251  stands for a process that gets no processor
        for _ in range(5):
            await asyncio.sleep(0)
        assert not delivery._future.done()


async def test_a_closed_agent_leaves_no_timer() -> None:
    async with Agent(info("sender"), config=CONFIG) as sender:
        absent(sender)
        delivery = sender.notify("absent", b"x")
    with pytest.raises(ClosedError):
        await delivery
    assert sender._notifications._timer is None
