"""The pulls of one agent: finds the source of each, starts it on a lane that joins the two, and settles it when the
transport says how it went. Decides which life and which of its pools a pull means; must never decide whether a transfer
may commit.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer._native import _core
from kvxfer.agent.books import Books
from kvxfer.agent.metrics import AgentMetrics
from kvxfer.agent.peers import Peers
from kvxfer.agent.transfer import Transfer, TransferResult
from kvxfer.errors import (
    Incompatible,
    InvalidArgument,
    KvxferError,
    PeerGone,
    TransferCancelled,
    UsageError,
)
from kvxfer.policy.checksums import wants_checksums
from kvxfer.protocol.handshake import check, compare
from kvxfer.transport.base import DURATION_MAX_S, NO_CONTENT, Blocks, Transport
from kvxfer.transport.lane_choice import LaneChooser
from kvxfer.types import Lane, Member, PoolRecord, TransferId

log = logging.getLogger("kvxfer.agent")

MEMBERSHIP_WAIT_S = 2.0
"""How long a pull waits for its source to become known."""


POSITION_MAX = 0xFFFFFFFF
NO_BLOCKS: Blocks = np.empty(0, dtype=np.uint32)


@dataclasses.dataclass(frozen=True)
class PullOrder:
    """What was asked for. ``lanes``: allowed, best first. Blocks are uint32, shape [n]; ``None``: ``count`` of them are
    given once the grant exists, for which ``timeout_s`` are allowed. ``deadline_s`` counts from then."""

    transfer_id: TransferId
    source: str
    pool: PoolRecord
    blocks: Blocks | None
    count: int
    first: int
    lanes: tuple[Lane, ...]
    timeout_s: float
    deadline_s: float
    content: bytes = NO_CONTENT
    checks: str = "off"
    started_s: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Raises InvalidArgument for numbers that no transport can take."""
        for name in ("timeout_s", "deadline_s"):
            if not 0 < getattr(self, name) <= DURATION_MAX_S:
                raise InvalidArgument(
                    f"{name} must be above 0 and at most {DURATION_MAX_S:g}, not {getattr(self, name)}"
                )
        if not 0 < self.count <= POSITION_MAX:
            raise InvalidArgument(f"a transfer needs 1 to {POSITION_MAX} blocks, not {self.count}")
        if not 0 <= self.first <= POSITION_MAX:
            raise InvalidArgument(f"first must be 0 to {POSITION_MAX}, not {self.first}")


class Pulls:
    """Lives on the agent's loop. :meth:`start` may be called from any thread, and :meth:`handle` too, by one at a time:
    what a transfer became is known then, and its ``on_ended`` called; whoever awaits hears of it by :meth:`tell`."""

    def __init__(
        self, transport: Transport, peers: Peers, books: Books, metrics: AgentMetrics, lanes: LaneChooser
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._books = books
        self._metrics = metrics
        self._lanes = lanes
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._transfers: dict[bytes, Transfer] = {}
        self._untold: collections.deque[tuple[Transfer, TransferResult | KvxferError | None]] = collections.deque()
        """Transfers with what they became, or ``None``: that they drained."""
        self._searches: dict[bytes, asyncio.Task[None]] = {}
        self._sought: dict[bytes, PullOrder] = {}
        """Of transfers whose source is not known yet; under the lock."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Transfers that have not drained."""
        return len(self._transfers)

    @property
    def transfers(self) -> list[Transfer]:
        """The transfers that have not drained."""
        return list(self._transfers.values())

    @property
    def searching(self) -> int:
        """Transfers whose source is not known yet."""
        return len(self._searches)

    def start(
        self,
        order: PullOrder,
        on_ended: Callable[[Transfer], None] | None = None,
        on_granted: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Start now, or, on the loop, as soon as the source is known. ``on_granted`` is called when it heard that its
        grant exists and has no blocks, ``on_ended`` once it drained, on the thread that hears of it first. Raises
        UsageError's kinds; other errors end the transfer."""
        key = order.transfer_id.raw
        transfer = Transfer(
            self._loop,
            order.transfer_id,
            order.source,
            order.count,
            order.pool.block_bytes,
            cancel=self._cancel,
            look=self._transport.transfer_state,
            on_ended=on_ended,
            reserve=self._reserve,
            unreserve=self._unreserve,
            on_granted=on_granted,
        )
        if self._transfers.setdefault(key, transfer) is not transfer:
            raise InvalidArgument("this transfer id was used before; a retry needs a new one")
        member = self._peers.find(order.source)
        if member is None or not member.pools:
            if self.is_on_loop:
                with self._lock:
                    self._sought[key] = order
                self._searches[key] = self._loop.create_task(self._search(transfer, order))
            else:
                has_none = PeerGone(f"agent {order.source!r} has no pool yet")
                self._end(transfer, has_none if member else self._peers.unknown(order.source))
            return transfer
        try:
            self._begin(transfer, order, member)
        except UsageError:
            self._transfers.pop(key, None)  # unless the end of the transport has ended it already
            raise
        except KvxferError as error:
            self._end(transfer, error)
        return transfer

    def handle(
        self, event: _core.TransferProgress | _core.TransferGranted | _core.TransferFinal | _core.TransferDrained
    ) -> bool:
        """Take an event; False where it belongs to no pull."""
        transfer = self._transfers.get(event.id)
        if transfer is None:
            return False
        if isinstance(event, _core.TransferProgress):
            transfer._moved(event)
        elif isinstance(event, _core.TransferGranted):
            self._tell_granted(transfer)
        elif isinstance(event, _core.TransferFinal):
            self._untold.append((transfer, transfer._finish(event)))
        else:
            del self._transfers[event.id]
            self._drained(transfer)
        return True

    def tell(self) -> None:
        """Those who await, and the books, of what :meth:`handle` took. On the loop."""
        while self._untold:
            transfer, outcome = self._untold.popleft()
            if outcome is None:
                transfer._tell_drained()
            else:
                transfer._tell(outcome)
                self._count(transfer, outcome)

    def cancel_all(self, error: KvxferError) -> None:
        """Give every transfer up; they end with ``error``."""
        for transfer in self.transfers:
            transfer._end_with = error
            with contextlib.suppress(KvxferError):  # a transport that is gone has nothing left to cancel
                transfer.cancel()

    def fail_all(self, error: KvxferError) -> None:
        """The transport moves nothing any more: end what is still open."""
        for search in self._searches.values():
            search.cancel()
        self._searches.clear()
        for transfer in self.transfers:
            if not transfer.is_final:
                self._end(transfer, error)
            elif self._transfers.pop(transfer.transfer_id.raw, None) is transfer:
                self._drained(transfer)
        self.tell()

    @property
    def is_on_loop(self) -> bool:
        """Whether the caller is."""
        return threading.get_ident() == self._thread

    async def _search(self, transfer: Transfer, order: PullOrder) -> None:
        try:
            wait_s = min(MEMBERSHIP_WAIT_S, order.timeout_s)
            member = await self._peers.wait(order.source, wait_s, with_pools=True)
            with self._lock:
                order = self._sought.pop(order.transfer_id.raw, order)
            self._begin(transfer, order, member)
        except KvxferError as error:
            self._end(transfer, error)
        finally:
            with self._lock:
                self._sought.pop(order.transfer_id.raw, None)
            if self._searches.get(order.transfer_id.raw) is asyncio.current_task():
                del self._searches[order.transfer_id.raw]

    def _begin(self, transfer: Transfer, order: PullOrder, member: Member) -> None:
        try:
            theirs = choose_pool(order.pool, member)
            choice = self._lanes.possible(member.ref, member.address, [order.pool], [theirs], order.lanes)
        except KvxferError:
            self._transport.give_up(order.transfer_id, member.ref)
            raise
        nbytes = order.count * order.pool.block_bytes
        ranked = self._lanes.order(member.ref, member.address, choice.lanes, nbytes)
        planned_s = time.monotonic() - order.started_s
        sums = wants_checksums(order.checks, order.transfer_id.raw, is_same_host=self._lanes.is_near(member.address))
        # Before the transport has it: another thread may hear of its end at once.
        transfer._begin(member.ref, ranked, choice.reasons, planned_s, has_asked_sums=sums)
        self._transport.pull(
            order.transfer_id,
            member.ref,
            order.pool.pool_id,
            NO_BLOCKS if order.blocks is None else order.blocks,
            first=order.first,
            lanes=ranked.lanes,
            deadline_s=max(order.timeout_s - planned_s, 0.001),
            granted_s=order.deadline_s,
            tells_granted=transfer.wants_granted,
            count=order.count,
            content=order.content,
            wants_sums=sums,
        )

    def _reserve(self, transfer_id: TransferId, blocks: Blocks, first: int) -> None:
        self._transport.reserve(transfer_id, blocks, first=first)

    def _unreserve(self, transfer_id: TransferId) -> bool:
        with self._lock:
            order = self._sought.get(transfer_id.raw)
            if order is not None and order.blocks is not None:
                self._sought[transfer_id.raw] = dataclasses.replace(order, blocks=None)
                return True
        return self._transport.unreserve(transfer_id)

    def _cancel(self, transfer: Transfer) -> None:
        search = self._searches.pop(transfer.transfer_id.raw, None)
        if search is None:
            self._transport.cancel(transfer.transfer_id)
            return
        search.cancel()
        cancelled = TransferCancelled(f"transfer {transfer.transfer_id} was cancelled")
        self._end(transfer, transfer._end_with or cancelled)

    def _end(self, transfer: Transfer, error: KvxferError) -> None:
        """End a transfer that the transport does not have (any more), unless another thread did."""
        if self._transfers.pop(transfer.transfer_id.raw, None) is not transfer:
            return
        self._untold.append((transfer, transfer._fail(error)))
        self._drained(transfer)
        if self.is_on_loop:
            self.tell()
        else:
            self._call(self.tell)

    def _tell_granted(self, transfer: Transfer) -> None:
        try:
            transfer._granted()
        except Exception as error:
            about = {"message": f"kvxfer: on_granted of {transfer!r} raised", "exception": error}
            self._call(self._loop.call_exception_handler, about)

    def _drained(self, transfer: Transfer) -> None:
        """Once of each. Whoever awaits that is told only after ``on_ended``, which another thread may be at."""
        try:
            transfer._drain()
        except Exception as error:
            about = {"message": f"kvxfer: on_ended of {transfer!r} raised", "exception": error}
            self._call(self._loop.call_exception_handler, about)
        self._untold.append((transfer, None))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """On the loop, unless that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _measure(self, result: TransferResult) -> None:
        source = next((member for member in self._peers if member.ref == result.source), None)
        if source is not None:
            seconds = result.seconds["wire"] + result.seconds["confirm"]
            self._lanes.measured(result.source, source.address, result.lane, result.bytes, seconds)

    def _count(self, transfer: Transfer, outcome: TransferResult | KvxferError) -> None:
        if isinstance(outcome, TransferResult):
            self._books.committed(outcome.lane, outcome.bytes)
            if outcome.bytes_before_complete == 0:  # else it waited for the source to compute
                self._measure(outcome)
            self._metrics.committed(outcome.seconds)
            return
        log.info("%r ended: %s", transfer, outcome)
        self._books.failed(transfer.lane, outcome)


def choose_pool(ours: PoolRecord, member: Member) -> PoolRecord:
    """The pool of ``member`` that blocks of ours can come from; raises Incompatible, naming the field, if none can."""
    if not member.pools:
        raise Incompatible(f"agent {member.ref} has no pool")
    nearest = min(member.pools, key=lambda theirs: len(compare(ours, theirs)))
    check(ours, nearest)
    return nearest
