"""The transfers of one agent, on its loop: pulls, reads and writes. Finds the peer of each transfer, starts it, counts
how it ended, and settles what the caller awaits. Decides which incarnation of a peer a name means, and which of its
pools; must never decide whether a transfer may commit."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from kvxfer.agent.counters import AgentCounters
from kvxfer.agent.peers import Peers
from kvxfer.agent.statistics import Quarantine
from kvxfer.agent.transfer import AgentPost, Awaited, Transfer
from kvxfer.config import AgentConfig
from kvxfer.errors import IncompatibleError, InvalidArgumentError, KvxferError, PeerGoneError, UsageError
from kvxfer.policy.calibration import LaneFigure
from kvxfer.protocol.handshake import check, compare
from kvxfer.transport.base import Event, Transport
from kvxfer.transport.batch import TransferBatch
from kvxfer.transport.descriptors import Prepared, RemotePeer
from kvxfer.transport.engine import Op, TransferEngine
from kvxfer.transport.pull import Outcome, Pull, PullOrder
from kvxfer.types import Lane, Member, PoolRecord, RegionRecord

log = logging.getLogger("kvxfer.agent")

MEMBERSHIP_WAIT_S = 2.0
"""How long a pull waits for its source to become known."""


class Transfers:
    """Belongs to the agent's loop. Any thread may call :meth:`pull`, and one thread at a time :meth:`handle`.
    :meth:`handle` determines the outcome of a transfer and calls its ``on_ended``; tasks that await the transfer
    continue after :meth:`tell`."""

    def __init__(
        self,
        transport: Transport,
        config: AgentConfig,
        peers: Peers,
        counters: AgentCounters,
        drain: Callable[[], None],
    ) -> None:
        """``drain`` reads the transport's events, and gives each to :meth:`handle`."""
        self.engine = TransferEngine(transport, config=config, drain=drain)
        self._transport = transport
        self._table = self.engine.transfers
        self._table.explain = peers.explain
        self._lanes = self.engine.lanes
        self._peers = peers
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._untold: collections.deque[tuple[Awaited[Any], Any]] = collections.deque()
        """What :meth:`tell` has still to settle: transfers, each with its outcome, or with ``None``: it has drained."""
        self._searches: dict[Pull, asyncio.Task[None]] = {}
        """Of pulls whose source is not known yet."""
        self._remotes: dict[str, RemotePeer] = {}

    def __len__(self) -> int:
        """Transfers that have not drained."""
        return len(self._table.handles)

    @property
    def is_on_loop(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.get_ident() == self._thread

    @property
    def searching(self) -> int:
        """Pulls whose source is not known yet."""
        return len(self._searches)

    @property
    def quarantines(self) -> tuple[Quarantine, ...]:
        """Pulls that are over and whose blocks are not back yet."""
        pulls = (handle for handle in self._table.handles if isinstance(handle, Pull) and handle.is_final)
        return tuple(
            Quarantine(
                str(pull.transfer_id),
                pull.progress().blocks_total,
                f"a read was under way when the transfer ended as {pull.progress().state.name.lower()}",
            )
            for pull in pulls
        )

    def figures(self) -> Mapping[str, Mapping[Lane, LaneFigure]]:
        """By peer, what each lane reached."""
        return self._lanes.figures()

    # --- pulls ---

    def pull(
        self,
        order: PullOrder,
        on_ended: Callable[[Transfer], None] | None = None,
        on_granted: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Start now or, on the loop, as soon as the source is known. ``on_granted`` is called when the grant exists and
        the transfer has no blocks, ``on_ended`` once it has drained; both on the thread that handles the event. Raises
        UsageError; other errors end the transfer."""
        transfer = Transfer(self._loop, self._tell_soon)
        transfer._pull = pull = Pull(
            self._table,
            self._lanes,
            order,
            on_granted=None if on_granted is None else lambda: self._call_back("on_granted", on_granted, transfer),
            on_final=lambda outcome: self._ended(transfer, outcome),
            on_drained=lambda: self._drained(transfer, on_ended),
        )
        pull.enter()
        member = self._peers.find(order.source)
        if member is None or not member.pools:
            if self.is_on_loop:
                self._searches[pull] = self._loop.create_task(self._search(pull))
            else:
                no_pool = PeerGoneError(f"agent {order.source!r} has no pool yet")
                self._end(pull, no_pool if member else self._peers.unknown(order.source))
            return transfer
        try:
            self._begin(pull, member)
        except UsageError:
            pull.withdraw()
            raise
        except KvxferError as error:
            self._end(pull, error)
        return transfer

    async def _search(self, pull: Pull) -> None:
        try:
            wait_s = min(MEMBERSHIP_WAIT_S, pull.order.timeout_s)
            member = await self._peers.wait(pull.order.source, wait_s, with_pools=True)
            if not pull.is_final:
                self._begin(pull, member)
        except KvxferError as error:
            self._end(pull, error)
        finally:
            self._searches.pop(pull, None)

    def _begin(self, pull: Pull, member: Member) -> None:
        order = pull.order
        try:
            theirs = choose_pool(order.pool, member)
            choice = self._lanes.possible(member.ref, member.address, [order.pool], [theirs], order.lanes)
        except KvxferError:
            self._transport.abort_pull(order.transfer_id, member.ref)
            raise
        pull.begin(member, choice)

    def _end(self, pull: Pull, error: KvxferError) -> None:
        pull.end(error)
        self._tell_soon()

    # --- reads and writes of registered memory ---

    def prepare(self, descriptors: Any, peer: str | None, records: Sequence[RegionRecord] | None) -> Prepared:
        """See :meth:`Agent.prepare`."""
        if peer is None:
            if records is not None:
                raise InvalidArgumentError("records belong to a peer: name the peer")
            return self.engine.prepare(descriptors)
        return self.engine.prepare(descriptors, peer=self._remote(peer, records))

    def post(
        self,
        op: Op,
        local: Prepared,
        local_ids: npt.ArrayLike | None,
        remote: Prepared,
        remote_ids: npt.ArrayLike | None,
        *,
        lanes: Sequence[Lane] | None,
        notification: bytes | None,
        deadline_s: float | None,
    ) -> AgentPost:
        """See :meth:`Agent.post`."""
        handle = AgentPost(self._loop)

        def ended(batch: TransferBatch) -> None:
            handle.batch = batch
            self._untold.append((handle, batch.error or batch.statistics()))

        handle.batch = self.engine.start(
            self.engine.plan(op, local, local_ids, remote, remote_ids),
            lanes=lanes,
            notification=notification,
            deadline_s=deadline_s,
            on_final=ended,
            on_drained=lambda _: self._untold.append((handle, None)),
        )
        return handle

    def _remote(self, agent_id: str, records: Sequence[RegionRecord] | None) -> RemotePeer:
        member = self._peers.get(agent_id)
        known = self._remotes.get(agent_id)
        is_same_incarnation = known is not None and known.ref == member.ref
        is_same_memory = known is not None and (records is None or tuple(records) == known.records)
        if known is not None and is_same_incarnation and is_same_memory and known.address == member.address:
            return known
        if records is None and not is_same_incarnation:
            raise InvalidArgumentError(f"the registered memory of {member.ref} is not known yet: give its records")
        memory = known.records if records is None and known is not None else tuple(records or ())
        self._remotes[agent_id] = found = RemotePeer(member.ref, member.address, memory)
        return found

    # --- events and ends ---

    def handle(self, event: Event) -> bool:
        """Handle an event. Returns False if it belongs to no transfer."""
        return self._table.handle(event)

    def cancel_all(self, error: KvxferError) -> None:
        """Cancel every transfer; they end with ``error``."""
        self._table.cancel_all(error)
        self.tell()

    def fail_all(self, error: KvxferError) -> None:
        """The transport has ended: end all transfers that are still open."""
        self._table.fail_all(error)
        self.tell()

    def tell(self) -> None:
        """Settle and count the transfers whose events :meth:`handle` has handled, so that the tasks that await them
        continue. On the loop."""
        while self._untold:
            transfer, outcome = self._untold.popleft()
            if outcome is None:
                transfer._settle_drained()
                continue
            transfer._settle(outcome)
            if isinstance(outcome, KvxferError):
                log.info("%r ended: %s", transfer, outcome)
                self._counters.failed(transfer.lane, outcome)
            else:
                self._counters.committed(outcome.lane, outcome.bytes, outcome.seconds)

    def _ended(self, transfer: Transfer, outcome: Outcome) -> None:
        self._untold.append((transfer, outcome))
        search = self._searches.pop(transfer._pull, None)
        if search is not None:
            self._call(search.cancel)

    def _drained(self, transfer: Transfer, on_ended: Callable[[Transfer], None] | None) -> None:
        """Tasks that await it continue only after ``on_ended``, which may run on another thread."""
        try:
            if on_ended is not None:
                self._call_back("on_ended", on_ended, transfer)
        finally:
            self._untold.append((transfer, None))

    def _call_back(self, name: str, callback: Callable[[Transfer], None], transfer: Transfer) -> None:
        try:
            callback(transfer)
        except Exception as error:
            about = {"message": f"kvxfer: {name} of {transfer!r} raised", "exception": error}
            self._call(self._loop.call_exception_handler, about)

    def _tell_soon(self) -> None:
        """Call :meth:`tell`: now on the loop, soon from another thread."""
        if self.is_on_loop:
            self.tell()
        elif self._untold:
            self._call(self.tell)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call it on the loop, or not at all if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def choose_pool(ours: PoolRecord, member: Member) -> PoolRecord:
    """The pool of ``member`` that blocks of ours can come from; raises IncompatibleError, naming the field, if none
    can."""
    if not member.pools:
        raise IncompatibleError(f"agent {member.ref} has no pool")
    nearest = min(member.pools, key=lambda theirs: len(compare(ours, theirs)))
    check(ours, nearest)
    return nearest
