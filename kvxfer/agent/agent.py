"""The agent: one worker process's part of kvxfer, as an asyncio object. Decides the order of starting and stopping, and
which calls are allowed when. The transport judges grants and moves bytes; the agent must never do either, nor know
requests or engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt
from prometheus_client import CollectorRegistry

from kvxfer.agent.agent_memory import AgentMemory
from kvxfer.agent.arguments import check_count, judged
from kvxfer.agent.counters import AgentCounters
from kvxfer.agent.discovery import Discovery
from kvxfer.agent.grant import Grant
from kvxfer.agent.metrics import AgentMetrics
from kvxfer.agent.notifications import Delivery, Notification, Notifications
from kvxfer.agent.pool import Pool
from kvxfer.agent.pools import AgentPools
from kvxfer.agent.pulse import EnginePulse
from kvxfer.agent.registration import alone, cluster_token, open_session
from kvxfer.agent.runtime import AgentRuntime
from kvxfer.agent.statistics import AgentStatistics
from kvxfer.agent.transfer import Transfer
from kvxfer.config import AgentConfig, check_positive
from kvxfer.errors import ClosedError, ConfigError, InvalidArgumentError, KvxferError
from kvxfer.transport.base import Binding, Blocks, as_blocks, as_content_digest
from kvxfer.transport.memory import MemoryBinding
from kvxfer.transport.native import NativeBinding
from kvxfer.transport.network import MemoryNetwork
from kvxfer.transport.pull import PullOrder
from kvxfer.types import (
    AgentRef,
    DataAddress,
    Incarnation,
    Lane,
    Load,
    Member,
    Membership,
    PoolRecord,
    Role,
    TransferId,
    WorkerInfo,
    check_agent_id,
)

if TYPE_CHECKING:
    from kvxfer.rpc import CoordinatorSession

log = logging.getLogger("kvxfer.agent")


class Agent(AgentMemory):
    """An async context manager, bound to the loop that entered it. Any thread may call :meth:`grant`, :meth:`pull`,
    :meth:`ask`, :meth:`explain`, :meth:`report_load`, :meth:`export_metadata`, :meth:`find_member`,
    :meth:`is_connected`, :meth:`statistics` and the methods of a Grant. Any thread but the loop's may call
    :meth:`progress`. Everything else belongs to the loop.

    With a coordinator an agent finds its peers by itself. Without one (``coordinator=None``) it knows exactly the peers
    that :meth:`connect_peer` named and, with ``discovery``, those that :meth:`add_remote_agent` added or that dialed
    it.
    """

    @judged
    def __init__(
        self,
        info: WorkerInfo | str,
        *,
        coordinator: str | None = None,
        token: bytes | None = None,
        config: AgentConfig | None = None,
        registry: CollectorRegistry | None = None,
        network: MemoryNetwork | None = None,
        connect_s: float = 30.0,
    ) -> None:
        """``info`` may be just the agent's id. ``coordinator`` is ``host:port``, or several with commas. ``token`` is
        the cluster token (default: the token file's). Metrics go to ``registry``. ``network`` replaces sockets by
        an in-process network. ``connect_s`` bounds the time to register.
        """
        if isinstance(info, str):
            info = WorkerInfo(info, Role.BOTH, model="", http_url="")
        check_agent_id(info.agent_id)
        check_positive("connect_s", connect_s)
        self.info = info
        self.config = config or AgentConfig()
        if self.config.discovery and coordinator is not None:
            raise ConfigError("the coordinator finds peers already: discovery is for agents without one")
        self.registry = CollectorRegistry() if registry is None else registry
        self._shares_registry = registry is not None
        self._coordinator, self._token, self._connect_s = coordinator, token, connect_s
        self._network = network
        self._lanes = self.config.lanes if network is None else (Lane.MEMORY,)
        self._pools = AgentPools()
        self._load, self._pulse = Load(), EnginePulse()
        self._notifications = Notifications()
        self._counters = AgentCounters(info.agent_id, self._notifications)
        self._runtime: AgentRuntime | None = None
        self._session: CoordinatorSession | None = None
        self._metrics: AgentMetrics | None = None
        self._discovery: Discovery | None = None
        self._failure: KvxferError | None = None
        self._closed: asyncio.Future[None] | None = None
        self._is_entered = self._is_closing = False

    async def __aenter__(self) -> Agent:
        """Listen, register with the coordinator, publish the pools.

        Raises ConfigError, CoordinatorUnavailableError, AuthenticationError, ForbiddenError, and RefusedError if the
        agent id is in use.
        """
        if self._is_entered or self._is_closing:
            raise ClosedError("an agent is entered once")
        self._is_entered = True
        binding: Binding = NativeBinding(self.config) if self._network is None else MemoryBinding(self._network)
        try:
            ref = await self._register(binding.address)
            transport = binding.open(ref, self.config)
        except BaseException:
            binding.close()
            if self._session is not None:
                await self._session.close()
            raise
        session = self._session
        try:
            self._metrics = self._counters.metrics = AgentMetrics(self.registry, self.statistics)
            self._runtime = AgentRuntime(transport, self.config, self._counters, self._notifications, self._on_failure)
            self._pulse.open(transport)
            self._pools.open(transport, None if session is None else session.set_pools)
            if self.config.discovery:
                token = cluster_token(self._token)
                self._discovery = Discovery(token, self.info, self._pools, self._runtime, transport)
            self._runtime.start()
            if session is not None:
                self._runtime.peers.ask = session.ask
                self._runtime.peers.own_end = lambda: session.own_end
                self._runtime.peers.coordinator_is(session.is_connected)
                self._runtime.peers.apply(session.membership)
                session.set_pools(self._pools.published)
        except BaseException:
            if self._runtime is None:
                transport.close()
            await self.close()
            raise
        log.info("%r", self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- identity and peers ---

    @property
    def ref(self) -> AgentRef:
        """The full name of this incarnation; raises ClosedError before the context was entered."""
        return (self._runtime or self._open()).transport.ref

    @property
    def address(self) -> DataAddress:
        """Where peers reach this agent."""
        return self._open().transport.address

    def members(self) -> tuple[Member, ...]:
        """The known incarnations of other agents, for each name the newest last."""
        return () if self._runtime is None else tuple(self._runtime.peers)

    @judged
    def find_member(self, agent_id: str) -> Member | None:
        """The newest incarnation of that name, if one is known; if not, the coordinator is asked for it, for the next
        time. From any thread."""
        return self._open().peers.look_for(agent_id)

    @judged
    def is_connected(self, agent_id: str) -> bool:
        """Whether a session with the newest incarnation of that name is up. From any thread."""
        return (member := self.find_member(agent_id)) is not None and self._open().transport.is_connected(member.ref)

    @judged
    def explain(self, error: KvxferError) -> KvxferError:
        """``error``, of a peer that seems gone; or MembershipEndedError where this agent itself is no member any more,
        which looks the same. From any thread."""
        return error if self._runtime is None else self._runtime.peers.explain(error)

    @judged
    async def wait_member(self, agent_id: str, *, timeout_s: float, incarnation: Incarnation | None = None) -> Member:
        """Wait until an agent of that name is known and has a pool. With ``incarnation`` only that incarnation counts,
        and a newer one means that it is gone. Raises PeerGoneError, CoordinatorUnavailableError."""
        return await self._open().peers.wait(agent_id, timeout_s, with_pools=True, incarnation=incarnation)

    def export_metadata(self) -> str:
        """What others need for :meth:`add_remote_agent`: this incarnation and its pools of now, signed with the cluster
        token. Any channel may carry the text. Raises InvalidArgumentError if ``discovery`` is off, or there are too
        many pools."""
        return self._discovered().export_metadata()

    @judged
    def add_remote_agent(self, metadata: str, agent_id: str, *, incarnation: Incarnation | None = None) -> Member:
        """Know an agent by what its :meth:`export_metadata` returned; that agent learns of this one when it is dialed.
        ``incarnation``: only that incarnation of it; nothing is done if it is known already. Raises PeerGoneError
        (only the log says why), InvalidArgumentError if ``discovery`` is off."""
        return self._discovered().add_remote_agent(metadata, agent_id, incarnation)

    @judged
    def report_load(self, load: Load) -> None:
        """Set the load that the next heartbeat reports. From any thread."""
        self._load = load
        if self._session is not None:
            self._session.set_load(load)

    @property
    def is_draining(self) -> bool:
        """Whether this incarnation refuses new work, after :meth:`set_draining` or by the coordinator's order."""
        return self._session is not None and self._session.is_draining

    def set_draining(self) -> None:
        """Tell the coordinator that this agent takes no new work, until this incarnation ends."""
        if self._session is not None:
            self._session.set_draining()

    @property
    def leg_keys(self) -> tuple[bytes, ...]:
        """As :attr:`kvxfer.rpc.CoordinatorSession.leg_keys`; none without a coordinator."""
        return () if self._session is None else self._session.leg_keys

    @judged
    def connect_peer(self, ref: AgentRef, address: DataAddress, key: bytes, pools: Sequence[PoolRecord] = ()) -> None:
        """Add one incarnation of a peer without a coordinator: where it listens, the 32-byte session key that both
        sides of the pair use, and the pools that may be pulled from. A second call replaces what the first said of that
        incarnation."""
        info = WorkerInfo(ref.agent_id, Role.BOTH, "", "")
        self._on_loop("connect_peer").peers.add(Member(ref, info, address, tuple(pools), session_key=key))

    @judged
    def disconnect_peer(self, ref: AgentRef) -> None:
        """Report that exactly this incarnation is dead. Its reads from us and our reads from it end."""
        self._on_loop("disconnect_peer").peers.remove(ref)

    # --- source ---

    @judged
    def grant(
        self,
        pool: Pool,
        blocks: npt.ArrayLike,
        *,
        transfer_id: TransferId,
        reader: str | None = None,
        ready_blocks: int = 0,
        ttl_s: float | None = None,
        content_digest: bytes | None = None,
    ) -> Grant:
        """Promise ``blocks`` of ``pool`` (uint32, shape [n]) to the agent ``reader`` (``None``: the first that presents
        the transfer id). The first ``ready_blocks`` of them are readable at once. ``content_digest`` (32 bytes, for
        instance a digest of the tokens): a reader with another digest is refused. From any thread.

        Raises InvalidArgumentError (an id that was used before, a block out of range), BlocksBusyError,
        LimitExceededError, and GrantReleasedError if the reader aborted the transfer before.
        """
        self._check_own(pool)
        check_count("ready_blocks", ready_blocks)
        return self._open().grants.make(
            pool.pool_id,
            as_blocks(blocks),
            transfer_id=transfer_id,
            reader=check_agent_id(reader) if reader else "",
            ready_blocks=int(ready_blocks),
            ttl_s=self.config.grant_ttl_s if ttl_s is None else ttl_s,
            content_digest=as_content_digest(content_digest),
        )

    @judged
    def expect(self, transfer_id: TransferId, *, reader: str | None = None) -> None:
        """Report that the engine here accepted that prompt for the agent ``reader`` (``None``: the first that pulls
        it). A pull that comes before the grant is answered "queued". Ends by :meth:`grant` or :meth:`abort_grant`. From
        any thread. Raises InvalidArgumentError (an id that was used before), LimitExceededError, GrantReleasedError
        (the reader aborted it before)."""
        self._open().grants.expect(transfer_id, check_agent_id(reader) if reader else "")

    @judged
    def pulse(self, *, has_work: bool, took_in: bool = True) -> None:
        """A heartbeat of the engine here, which is about to step or, with ``has_work=False``, is idle. ``took_in``: the
        engine has read everything that had reached its queue at the last such heartbeat. From any thread, also before
        the agent starts. Without an engine that sends heartbeats, early pulls wait as long as their readers want."""
        if self._runtime is not None or self._is_closing:
            self._open()
        self._pulse.pulse(has_work, took_in)

    @judged
    def abort_grant(self, transfer_id: TransferId) -> None:
        """Report that this grant will never be made, so that its reader stops waiting. From any thread. Raises
        InvalidArgumentError."""
        self._open().grants.abort(transfer_id)

    # --- destination ---

    @judged
    def pull(
        self,
        pool: Pool,
        blocks: npt.ArrayLike,
        *,
        transfer_id: TransferId,
        source: str,
        first: int = 0,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        lanes: Sequence[Lane] | None = None,
        content_digest: bytes | None = None,
        on_granted: Callable[[Transfer], None] | None = None,
        on_ended: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Fill ``blocks`` of ``pool``, in order, from the positions ``first...`` of the grant ``transfer_id`` of the
        agent ``source``. The grant may be made later, within ``timeout_s``; ``deadline_s`` counts from when it exists.
        ``content_digest`` is of what the blocks are expected to hold; a source whose grant has another one refuses. The
        blocks belong to the agent until the transfer has drained, or until :meth:`Transfer.unreserve` gave them back;
        then the transfer continues as if :meth:`ask` had made it.

        A wrong call raises here: InvalidArgumentError, BlocksBusyError, LimitExceededError. Awaiting the transfer
        raises what went wrong with the peer: IncompatibleError (names the field; not a byte moved),
        LaneUnavailableError, PeerGoneError, MembershipEndedError (this agent's own), CoordinatorUnavailableError,
        GrantGoneError's kinds, RefusedError, DeadlineExceededError.

        An unknown ``source`` is waited for, at most 2 s, and only if the loop's thread calls. Until it is found the
        blocks are not reserved, so BlocksBusyError may come late. ``on_granted(transfer)`` is called when the grant
        exists, ``on_ended(transfer)`` once the transfer has drained. Both run on the first thread that handles the
        event (see :meth:`progress`), and must not block.
        """
        index = as_blocks(blocks)
        what = (transfer_id, source, first, timeout_s, deadline_s, lanes, content_digest)
        return self._open().transfers.pull(self._order(pool, index, len(index), *what), on_ended, on_granted)

    @judged
    def ask(
        self,
        pool: Pool,
        count: int,
        *,
        transfer_id: TransferId,
        source: str,
        first: int = 0,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        lanes: Sequence[Lane] | None = None,
        content_digest: bytes | None = None,
        on_granted: Callable[[Transfer], None] | None = None,
        on_ended: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """As :meth:`pull` of ``count`` blocks that are not chosen yet. ``on_granted(transfer)`` is called when the
        grant exists (and again after a lost session), and :meth:`Transfer.reserve` then names the blocks. Until then
        the transfer waits and keeps its grant alive, for at most ``deadline_s``."""
        what = (transfer_id, source, first, timeout_s, deadline_s, lanes, content_digest)
        return self._open().transfers.pull(self._order(pool, None, count, *what), on_ended, on_granted)

    def _order(
        self,
        pool: Pool,
        blocks: Blocks | None,
        count: int,
        transfer_id: TransferId,
        source: str,
        first: int,
        timeout_s: float | None,
        deadline_s: float | None,
        lanes: Sequence[Lane] | None,
        content_digest: bytes | None,
    ) -> PullOrder:
        self._check_own(pool)
        if source == self.info.agent_id:
            raise InvalidArgumentError("an agent does not pull from itself")
        allowed = self._lanes if lanes is None else tuple(lanes)
        timeout_s = self.config.grant_wait_s if timeout_s is None else timeout_s
        deadline_s = self.config.transfer_deadline_s if deadline_s is None else deadline_s
        what = (transfer_id, source, pool.published, blocks, count, first, allowed, timeout_s, deadline_s)
        return PullOrder(*what, as_content_digest(content_digest), pool.checksum)

    @judged
    def progress(self, timeout_s: float) -> None:
        """Wait for events, at most ``timeout_s`` and 5 ms, on a thread that is not the loop's, and call ``on_ended`` of
        transfers that ended. This thread also moves bytes meanwhile. Raises ClosedError, InvalidArgumentError on the
        loop's thread, or the error that broke the agent."""
        self._open().progress(timeout_s)

    @judged
    def abort_pull(self, transfer_id: TransferId, source: str) -> None:
        """Report that this id will never be pulled here, so that its source, if known, need not wait for the grant to
        expire.

        Raises InvalidArgumentError for a transfer that has begun: cancel that.
        """
        runtime = self._open()
        member = runtime.peers.find(source)
        if member is not None:
            runtime.transport.abort_pull(transfer_id, member.ref)

    # --- notifications ---

    @judged
    def notify(self, agent_id: str, payload: bytes) -> Delivery:
        """Send a small message to the newest incarnation of an agent. It arrives once, in order. The Delivery may be
        awaited.

        Raises PeerGoneError or CoordinatorUnavailableError (the agent is not known), InvalidArgumentError (too long),
        LimitExceededError.
        """
        runtime = self._on_loop("notify")
        delivery = Delivery(asyncio.get_running_loop(), runtime.peers.get(agent_id).ref)
        self._notifications.sent(runtime.transport.notify(delivery.receiver, payload), delivery)
        return delivery

    def notifications(self) -> AsyncIterator[Notification]:
        """What other agents send, until this agent closes."""
        return self._notifications.take()

    def statistics(self) -> AgentStatistics:
        """Counts as of now; after :meth:`close`, as of the end. From any thread."""
        is_connected = None if self._session is None else self._session.is_connected
        runtime = self._runtime
        if runtime is None or runtime.is_over:
            return self._counters.statistics(None, (), 0, {}, is_connected)
        now = runtime.transfers
        return self._counters.statistics(runtime.transport, now.quarantines, now.searching, now.figures(), is_connected)

    def __repr__(self) -> str:
        if self._runtime is None or self._runtime.is_over:
            return f"<Agent {self.info.agent_id} {'closed' if self._is_closing else 'not started'}>"
        return f"<Agent {self.ref}, {len(self._pools)} pools, {len(self.members())} peers>"

    # --- the end ---

    async def close(self) -> None:
        """Close the agent. Transfers fail with ClosedError, grants are revoked, running reads drain (for at most
        CLOSE_S), and peers and coordinator are told. A second call waits for the first."""
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = asyncio.get_running_loop().create_future()
        self._is_closing = True
        self._pools.close()
        error = self._failure or ClosedError("the agent was closed")
        try:
            if self._runtime is not None:
                await self._runtime.close(error)
            if self._session is not None:
                await self._session.close()
        finally:
            try:
                if self._runtime is not None:
                    self._runtime.shut(error)
            finally:
                self._notifications.close(error)
                if self._metrics is not None and self._shares_registry:
                    self._metrics.close()
            self._closed.set_result(None)

    # --- inside ---

    async def _register(self, address: DataAddress) -> AgentRef:
        if self._coordinator is None:
            return alone(self.info.agent_id)
        self._session = open_session(
            self._coordinator,
            self._token,
            self.info,
            address,
            self._pools.published,
            self._load,
            on_membership=self._on_membership,
            on_state=self._on_coordinator,
            config=self.config,
        )
        return await self._session.start(self._connect_s)

    def _discovered(self) -> Discovery:
        self._open()
        if self._discovery is None:
            raise InvalidArgumentError(f"agent {self.info.agent_id} has discovery turned off")
        return self._discovery

    def _on_membership(self, membership: Membership) -> None:
        if self._runtime is not None and not self._is_closing:
            self._runtime.peers.apply(membership)

    def _on_coordinator(self, is_connected: bool) -> None:
        if self._runtime is not None and not self._is_closing:
            log.info("%s: the coordinator %s", self.info.agent_id, "is connected" if is_connected else "is lost")
            self._runtime.peers.coordinator_is(is_connected)

    def _open(self) -> AgentRuntime:
        if self._failure is not None:
            raise self._failure
        if self._runtime is None or self._is_closing:
            raise ClosedError(f"agent {self.info.agent_id} {'was closed' if self._is_closing else 'is not started'}")
        return self._runtime

    def _on_failure(self, error: KvxferError) -> None:
        log.error("%s: %s", self.info.agent_id, error)
        self._failure = error
