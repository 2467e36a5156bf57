"""The parts of an agent between entering and closing: the transport and all that handles its events. Decides which part
gets an event, and in which order the parts end. The transport judges grants and moves bytes; this must never do either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvxfer._native import _core
from kvxfer.agent.counters import AgentCounters
from kvxfer.agent.grants import Grants
from kvxfer.agent.notifications import DeliveryBounds, Notifications
from kvxfer.agent.peers import Peers
from kvxfer.agent.pump import EventPump
from kvxfer.agent.transfers import Transfers
from kvxfer.config import AgentConfig
from kvxfer.errors import InvalidArgumentError, KvxferError
from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.transport.base import Event, Transport, read_ref
from kvxfer.transport.transfers import TRANSFER_EVENTS
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.agent")

CLOSE_S = 2.0
"""How long a closing agent waits for running reads."""


class AgentRuntime:
    """One incarnation of one agent, on the loop that made it."""

    def __init__(
        self,
        transport: Transport,
        config: AgentConfig,
        counters: AgentCounters,
        notifications: Notifications,
        on_failure: Callable[[KvxferError], None],
    ) -> None:
        """``on_failure`` is called once if the transport broke; everything that was open has ended then."""
        self.transport = transport
        self.counters = counters
        self.notifications = notifications
        self.grants = Grants(transport, asyncio.get_running_loop())
        self.peers = Peers(transport)
        notifications.explain = self.peers.explain
        times = (config.reconnect_s, config.transfer_deadline_s)
        notifications.bound(DeliveryBounds(*times, lambda: self.peers.own_end(), transport.is_connected))
        self.transfers = Transfers(transport, config, self.peers, counters, lambda: self.pump.drain())
        self.pump = EventPump(transport, self._on_event, self._fail, self.transfers.tell)
        self.on_session_up: Callable[[AgentRef], None] = lambda _: None
        self._refusals = RateLimitedWarning(log, "%s: a session was refused (%s): %s")
        self._on_failure = on_failure
        self.is_over = False

    def start(self) -> None:
        self.pump.start()

    def progress(self, timeout_s: float) -> None:
        """See :meth:`Agent.progress`."""
        if self.transfers.is_on_loop:
            raise InvalidArgumentError("the agent's loop must not call progress(): await there")
        self.pump.progress(timeout_s, self.transfers.handle)

    async def close(self, error: KvxferError) -> None:
        """Open transfers end with ``error``, grants are revoked, and running reads drain, for at most CLOSE_S."""
        self.peers.close()
        if not self.pump.is_running:
            return
        self.transfers.cancel_all(error)
        self.grants.revoke_all("the agent closes")
        deadline_s = time.monotonic() + CLOSE_S
        while (self.transfers or self.grants) and self.pump.is_running and time.monotonic() < deadline_s:
            await asyncio.sleep(0.001)
            self.pump.drain()

    def shut(self, error: KvxferError) -> None:
        """The part of the end that waits for nothing."""
        self.is_over = True
        self.pump.drain()
        self.pump.stop()
        try:
            self.counters.remember(self.transport)
            self.transport.close()
        finally:
            self.end_all(error)

    def end_all(self, error: KvxferError) -> None:
        """The transport moves nothing any more: end everything that is still open."""
        self.transfers.fail_all(error)
        self.grants.fail_all()
        self.notifications.close(error)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TRANSFER_EVENTS):
            self.transfers.handle(event)
        elif isinstance(event, _core.GrantEnded):
            self.grants.handle(event)
        elif isinstance(event, (_core.NotifReceived, _core.NotifDelivered, _core.NotifFailed)):
            self.notifications.handle(event)
        elif isinstance(event, _core.SessionUp):
            self.on_session_up(read_ref(event.peer))
        elif isinstance(event, _core.OfferEnded):
            self.counters.offer_ended(event)
        elif isinstance(event, _core.SessionRefused):
            self.counters.session_refused()
            self._refusals.say(self.transport.ref, event.code.name, event.text)
        else:
            log.debug("%s: %s", self.transport.ref, type(event).__name__)

    def _fail(self, error: KvxferError) -> None:
        self._on_failure(error)
        self.end_all(error)
