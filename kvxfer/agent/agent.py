"""The agent: one worker process's part of kvxfer, as an asyncio object. Decides the order of starting and stopping, and
whom an event belongs to; must never judge a grant or move a byte (the transport does), nor know requests and engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from prometheus_client import CollectorRegistry

from kvxfer._native import _core
from kvxfer.agent.books import Books
from kvxfer.agent.enrolment import alone, open_session
from kvxfer.agent.grant import Grant
from kvxfer.agent.grants import Grants
from kvxfer.agent.memory import region_of
from kvxfer.agent.metrics import AgentMetrics
from kvxfer.agent.notifications import Delivery, Notification, Notifications
from kvxfer.agent.peers import Peers
from kvxfer.agent.pool import Pool, plan_segments
from kvxfer.agent.pulls import PullOrder, Pulls
from kvxfer.agent.pump import EventPump
from kvxfer.agent.statistics import AgentStatistics
from kvxfer.agent.transfer import Transfer
from kvxfer.config import AgentConfig, check_positive
from kvxfer.errors import Closed, InvalidArgument, KvxferError
from kvxfer.transport.base import Binding, Event, Transport, allocate_region, as_blocks, as_content
from kvxfer.transport.memory import MemoryBinding
from kvxfer.transport.native import NativeBinding
from kvxfer.transport.network import MemoryNetwork
from kvxfer.types import (
    AgentRef,
    CompatibilityRecord,
    DataAddress,
    Exposure,
    Lane,
    Load,
    Member,
    Membership,
    PoolRecord,
    Role,
    Segment,
    TransferId,
    WorkerInfo,
    check_agent_id,
)

if TYPE_CHECKING:
    from kvxfer.rpc import CoordinatorSession

log = logging.getLogger("kvxfer.agent")

CLOSE_S = 2.0
"""How long :meth:`Agent.close` waits for reads that are under way."""


class Agent:
    """An async context manager. It lives on the loop that entered it. :meth:`grant`, :meth:`load`, :meth:`statistics`
    and the methods of a Grant may be called from any thread, everything else on that loop.

    With a coordinator it finds its peers by itself. Without one (``coordinator=None``) it knows exactly the peers that
    :meth:`connect_peer` named: for tests, benchmarks, or a directory of your own.
    """

    def __init__(
        self,
        info: WorkerInfo,
        *,
        coordinator: str | None = None,
        token: bytes | None = None,
        config: AgentConfig | None = None,
        registry: CollectorRegistry | None = None,
        network: MemoryNetwork | None = None,
        connect_s: float = 30.0,
    ) -> None:
        """``coordinator`` is ``host:port``, ``token`` the cluster's (default: the token file's). ``registry`` gets the
        metrics. ``network``: an in-process network instead of sockets. ``connect_s`` bounds the wait to register."""
        check_agent_id(info.agent_id)
        check_positive("connect_s", connect_s)
        self.info = info
        self.config = config or AgentConfig()
        self.registry = CollectorRegistry() if registry is None else registry
        self._is_guest = registry is not None
        self._coordinator = coordinator
        self._token = token
        self._network = network
        self._connect_s = connect_s
        self._lanes = self.config.lanes if network is None else (Lane.MEMORY,)
        self._pools: dict[int, Pool] = {}
        self._next_pool_id = 1
        self._grants: Grants | None = None
        self._load = Load()
        self._notifications = Notifications()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: Transport | None = None
        self._pump: EventPump | None = None
        self._peers: Peers | None = None
        self._pulls: Pulls | None = None
        self._session: CoordinatorSession | None = None
        self._books = Books(info.agent_id, self._notifications)
        self._metrics: AgentMetrics | None = None
        self._failure: KvxferError | None = None
        self._closed: asyncio.Future[None] | None = None
        self._is_closing = False

    async def __aenter__(self) -> Agent:
        """Listen, register, publish the pools.

        Raises ConfigError, CoordinatorUnavailable, AuthenticationFailed, and Refused where the agent id is in use.
        """
        if self._loop is not None or self._is_closing:
            raise Closed("an agent is entered once")
        self._loop = asyncio.get_running_loop()
        binding: Binding = NativeBinding(self.config) if self._network is None else MemoryBinding(self._network)
        try:
            ref = await self._register(binding.address)
            self._transport = binding.open(ref, self.config)
        except BaseException:
            binding.close()
            if self._session is not None:
                await self._session.close()
            raise
        try:
            for pool in self._pools.values():
                self._transport.add_pool(pool.published, pool.region, pool.segments)
            self._grants = Grants(self._transport, self._loop)
            self._peers = Peers(self._transport)
            self._metrics = AgentMetrics(self.registry, self.statistics)
            self._pulls = Pulls(self._transport, self._peers, self._books, self._metrics)
            self._pump = EventPump(self._transport, self._on_event, self._on_failure)
            self._pump.start()
            if self._session is not None:
                self._peers.coordinator_is(self._session.is_connected)
                self._peers.apply(self._session.membership)
                self._session.set_pools(pool.published for pool in self._pools.values())
        except BaseException:
            await self.close()
            raise
        log.info("%r", self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- who we are ---

    @property
    def ref(self) -> AgentRef:
        """This life's full name; raises Closed before the context was entered."""
        return (self._transport or self._open_transport()).ref

    @property
    def address(self) -> DataAddress:
        """Where peers reach this agent."""
        return self._open_transport().address

    @property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(self._pools.values())

    def members(self) -> tuple[Member, ...]:
        """The other lives that are known, the newest of a name last."""
        return () if self._peers is None else tuple(self._peers)

    async def wait_member(self, agent_id: str, *, timeout_s: float) -> Member:
        """Wait until an agent of that name is known and has a pool. Raises PeerGone, CoordinatorUnavailable."""
        return await self._open_peers().wait(agent_id, timeout_s, with_pools=True)

    def load(self, load: Load) -> None:
        """What the next heartbeat says. From any thread."""
        self._load = load
        if self._session is not None:
            self._session.set_load(load)

    def set_draining(self) -> None:
        """Tell the coordinator that this agent takes no new work; stays so for this life."""
        if self._session is not None:
            self._session.set_draining()

    def connect_peer(self, ref: AgentRef, address: DataAddress, key: bytes, pools: Sequence[PoolRecord] = ()) -> None:
        """Know one life of a peer without a coordinator: where it listens, the 32 bytes that both sides of the pair
        use as their session key, and the pools that may be pulled from. Again: replaces what was known of that life.
        """
        info = WorkerInfo(ref.agent_id, Role.BOTH, "", "")
        self._open_peers().add(Member(ref, info, address, tuple(pools), session_key=key))

    def disconnect_peer(self, ref: AgentRef) -> None:
        """Say that exactly this life is dead: what it reads or is read from ends."""
        self._open_peers().remove(ref)

    # --- pools ---

    def allocate_pool(
        self,
        record: CompatibilityRecord,
        *,
        block_count: int,
        block_bytes: int,
        exposure: Exposure = Exposure.POOL,
    ) -> Pool:
        """A pool in memory made by kvxfer, zeroed, block ``b`` at ``b * block_bytes``: readers on this host can map it
        (lane ``mapped``), unless ``exposure`` is GRANT or this agent's own lanes leave ``mapped`` out. Raises
        LimitExceeded where the host has not so much memory.
        """
        if block_count < 1 or block_bytes < 1:
            raise InvalidArgument(f"a pool needs blocks and bytes, not {block_count} blocks of {block_bytes}")
        exposure = exposure if Lane.MAPPED in self.config.lanes else Exposure.GRANT
        region = allocate_region(block_count * block_bytes)
        segments = (Segment(0, block_bytes, block_bytes),)
        return self._add_pool(
            Pool(self._publish(record, block_count, block_bytes, exposure, is_shareable=True), region, segments)
        )

    def register_pool(
        self,
        record: CompatibilityRecord,
        memory: Any,
        *,
        block_count: int,
        segments: Sequence[Segment] | None = None,
        exposure: Exposure = Exposure.GRANT,
    ) -> Pool:
        """A pool in memory that is there already: a contiguous CPU tensor, array, buffer, or ``(address, length)``.
        It is kept alive as long as the pool. Without ``segments``, block ``b`` is the ``b``-th of equal parts.

        Raises InvalidArgument for memory with gaps or segments that do not fit, LaneUnavailable for memory of a GPU.
        """
        region = region_of(memory)
        parts, block_bytes = plan_segments(block_count, region.length_bytes, segments)
        return self._add_pool(
            Pool(self._publish(record, block_count, block_bytes, exposure, is_shareable=False), region, parts)
        )

    def remove_pool(self, pool: Pool) -> None:
        """Take a pool back. Raises BlocksBusy while a block of it is granted, reserved or quarantined."""
        self._check_own(pool)
        if self._transport is not None:
            self._transport.remove_pool(pool.pool_id)
        del self._pools[pool.pool_id]
        self._publish_pools()

    # --- source ---

    def grant(
        self,
        pool: Pool,
        blocks: npt.ArrayLike,
        *,
        transfer_id: TransferId,
        reader: str | None = None,
        ready_blocks: int = 0,
        ttl_s: float | None = None,
        content: bytes | None = None,
    ) -> Grant:
        """Promise ``blocks`` of ``pool`` (uint32, shape [n]) to the agent ``reader`` (``None``: the first that presents
        the transfer id), the first ``ready_blocks`` of them readable at once. ``content`` (32 bytes, a
        digest of the tokens, say): a reader that takes the blocks for something else is refused. From any thread.

        Raises InvalidArgument (an id used before, a block out of range), BlocksBusy, LimitExceeded, and GrantReleased
        if the reader gave the transfer up before.
        """
        self._check_own(pool)
        return self._open_grants().make(
            pool.pool_id,
            as_blocks(blocks),
            transfer_id=transfer_id,
            reader=reader or "",
            ready_blocks=ready_blocks,
            ttl_s=self.config.grant_ttl_s if ttl_s is None else ttl_s,
            content=as_content(content),
        )

    def decline(self, transfer_id: TransferId) -> None:
        """This grant will never be made: its reader need not wait. From any thread. Raises InvalidArgument."""
        self._open_grants().decline(transfer_id)

    # --- destination ---

    def pull(
        self,
        pool: Pool,
        blocks: npt.ArrayLike,
        *,
        transfer_id: TransferId,
        source: str,
        first: int = 0,
        deadline_s: float | None = None,
        lanes: Sequence[Lane] | None = None,
        content: bytes | None = None,
    ) -> Transfer:
        """Fill ``blocks`` of ``pool``, in order, from positions ``first...`` of the grant ``transfer_id`` of the agent
        ``source``; the grant may come later. ``content`` is what the blocks are taken to hold;
        a source that says otherwise refuses. The blocks belong to the agent from now until the transfer drained.

        A wrong call raises here: InvalidArgument, BlocksBusy, LimitExceeded. What goes wrong with the peer is raised by
        awaiting: Incompatible (names the field; not a byte moved), LaneUnavailable, PeerGone, CoordinatorUnavailable,
        GrantGone's kinds, Refused, DeadlineExceeded. A ``source`` that is not known yet is waited for, at most 2 s;
        until it is found the blocks are not reserved yet, so that BlocksBusy too may come late.
        """
        self._check_own(pool)
        self._open_transport()
        index = as_blocks(blocks)
        deadline_s = self.config.transfer_deadline_s if deadline_s is None else deadline_s
        if source == self.info.agent_id:
            raise InvalidArgument("an agent does not pull from itself")
        allowed = self._lanes if lanes is None else tuple(lanes)
        order = PullOrder(transfer_id, source, pool.published, index, first, allowed, deadline_s, as_content(content))
        assert self._pulls is not None
        return self._pulls.start(order)

    def give_up(self, transfer_id: TransferId, source: str) -> None:
        """This id will never be pulled here: its source, if known, need not wait for the grant to expire.

        Raises InvalidArgument for a transfer that has begun (cancel that).
        """
        transport, member = self._open_transport(), self._open_peers().find(source)
        if member is not None:
            transport.give_up(transfer_id, member.ref)

    # --- notifications ---

    def notify(self, agent_id: str, payload: bytes) -> Delivery:
        """Send a small message to the newest life of an agent; it arrives once, in order. The Delivery may be awaited.

        Raises PeerGone or CoordinatorUnavailable (not known), InvalidArgument (too long), LimitExceeded.
        """
        transport, peers = self._open_transport(), self._open_peers()
        member = peers.find(agent_id)
        if member is None:
            raise peers.unknown(agent_id)
        delivery = Delivery(asyncio.get_running_loop(), member.ref)
        self._notifications.sent(transport.notify(member.ref, payload), delivery)
        return delivery

    def notifications(self) -> AsyncIterator[Notification]:
        """What other agents send, until this agent closes."""
        return self._notifications.take()

    def statistics(self) -> AgentStatistics:
        """Counts of this moment; after :meth:`close`, of the last one. From any thread."""
        return self._books.statistics(
            None if self._pump is None else self._transport,
            [] if self._pulls is None else self._pulls.transfers,
            0 if self._pulls is None else self._pulls.searching,
            None if self._session is None else self._session.is_connected,
        )

    def __repr__(self) -> str:
        transport = self._transport
        if transport is None or self._pump is None:
            return f"<Agent {self.info.agent_id} {'closed' if self._is_closing else 'not started'}>"
        return f"<Agent {transport.ref}, {len(self._pools)} pools, {len(self.members())} peers>"

    # --- the end ---

    async def close(self) -> None:
        """End: transfers fail with Closed, grants are revoked, what is under way drains (at most CLOSE_S), peers and
        coordinator are told. Callable twice; the second call waits for the first.
        """
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = asyncio.get_running_loop().create_future()
        self._is_closing = True
        error = self._failure or Closed("the agent was closed")
        try:
            if self._peers is not None:
                self._peers.close()
            await self._wind_down(error)
            if self._session is not None:
                await self._session.close()
        finally:
            self._shut(error)
            self._closed.set_result(None)

    async def _wind_down(self, error: KvxferError) -> None:
        if self._pump is None or not self._pump.is_running or self._pulls is None or self._grants is None:
            return
        self._pulls.cancel_all(error)
        self._grants.revoke_all("the agent closes")
        deadline_s = time.monotonic() + CLOSE_S
        while (self._pulls or self._grants) and self._pump.is_running and time.monotonic() < deadline_s:
            await asyncio.sleep(0.001)
            self._pump.drain()

    def _shut(self, error: KvxferError) -> None:
        """The part of the end that waits for nothing."""
        if self._pump is not None:
            self._pump.drain()
            self._pump.stop()
            self._pump = None
        try:
            if self._transport is not None:
                self._books.remember(self._transport)
                self._transport.close()
        finally:
            self._fail_all(error)
            if self._metrics is not None and self._is_guest:
                self._metrics.close()

    def _fail_all(self, error: KvxferError) -> None:
        """Nothing moves any more: end everything that is still open."""
        if self._pulls is not None:
            self._pulls.fail_all(error)
        if self._grants is not None:
            self._grants.fail_all()
        self._notifications.close(error)

    # --- inside ---

    async def _register(self, address: DataAddress) -> AgentRef:
        if self._coordinator is None:
            return alone(self.info.agent_id)
        self._session = open_session(
            self._coordinator,
            self._token,
            self.info,
            address,
            (pool.published for pool in self._pools.values()),
            self._load,
            on_membership=self._on_membership,
            on_state=self._on_coordinator,
        )
        return await self._session.start(self._connect_s)

    def _on_membership(self, membership: Membership) -> None:
        if self._peers is not None and not self._is_closing:
            self._peers.apply(membership)

    def _on_coordinator(self, is_connected: bool) -> None:
        if self._peers is not None and not self._is_closing:
            log.info("%s: the coordinator %s", self.info.agent_id, "is heard" if is_connected else "is lost")
            self._peers.coordinator_is(is_connected)

    def _publish(
        self, record: CompatibilityRecord, block_count: int, block_bytes: int, exposure: Exposure, *, is_shareable: bool
    ) -> PoolRecord:
        if self._is_closing:
            raise Closed("the agent was closed")
        pool_id, self._next_pool_id = self._next_pool_id, self._next_pool_id + 1
        return PoolRecord(pool_id, record, block_count, block_bytes, exposure, is_shareable)

    def _add_pool(self, pool: Pool) -> Pool:
        if self._transport is not None:
            self._transport.add_pool(pool.published, pool.region, pool.segments)
        self._pools[pool.pool_id] = pool
        self._publish_pools()
        return pool

    def _publish_pools(self) -> None:
        if self._session is not None:
            self._session.set_pools(pool.published for pool in self._pools.values())

    def _check_own(self, pool: Pool) -> None:
        if self._pools.get(pool.pool_id) is not pool:
            raise InvalidArgument(f"{pool!r} is no pool of agent {self.info.agent_id}")

    def _open_transport(self) -> Transport:
        if self._failure is not None:
            raise self._failure
        if self._transport is None or self._is_closing:
            raise Closed(f"agent {self.info.agent_id} {'was closed' if self._is_closing else 'is not started'}")
        return self._transport

    def _open_grants(self) -> Grants:
        self._open_transport()
        assert self._grants is not None
        return self._grants

    def _open_peers(self) -> Peers:
        self._open_transport()
        assert self._peers is not None
        return self._peers

    def _on_event(self, event: Event) -> None:
        if isinstance(event, (_core.TransferProgress, _core.TransferFinal, _core.TransferDrained)):
            if self._pulls is not None:
                self._pulls.handle(event)
        elif isinstance(event, _core.GrantEnded):
            if self._grants is not None:
                self._grants.handle(event)
        elif isinstance(event, (_core.NotifReceived, _core.NotifDelivered, _core.NotifFailed)):
            self._notifications.handle(event)
        elif isinstance(event, _core.SessionRefused):
            self._books.session_refused()
            log.warning("%s: a session was refused (%s): %s", self.info.agent_id, event.code.name, event.text)
        else:
            log.debug("%s: %s", self.info.agent_id, type(event).__name__)

    def _on_failure(self, error: KvxferError) -> None:
        log.error("%s: %s", self.info.agent_id, error)
        self._failure = error
        self._fail_all(error)
