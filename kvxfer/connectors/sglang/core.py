"""The transport core of one SGLang rank: its agent on a thread of its own, its memory as pools, the rooms it sends and
those it receives. Decides which part hears which message; must never know SGLang's classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time

from kvxfer.agent import Agent, AgentStatistics, Delivery
from kvxfer.connectors.common.outbox import Outbox
from kvxfer.connectors.common.runtime import Runtime, every
from kvxfer.connectors.sglang import pools
from kvxfer.connectors.sglang.destination import MEET_S, DestinationCallbacks, DestinationRooms
from kvxfer.connectors.sglang.memory import EngineMemory
from kvxfer.connectors.sglang.messages import (
    Alive,
    AllReceived,
    End,
    Failed,
    Left,
    Message,
    PartGranted,
    SourceMetadata,
    Unknown,
    decode,
    encode,
)
from kvxfer.connectors.sglang.options import Options
from kvxfer.connectors.sglang.pulses import Pulses
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.source import SourceRooms
from kvxfer.connectors.sglang.source_room import SourceCallbacks
from kvxfer.connectors.sglang.watch import PeerLeg, Watch
from kvxfer.errors import ClosedError, ConfigError, InvalidArgumentError, KvxferError, PeerGoneError, ProtocolError
from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.rpc import coordinator_tls, token_beside
from kvxfer.types import CompatibilityRecord, Dialect, Role, WorkerInfo, check_agent_id

log = logging.getLogger("kvxfer.sglang")

SWEEP_S = 0.1
LEAVE_S = 0.5
"""How long a closing core waits until its peers know."""


@dataclasses.dataclass(frozen=True)
class CoreStatistics:
    """Counts as of now, with the agent's."""

    agent: AgentStatistics
    sources_open: int
    """Rooms that this rank sends and that are not over."""
    destinations_open: int


def drawn_agent_id(options: Options, role: Role) -> str:
    """A name for one rank's agent, unlike any other: random letters, after the NAME of the engine's certificate if it
    has one. Raises ConfigError for files that are wrong, or a NAME above 47 letters."""
    drawn = secrets.token_hex(8)
    tls = coordinator_tls(options.coordinator_ca_file, options.coordinator_cert_file, options.coordinator_key_file)
    if tls is None:
        return f"sglang-{role.value}-{drawn}"
    name = tls.newest.identity.name
    try:
        return check_agent_id(f"{name}.{drawn}")
    except InvalidArgumentError:
        raise ConfigError(
            f"{options.coordinator_cert_file}: the name {name} is too long for an engine of SGLang: at most 47 letters"
        ) from None


class TransportCore:
    """The core of one rank. Made before SGLang serves, started once, stopped once."""

    def __init__(
        self,
        options: Options,
        memory: EngineMemory,
        record: CompatibilityRecord,
        *,
        agent_id: str,
        rank: int,
        role: Role,
        source_callbacks: SourceCallbacks | None = None,
        destination_callbacks: DestinationCallbacks | None = None,
    ) -> None:
        """``record`` describes the pages; both sides compare it before a byte moves. ``agent_id``: unique among all
        processes that hold the token. Raises ConfigError, InvalidArgumentError."""
        tokens = record.block_tokens if memory.shape is None else memory.shape.page_tokens
        info = WorkerInfo(agent_id, role, record.model, "", block_tokens=tokens, dialect=Dialect.SGLANG)
        self._options = options
        self._agent = Agent(
            info,
            coordinator=options.coordinator or None,
            token=token_beside(options.coordinator_cert_file, options.token_file),
            config=options.agent_config(),
        )
        self._pools = pools.register(self._agent, memory, _without_facts(record), options.checksum)
        self._runtime = Runtime(self._agent, self._serve)
        self._outbox = Outbox(self._agent, unknown_s=MEET_S)
        self._dropped = RateLimitedWarning(log, "%s said what is no message: %s")
        call_soon = self._runtime.call
        self.pulses = Pulses(self._agent, options.unknown_wait_s)
        """The heartbeats of this rank's engine."""
        self.sources = SourceRooms(
            self._agent,
            self._pools,
            rank,
            source_callbacks or SourceCallbacks(),
            call_soon,
            self._say,
            self.pulses,
            options.timeout_s,
        )
        """The rooms that this rank sends."""
        self.destinations = DestinationRooms(
            self._agent, self._pools, rank, destination_callbacks or DestinationCallbacks(), call_soon, self._say
        )
        """The rooms that this rank receives."""

    @property
    def agent_id(self) -> str:
        """The name of this rank's agent."""
        return self._agent.info.agent_id

    def start(self) -> None:
        """Return once peers can reach it. Raises ConfigError, AuthenticationError, CoordinatorUnavailableError,
        RefusedError."""
        self._runtime.start()
        self.pulses.step(False)
        log.info("%r: %r", self._agent, self._pools)

    def stop(self) -> None:
        """Stop: peers are told, rooms fail with ``closed``. Waits at most STOP_S. May be called twice, and without a
        start."""
        self._runtime.stop()

    def check(self) -> None:
        """Raise ClosedError if the agent has ended by itself."""
        self._runtime.check()

    def export_metadata(self) -> str:
        """What others need for :meth:`add_remote_agent`; empty with a coordinator, which announces all agents. From any
        thread. Raises ClosedError."""
        return "" if self._options.coordinator else self._agent.export_metadata()

    def add_remote_agent(self, metadata: str, agent_id: str) -> None:
        """Know a peer by its signed metadata, before all later calls of this core; does nothing with a coordinator.
        From any thread. Metadata that is not believed is logged, and rooms with that peer fail with ``peer_gone``."""
        if not self._options.coordinator:
            self._runtime.call(self._add_remote_agent, metadata, agent_id)

    def share(self, shape: KvShape | None) -> None:
        """Register in advance what the pages have in common with those of a peer, so that the next metadata lists it.
        From any thread. Raises IncompatibleError naming the field, LimitExceededError for too many different shapes,
        InvalidArgumentError, ClosedError."""
        self._pools.cut(shape)

    def describe(self, record: CompatibilityRecord) -> None:
        """The pages are computed with other or unknown weights from now on. From any thread."""
        self._runtime.call(self._pools.describe, _without_facts(record))

    def come_round(self, *, is_paused: bool) -> None:
        """The engine's loop comes round, in a pause or not. From the loop's thread, at any rate."""
        if is_paused or self.pulses.is_paused:
            self.pulses.come_round(is_paused=is_paused, has_work=len(self.sources) > 0)

    def statistics(self) -> CoreStatistics:
        """From any thread."""
        return CoreStatistics(self._agent.statistics(), len(self.sources), len(self.destinations))

    def __repr__(self) -> str:
        return f"<TransportCore {self._agent!r}, {self.sources!r}, {self.destinations!r}>"

    # --- on the agent's loop ---

    def _add_remote_agent(self, metadata: str, agent_id: str) -> None:
        with contextlib.suppress(KvxferError):  # the agent has logged why
            self._agent.add_remote_agent(metadata, agent_id)

    def _say(self, agent_id: str, message: Message) -> None:
        """From any thread."""
        self._runtime.call(self._outbox.send, agent_id, encode(message))

    async def _serve(self) -> None:
        watch = Watch(self._agent, self._legs, self._leg_gone)
        tasks = [asyncio.ensure_future(watch.run()), asyncio.ensure_future(self._sweep())]
        try:
            async for notification in self._agent.notifications():
                sender = notification.sender.agent_id
                try:
                    self._hear(sender, decode(notification.payload))
                except ProtocolError as error:
                    self._dropped.say(sender, error)
        finally:
            for task in tasks:
                task.cancel()
            farewells = self._leave()
            closed = ClosedError("the engine ends")
            self.sources.close(closed)
            self.destinations.close(closed)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await asyncio.gather(*tasks, *map(_heard, farewells), return_exceptions=True)

    async def _sweep(self) -> None:
        async for _ in every(SWEEP_S):
            self._outbox.flush()
            self.pulses.sweep(time.monotonic())
            self.sources.sweep(time.monotonic())

    def _hear(self, sender: str, message: Message) -> None:
        if isinstance(message, (PartGranted, End)):
            self.destinations.on_message(sender, message)
        elif isinstance(message, AllReceived):
            self.sources.on_message(sender, message)
        elif isinstance(message, Failed):
            self.sources.on_message(sender, message)
            self.destinations.on_message(sender, message)
        elif isinstance(message, Left):
            for leg in self._legs():
                if leg.agent_id == sender:
                    self._leg_gone(leg, PeerGoneError(f"{sender} has left: {message.text}"))
        elif isinstance(message, Unknown):
            if any(leg.agent_id == sender for leg in self.sources.legs()) and not self._options.coordinator:
                with contextlib.suppress(KvxferError):  # too many pools for one; the reader says what it misses
                    self._outbox.send(sender, encode(SourceMetadata(self._agent.export_metadata())))
        elif isinstance(message, SourceMetadata):
            if any(leg.agent_id == sender for leg in self.destinations.legs()):
                self.add_remote_agent(message.agent_metadata, sender)
        else:
            assert isinstance(message, Alive)

    def _legs(self) -> list[PeerLeg]:
        return self.sources.legs() + self.destinations.legs()

    def _leg_gone(self, leg: PeerLeg, error: KvxferError) -> None:
        self.sources.leg_gone(leg, error)
        self.destinations.leg_gone(leg, error)

    def _leave(self) -> list[Delivery]:
        """Tell every peer of an open room."""
        farewells = []
        for agent_id in self.sources.readers() | {leg.agent_id for leg in self.destinations.legs()}:
            with contextlib.suppress(KvxferError):
                farewells.append(self._agent.notify(agent_id, encode(Left("the engine ends"))))
        return farewells


def _without_facts(record: CompatibilityRecord) -> CompatibilityRecord:
    """As pools have it: ranks name a difference when they introduce themselves, and metadata lists many pools."""
    return dataclasses.replace(record, facts="")


async def _heard(delivery: Delivery) -> None:
    with contextlib.suppress(KvxferError):
        await delivery
