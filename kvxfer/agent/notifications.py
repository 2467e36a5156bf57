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
from kvxfer.errors import ClosedError, DeadlineExceededError, KvxferError, MembershipEndedError, from_code
from kvxfer.patience import TURNS
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
    PeerGoneError if that incarnation ended first, MembershipEndedError if this agent did and has had no session with it
    for ``reconnect_s``, and DeadlineExceededError after ``transfer_deadline_s`` in which this process ran. The receiver
    may have the notification then or not, or get it later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receiver: AgentRef) -> None:
        self.receiver = receiver
        self._tick = 0
        """Of :class:`Notifications`, when it was sent."""
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


@dataclasses.dataclass(frozen=True)
class DeliveryBounds:
    """How long a delivery may take. The transport tries as long as it knows the receiver, and a receiver that does not
    know this agent any more never answers."""

    reconnect_s: float
    deadline_s: float
    own_end: Callable[[], MembershipEndedError | None]
    """That this agent itself is no member any more."""
    is_connected: Callable[[AgentRef], bool]

    @property
    def tick_s(self) -> float:
        return min(self.reconnect_s, self.deadline_s) / TURNS

    def error_of(self, receiver: AgentRef, text: str, ticks: int) -> KvxferError | None:
        """The error of a delivery that is more than TURNS ``ticks`` old; ``None``: it may take longer. An agent that is
        no member any more may still have sessions, with peers that were not told so."""
        own_end, is_over = self.own_end(), (ticks - 1) * self.tick_s >= self.deadline_s
        if own_end is not None and (is_over or not self.is_connected(receiver)):
            return MembershipEndedError(f"{own_end}; {text}")
        return DeadlineExceededError(f"{text} within transfer_deadline_s ({self.deadline_s:g} s)") if is_over else None


class Notifications:
    """Both directions of one agent, on its loop."""

    def __init__(self) -> None:
        self._inbox: collections.deque[Notification] = collections.deque(maxlen=INBOX_MAX)
        self._arrived = asyncio.Event()
        self._deliveries: dict[tuple[AgentRef, int], Delivery] = {}
        """In the order in which they were sent."""
        self._given_up: set[tuple[AgentRef, int]] = set()
        """Those that failed here, while the transport still tries; its own bounds are the bound of this."""
        self._bounds: DeliveryBounds | None = None
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.explain: Callable[[KvxferError], KvxferError] = lambda error: error
        """What the sender of a notification is told in place of the transport's error."""
        self._sent = self._delivered = self._failed = self._received = self._dropped = 0

    def bound(self, bounds: DeliveryBounds) -> None:
        """From now on no delivery takes longer than ``bounds`` says."""
        self._bounds = bounds

    def sent(self, sequence: int, delivery: Delivery) -> None:
        self._sent += 1
        delivery._tick = self._ticks
        self._deliveries[delivery.receiver, sequence] = delivery
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._bounds is not None and self._deliveries:
            self._timer = asyncio.get_running_loop().call_later(self._bounds.tick_s, self._tick)

    def _tick(self) -> None:
        """Fail the deliveries that are over a bound. Ticks are counted, and not seconds: a process that was stopped
        has confirmations to read before it may say that they did not come."""
        self._timer, bounds = None, self._bounds
        self._ticks += 1
        for (receiver, sequence), delivery in list(self._deliveries.items()):
            if bounds is None or self._ticks - delivery._tick <= TURNS:
                break  # all others were sent later
            text = f"notification {sequence} to {receiver} was not confirmed"
            error = bounds.error_of(receiver, text, self._ticks - delivery._tick)
            if error is not None:
                del self._deliveries[receiver, sequence]
                self._given_up.add((receiver, sequence))
                self._failed += 1
                delivery._settle(error)
        self._arm()

    def handle(self, event: _core.NotifReceived | _core.NotifDelivered | _core.NotifFailed) -> None:
        if isinstance(event, _core.NotifReceived):
            self._received += 1
            if len(self._inbox) == INBOX_MAX:
                self._dropped += 1
                log.warning("no task takes notifications: one beyond INBOX_MAX=%d was dropped", INBOX_MAX)
            self._inbox.append(Notification(read_ref(event.sender), event.seq, event.payload))
            self._arrived.set()
            return
        sent = (read_ref(event.receiver), event.seq)
        if sent in self._given_up:
            self._given_up.remove(sent)
            return
        delivery = self._deliveries.pop(sent, None)
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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._bounds = None
        deliveries, self._deliveries = self._deliveries, {}
        self._failed += len(deliveries)
        for delivery in deliveries.values():
            delivery._settle(error or ClosedError("the agent was closed"))

    def statistics(self) -> NotificationStatistics:
        return NotificationStatistics(
            self._sent, self._delivered, self._failed, self._received, self._dropped, len(self._deliveries)
        )
