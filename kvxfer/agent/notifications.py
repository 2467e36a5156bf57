"""Small messages between agents beside the transfers: received ones, and the outcome of those sent. Decides nothing;
must never keep more than its bound."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from kvxfer._native import _core
from kvxfer.errors import ClosedError, KvxferError, from_code
from kvxfer.transport.base import read_ref
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.agent")

INBOX_MAX = 65536
"""Received notifications that the application has not taken; the oldest go first, counted as dropped."""


@dataclasses.dataclass(frozen=True)
class Notification:
    """``sequence`` counts from 1 for each pair of incarnations; a receiver gets each number once, in order."""

    sender: AgentRef
    sequence: int
    payload: bytes


@dataclasses.dataclass(frozen=True)
class NotificationStatistics:
    sent: int
    delivered: int
    failed: int
    received: int
    dropped: int
    pending: int


class Delivery:
    """What :meth:`Agent.notify` returns. Awaiting it waits until the receiver's agent has the notification. Raises
    PeerGoneError if that incarnation ended first, and MembershipEndedError if this agent did; it may have received the
    notification or not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receiver: AgentRef) -> None:
        self.receiver = receiver
        self._future: asyncio.Future[None] = loop.create_future()

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._future).__await__()

    def _settle(self, error: KvxferError | None) -> None:
        if self._future.done():
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
            self._future.exception()


class Notifications:
    """Both directions of one agent, on its loop."""

    def __init__(self) -> None:
        self._inbox: collections.deque[Notification] = collections.deque(maxlen=INBOX_MAX)
        self._arrived = asyncio.Event()
        self._deliveries: dict[tuple[AgentRef, int], Delivery] = {}
        self._is_closed = False
        self.explain: Callable[[KvxferError], KvxferError] = lambda error: error
        """What the sender of a notification is told in place of the transport's error."""
        self._sent = self._delivered = self._failed = self._received = self._dropped = 0

    def sent(self, sequence: int, delivery: Delivery) -> None:
        self._sent += 1
        self._deliveries[delivery.receiver, sequence] = delivery

    def handle(self, event: _core.NotifReceived | _core.NotifDelivered | _core.NotifFailed) -> None:
        if isinstance(event, _core.NotifReceived):
            self._received += 1
            if len(self._inbox) == INBOX_MAX:
                self._dropped += 1
                log.warning("no task takes notifications: one beyond INBOX_MAX=%d was dropped", INBOX_MAX)
            self._inbox.append(Notification(read_ref(event.sender), event.seq, event.payload))
            self._arrived.set()
            return
        delivery = self._deliveries.pop((read_ref(event.receiver), event.seq), None)
        error = None
        if isinstance(event, _core.NotifFailed):
            self._failed += 1
            text = f"notification {event.seq} to {read_ref(event.receiver)} was not confirmed"
            error = self.explain(from_code(event.code.name, text))
        else:
            self._delivered += 1
        if delivery is not None:
            delivery._settle(error)

    async def take(self) -> AsyncIterator[Notification]:
        """Received notifications, until the agent closes. Two tasks that call this share them: each notification goes
        to one."""
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            if self._is_closed:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def close(self, error: KvxferError | None = None) -> None:
        self._is_closed = True
        self._arrived.set()
        deliveries, self._deliveries = self._deliveries, {}
        self._failed += len(deliveries)
        for delivery in deliveries.values():
            delivery._settle(error or ClosedError("the agent was closed"))

    def statistics(self) -> NotificationStatistics:
        return NotificationStatistics(
            self._sent, self._delivered, self._failed, self._received, self._dropped, len(self._deliveries)
        )
