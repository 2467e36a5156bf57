"""The agent: one worker process's part of kvxfer, as an asyncio object. Decides the order of starting and stopping, and
what may be called when; must never judge a grant or move a byte (the transport does), nor know requests and engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt
from prometheus_client import CollectorRegistry

from kvxfer.agent.agent_memory import AgentMemory
from kvxfer.agent.counters import AgentCounters
from kvxfer.agent.grant import Grant
from kvxfer.agent.introductions import Introductions
from kvxfer.agent.metrics import AgentMetrics
from kvxfer.agent.notifications import Delivery, Notification, Notifications
from kvxfer.agent.pool import Pool
from kvxfer.agent.pools import Pools
from kvxfer.agent.registration import alone, cluster_token, open_session
from kvxfer.agent.runtime import AgentRuntime
from kvxfer.agent.signs import Signs
from kvxfer.agent.statistics import AgentStatistics
from kvxfer.agent.transfer import Transfer
from kvxfer.config import AgentConfig, check_positive
from kvxfer.errors import ClosedError, ConfigError, InvalidArgumentError, KvxferError
from kvxfer.transport.base import Binding, Blocks, as_blocks, as_content
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
    """An async context manager. It lives on the loop that entered it. :meth:`grant`, :meth:`pull`, :meth:`load`,
    :meth:`card`, :meth:`find_member`, :meth:`is_connected`, :meth:`statistics` and the methods of a Grant may be called
    from any thread, :meth:`wait` from any other, and everything else on that loop.

    With a coordinator it finds its peers by itself. Without one (``coordinator=None``) it knows exactly the peers that
    :meth:`connect_peer` named, and with ``introductions`` those that it met or that dialed it.
    """

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
        """``info`` may be just the agent's id. ``coordinator`` is ``host:port``, ``token`` the cluster's (default: the
        token file's). ``registry`` gets the metrics. ``network``: an in-process network instead of sockets.
        ``connect_s`` bounds the wait to register."""
        if isinstance(info, str):
            info = WorkerInfo(info, Role.BOTH, model="", http_url="")
        check_agent_id(info.agent_id)
        check_positive("connect_s", connect_s)
        self.info = info
        self.config = config or AgentConfig()
        if self.config.introductions and coordinator is not None:
            raise ConfigError("agents are found by the coordinator or by introductions, not by both")
        self.registry = CollectorRegistry() if registry is None else registry
        self._is_guest = registry is not None
        self._coordinator, self._token, self._connect_s = coordinator, token, connect_s
        self._network = network
        self._lanes = self.config.lanes if network is None else (Lane.MEMORY,)
        self._pools = Pools()
        self._load, self._signs = Load(), Signs()
        self._notifications = Notifications()
        self._counters = AgentCounters(info.agent_id, self._notifications)
        self._life: AgentRuntime | None = None
        self._session: CoordinatorSession | None = None
        self._metrics: AgentMetrics | None = None
        self._introductions: Introductions | None = None
        self._failure: KvxferError | None = None
        self._closed: asyncio.Future[None] | None = None
        self._is_entered = self._is_closing = False

    async def __aenter__(self) -> Agent:
        """Listen, register, publish the pools.

        Raises ConfigError, CoordinatorUnavailableError, AuthenticationError, and RefusedError where the agent id is in
        use.
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
            self._life = AgentRuntime(transport, self.config, self._counters, self._notifications, self._on_failure)
            self._signs.open(transport)
            self._pools.open(transport, None if session is None else session.set_pools)
            if self.config.introductions:
                token = cluster_token(self._token)
                self._introductions = Introductions(token, self.info, self._pools, self._life, transport)
            self._life.start()
            if session is not None:
                self._life.peers.coordinator_is(session.is_connected)
                self._life.peers.apply(session.membership)
                session.set_pools(self._pools.published)
        except BaseException:
            if self._life is None:
                transport.close()
            await self.close()
            raise
        log.info("%r", self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- who we are ---

    @property
    def ref(self) -> AgentRef:
        """This life's full name; raises ClosedError before the context was entered."""
        return (self._life or self._open()).transport.ref

    @property
    def address(self) -> DataAddress:
        """Where peers reach this agent."""
        return self._open().transport.address

    def members(self) -> tuple[Member, ...]:
        """The other lives that are known, the newest of a name last."""
        return () if self._life is None else tuple(self._life.peers)

    def find_member(self, agent_id: str) -> Member | None:
        """The newest life of that name, if one is known. From any thread."""
        return self._open().peers.find(agent_id)

    def is_connected(self, agent_id: str) -> bool:
        """Whether a session with the newest life of that name is up. From any thread."""
        return (member := self.find_member(agent_id)) is not None and self._open().transport.is_connected(member.ref)

    async def wait_member(self, agent_id: str, *, timeout_s: float, incarnation: Incarnation | None = None) -> Member:
        """Wait until an agent of that name is known and has a pool. ``incarnation``: that life of it, and no other;
        where a later one is known it is gone. Raises PeerGoneError, CoordinatorUnavailableError."""
        return await self._open().peers.wait(agent_id, timeout_s, with_pools=True, incarnation=incarnation)

    def card(self) -> str:
        """What others need to :meth:`meet` this life with its pools of now, sealed with the cluster token, for anybody
        to carry. Raises InvalidArgumentError where ``introductions`` are off, or there are too many pools."""
        return self._introduced().card()

    def meet(self, card: str, agent_id: str, *, incarnation: Incarnation | None = None) -> Member:
        """Know an agent by its :meth:`card`; it gets to know this one when it is dialed. ``incarnation``: that life of
        it, and no other; nothing is done where that is known already. Raises PeerGoneError, for whatever reason (the
        log has it), InvalidArgumentError where ``introductions`` are off."""
        return self._introduced().meet(card, agent_id, incarnation)

    def load(self, load: Load) -> None:
        """What the next heartbeat says. From any thread."""
        self._load = load
        if self._session is not None:
            self._session.set_load(load)

    @property
    def is_draining(self) -> bool:
        """Whether this life takes no new work, by :meth:`set_draining` or by the coordinator's order."""
        return self._session is not None and self._session.is_draining

    def set_draining(self) -> None:
        """Tell the coordinator that this agent takes no new work; stays so for this life."""
        if self._session is not None:
            self._session.set_draining()

    def connect_peer(self, ref: AgentRef, address: DataAddress, key: bytes, pools: Sequence[PoolRecord] = ()) -> None:
        """Know one life of a peer without a coordinator: where it listens, the 32 bytes that both sides of the pair
        use as their session key, and the pools that may be pulled from. Again: replaces what was known of that life."""
        info = WorkerInfo(ref.agent_id, Role.BOTH, "", "")
        self._open().peers.add(Member(ref, info, address, tuple(pools), session_key=key))

    def disconnect_peer(self, ref: AgentRef) -> None:
        """Say that exactly this life is dead: what it reads or is read from ends."""
        self._open().peers.remove(ref)

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

        Raises InvalidArgumentError (an id used before, a block out of range), BlocksBusyError, LimitExceededError, and
        GrantReleasedError if the reader gave the transfer up before.
        """
        self._check_own(pool)
        return self._open().grants.make(
            pool.pool_id,
            as_blocks(blocks),
            transfer_id=transfer_id,
            reader=reader or "",
            ready_blocks=ready_blocks,
            ttl_s=self.config.grant_ttl_s if ttl_s is None else ttl_s,
            content=as_content(content),
        )

    def expect(self, transfer_id: TransferId, *, reader: str | None = None) -> None:
        """The engine here accepted that prompt for the agent ``reader`` (``None``: whoever comes first): a pull of it
        that comes early is told that it is queued. Ends by :meth:`grant` or :meth:`decline`. From any thread. Raises
        InvalidArgumentError (an id used before), LimitExceededError, GrantReleasedError (the reader gave it up
        before)."""
        self._open().grants.expect(transfer_id, reader or "")

    def pulse(self, *, has_work: bool, took_in: bool = True) -> None:
        """A sign of life of the engine here, which is about to step, or (``has_work=False``) has nothing to do.
        ``took_in``: all is taken in that had reached it at its last such pulse. From any thread, before the start
        too. An agent without such an engine lets pulls that come early wait as long as their readers want."""
        if self._life is not None or self._is_closing:
            self._open()
        self._signs.pulse(has_work, took_in)

    def decline(self, transfer_id: TransferId) -> None:
        """This grant will never be made: its reader need not wait. From any thread. Raises InvalidArgumentError."""
        self._open().grants.decline(transfer_id)

    # --- destination ---

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
        content: bytes | None = None,
        on_granted: Callable[[Transfer], None] | None = None,
        on_ended: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Fill ``blocks`` of ``pool``, in order, from positions ``first...`` of the grant ``transfer_id`` of the agent
        ``source``; the grant may come later, within ``timeout_s``, and ``deadline_s`` counts from when it is there.
        ``content`` is what the blocks are taken to hold; a source that says otherwise refuses. The blocks belong to the
        agent from now until the transfer drained, or :meth:`Transfer.unreserve` gave them back: from then on it is as
        :meth:`ask` made it. ``on_granted(transfer)`` is called when the grant exists.

        A wrong call raises here: InvalidArgumentError, BlocksBusyError, LimitExceededError. What goes wrong with the
        peer is raised by awaiting: IncompatibleError (names the field; not a byte moved), LaneUnavailableError,
        PeerGoneError, CoordinatorUnavailableError, GrantGoneError's kinds, RefusedError, DeadlineExceededError. A
        ``source`` that is not known yet is waited for, at most 2 s; until it is found the blocks are not reserved yet,
        so that BlocksBusyError too may come late. From any thread; on another than the loop's nobody waits for a source
        that is not known. ``on_ended(transfer)`` is called once it drained, on the thread that hears of it first (see
        :meth:`wait`), and must not block."""
        index = as_blocks(blocks)
        what = (transfer_id, source, first, timeout_s, deadline_s, lanes, content)
        return self._open().transfers.pull(self._order(pool, index, len(index), *what), on_ended, on_granted)

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
        content: bytes | None = None,
        on_granted: Callable[[Transfer], None] | None = None,
        on_ended: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """As :meth:`pull` of ``count`` blocks that are not there yet: ``on_granted(transfer)`` is called when the grant
        exists, on the thread that hears of it first (again after a lost session), and :meth:`Transfer.reserve` gives it
        its blocks. Until then it waits, and keeps its grant alive, for ``deadline_s`` at most."""
        what = (transfer_id, source, first, timeout_s, deadline_s, lanes, content)
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
        content: bytes | None,
    ) -> PullOrder:
        self._check_own(pool)
        if source == self.info.agent_id:
            raise InvalidArgumentError("an agent does not pull from itself")
        allowed = self._lanes if lanes is None else tuple(lanes)
        timeout_s = self.config.grant_wait_s if timeout_s is None else timeout_s
        deadline_s = self.config.transfer_deadline_s if deadline_s is None else deadline_s
        what = (transfer_id, source, pool.published, blocks, count, first, allowed, timeout_s, deadline_s)
        return PullOrder(*what, as_content(content), pool.checks)

    def wait(self, timeout_s: float) -> None:
        """Wait for news of any kind, at most so long and 5 ms, on a thread that is not the loop's; calls ``on_ended``
        of transfers that ended. This thread moves bytes meanwhile. Raises
        ClosedError, InvalidArgumentError on the loop, or what broke the agent."""
        self._open().wait(timeout_s)

    def give_up(self, transfer_id: TransferId, source: str) -> None:
        """This id will never be pulled here: its source, if known, need not wait for the grant to expire.

        Raises InvalidArgumentError for a transfer that has begun (cancel that).
        """
        life = self._open()
        member = life.peers.find(source)
        if member is not None:
            life.transport.give_up(transfer_id, member.ref)

    # --- notifications ---

    def notify(self, agent_id: str, payload: bytes) -> Delivery:
        """Send a small message to the newest life of an agent; it arrives once, in order. The Delivery may be awaited.

        Raises PeerGoneError or CoordinatorUnavailableError (not known), InvalidArgumentError (too long),
        LimitExceededError."""
        life = self._open()
        delivery = Delivery(asyncio.get_running_loop(), life.peers.get(agent_id).ref)
        self._notifications.sent(life.transport.notify(delivery.receiver, payload), delivery)
        return delivery

    def notifications(self) -> AsyncIterator[Notification]:
        """What other agents send, until this agent closes."""
        return self._notifications.take()

    def statistics(self) -> AgentStatistics:
        """Counts of this moment; after :meth:`close`, of the last one. From any thread."""
        is_connected = None if self._session is None else self._session.is_connected
        life = self._life
        if life is None or life.is_over:
            return self._counters.statistics(None, (), 0, {}, is_connected)
        now = life.transfers
        return self._counters.statistics(life.transport, now.quarantines, now.searching, now.figures(), is_connected)

    def __repr__(self) -> str:
        if self._life is None or self._life.is_over:
            return f"<Agent {self.info.agent_id} {'closed' if self._is_closing else 'not started'}>"
        return f"<Agent {self.ref}, {len(self._pools)} pools, {len(self.members())} peers>"

    # --- the end ---

    async def close(self) -> None:
        """End: transfers fail with ClosedError, grants are revoked, what is under way drains (at most CLOSE_S), peers
        and coordinator are told. Callable twice; the second call waits for the first."""
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = asyncio.get_running_loop().create_future()
        self._is_closing = True
        self._pools.close()
        error = self._failure or ClosedError("the agent was closed")
        try:
            if self._life is not None:
                await self._life.close(error)
            if self._session is not None:
                await self._session.close()
        finally:
            try:
                if self._life is not None:
                    self._life.shut(error)
            finally:
                self._notifications.close(error)
                if self._metrics is not None and self._is_guest:
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
        )
        return await self._session.start(self._connect_s)

    def _introduced(self) -> Introductions:
        self._open()
        if self._introductions is None:
            raise InvalidArgumentError(f"agent {self.info.agent_id} has introductions turned off")
        return self._introductions

    def _on_membership(self, membership: Membership) -> None:
        if self._life is not None and not self._is_closing:
            self._life.peers.apply(membership)

    def _on_coordinator(self, is_connected: bool) -> None:
        if self._life is not None and not self._is_closing:
            log.info("%s: the coordinator %s", self.info.agent_id, "is heard" if is_connected else "is lost")
            self._life.peers.coordinator_is(is_connected)

    def _open(self) -> AgentRuntime:
        if self._failure is not None:
            raise self._failure
        if self._life is None or self._is_closing:
            raise ClosedError(f"agent {self.info.agent_id} {'was closed' if self._is_closing else 'is not started'}")
        return self._life

    def _on_failure(self, error: KvxferError) -> None:
        log.error("%s: %s", self.info.agent_id, error)
        self._failure = error
