"""Rooms that this rank reads: which parts are asked of which source, and when all of them are there. Decides when a
room is done, and when its pages may be used anew; must never know SGLang, nor wait on the thread that calls it.

A room is SGLang's number for one request that moves from prefill to decode. A leg is one source's share of a room. Each
leg begins with a pull of the source's last part, the auxiliary row. By that pull this rank hears that the room is
queued, that the source's engine does not know it, or that the source is gone, long before the first page is granted.
The source announces the parts before the last by messages, and this rank pulls each at once. A page belongs to the
agent from the pull of its part until that pull has drained. Sources with another tensor parallel or page size give a
share each, in a view of the same pages (:mod:`.views`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence

import numpy.typing as npt

from kvxfer.agent import Agent, Transfer
from kvxfer.connectors.common.ids import part_id
from kvxfer.connectors.common.runtime import every
from kvxfer.connectors.sglang import shape
from kvxfer.connectors.sglang.callbacks import Callbacks
from kvxfer.connectors.sglang.destination_room import (
    DestinationCallbacks,
    DestinationLeg,
    DestinationRoom,
    Received,
    RoomSource,
)
from kvxfer.connectors.sglang.messages import END_PART, KV_POOL, AllReceived, End, Failed, Message, PartGranted, Unknown
from kvxfer.connectors.sglang.pools import RankPools, rows_of
from kvxfer.connectors.sglang.views import SharedRows
from kvxfer.connectors.sglang.watch import PeerLeg
from kvxfer.errors import (
    ClosedError,
    GrantRevokedError,
    IncompatibleError,
    InvalidArgumentError,
    KvxferError,
    PeerGoneError,
    ProtocolError,
    TransferCancelledError,
    from_code,
)
from kvxfer.observe import OpenSpan
from kvxfer.protocol.handshake import compare
from kvxfer.types import TransferId

__all__ = ["DestinationCallbacks", "DestinationRooms", "Received", "RoomSource"]

log = logging.getLogger("kvxfer.sglang")

MEET_S = 2.0
"""How long a source may be unknown when a room begins: its agent metadata is on its way."""
MEET_LOOK_S = 0.01
REASON_S = 0.1
"""A revoked grant is reported before the message that gives the reason."""
WAITING_MAX = 4096
"""Messages of one source that are kept until it is known."""


class DestinationRooms:
    """Any thread may call all methods but those of the core. They return at once."""

    def __init__(
        self,
        agent: Agent,
        pools: RankPools,
        rank: int,
        callbacks: DestinationCallbacks,
        call_soon: Callable[..., None],
        say: Callable[[str, Message], None],
    ) -> None:
        """``call_soon(function, *arguments)`` calls on the agent's loop; ``say`` sends an agent messages, in order."""
        self._agent = agent
        self._pools = pools
        self._rank = rank
        self._on_done, self._on_failed, self._on_over = callbacks.on_done, callbacks.on_failed, callbacks.on_over
        self._callbacks = Callbacks(call_soon)
        self._call_soon = call_soon
        self._say = say
        self._lock = threading.RLock()
        self._rooms: dict[int, DestinationRoom] = {}
        self._draining: dict[int, DestinationRoom] = {}
        """Rooms that were cleared and are still read into."""
        self._by_transfer: dict[TransferId, DestinationRoom] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: KvxferError | None = None

    def __len__(self) -> int:
        """Rooms that are not over."""
        with self._lock:
            return sum(not room.is_over for room in self._rooms.values())

    def __repr__(self) -> str:
        return f"<DestinationRooms of rank {self._rank}: {len(self)} open, {len(self._draining)} draining>"

    # --- the engine ---

    def begin(
        self,
        room: int,
        transfer_id: TransferId,
        sources: Sequence[RoomSource | tuple[str, int]],
        pages: npt.ArrayLike,
        aux_row: int,
        states: Sequence[npt.ArrayLike | None] = (),
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Wait for that prompt, and read it as it is computed: ``pages`` (may be empty), the row of the auxiliary
        buffers, and rows of each state component (``None``: none), from those of ``sources`` that :meth:`choose` names;
        the auxiliary row comes from the first of them. This object owns the pages until the room is over and drained.
        ``timeout_s``: until the last part is granted. ``traceparent``: the request's. Raises InvalidArgumentError for a
        room or transfer id in use, and for rows that do not exist; BlocksBusyError for pages of another room;
        ClosedError; and as :meth:`choose`."""
        chosen = self._choose(sources)
        if len(states) > len(self._pools.all) - 1:
            raise InvalidArgumentError(
                f"{len(states)} state components are wanted, {len(self._pools.all) - 1} registered"
            )
        wanted = [pages, *states, *[None] * (len(self._pools.all) - 1 - len(states))]
        rows = [rows_of(pool, some) for pool, some in zip(self._pools.all, wanted, strict=True)]
        if len(chosen) > 1 and self._pools.shape is not None and any(map(len, rows[1:])):
            raise IncompatibleError(
                f"states: {len(chosen)} sources have a share each of the pages, and states are not shared out",
                field="states",
            )
        legs: dict[str, DestinationLeg] = {}
        for source, cut in chosen:
            legs[source.agent_id] = DestinationLeg(
                transfer_id,
                source.agent_id,
                source.rank,
                cut=cut,
                rows=[cut.rows(rows[0]), *rows[1:]],
                covered=[0] * len(rows),
                is_first=not legs,
                is_known=not cut.is_view,
            )
        span = OpenSpan("kvxfer.load", traceparent, room=room, transfer_id=str(transfer_id))
        entry = DestinationRoom(room, transfer_id, legs, rows_of(self._pools.aux, [aux_row]), rows[0], timeout_s, span)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if room in self._rooms:
                raise InvalidArgumentError(f"room {room} is in use: the request that had it before is not over here")
            if room in self._draining:
                raise InvalidArgumentError(f"room {room} is in use: what was read for it before has not drained")
            if transfer_id in self._by_transfer:
                raise InvalidArgumentError(f"transfer id {transfer_id} is another room's")
            if self._pools.ledger is not None:
                self._pools.ledger.fill(entry.pages)
                entry.is_in_ledger = True
            self._rooms[room] = entry
            self._by_transfer[transfer_id] = entry
        self._call_soon(self._ask_all, entry)

    def choose(self, sources: Sequence[RoomSource | tuple[str, int]]) -> tuple[RoomSource, ...]:
        """The sources to read from, in their order. Together they give each layer and head of this rank once. This
        rank's own number decides which of several replicas is chosen. Without shapes all sources are read. Raises
        InvalidArgumentError if there are none, one is named twice, or only some have a shape; IncompatibleError, naming
        the field, if no source has some layer or head, or one keeps it differently."""
        return tuple(source for source, _ in self._choose(sources))

    def abort(self, room: int, why: str) -> None:
        """Cancel a room: ``on_failed`` (code ``cancelled``) comes once it has drained. May be repeated; does nothing
        for a room that is over or unknown."""
        with self._lock:
            entry = self._rooms.get(room)
            if entry is not None:
                self._fail(entry, TransferCancelledError(why or "the request was aborted"))

    def is_drained(self, room: int) -> bool:
        """Whether the room is over and no read into its pages is running; True for an unknown one."""
        with self._lock:
            entry = self._rooms.get(room) or self._draining.get(room)
            return entry is None or entry.is_drained

    def clear(self, room: int) -> None:
        """Forget a room, after :meth:`abort` if it is not over; no callback comes any more. Its reads still have to
        end, and :meth:`is_drained` is False until they have. May be repeated."""
        with self._lock:
            entry = self._rooms.pop(room, None)
            if entry is None:
                return
            entry.is_told = True
            self._fail(entry, TransferCancelledError("the request is over"))
            if not entry.is_drained:
                self._draining[room] = entry

    def received(self, room: int) -> Received:
        """What was received for a room; nothing for an unknown one."""
        with self._lock:
            entry = self._rooms.get(room)
            if entry is None or entry.granted_s is None:
                return Received(0, 0.0)
            return Received(entry.bytes, (entry.ended_s or time.monotonic()) - entry.granted_s)

    def _choose(self, sources: Sequence[RoomSource | tuple[str, int]]) -> list[tuple[RoomSource, SharedRows]]:
        given = [RoomSource(*source) for source in sources]
        for named in ({source.agent_id for source in given}, {source.rank for source in given}):
            if not given or len(named) != len(given):
                raise InvalidArgumentError(
                    f"sources are needed, each agent and rank once, not {[one[:2] for one in given]}"
                )
        shapes = [source.shape for source in given if source.shape is not None]
        if self._pools.shape is None or not shapes:
            return [(source, self._pools.cut(source.shape)) for source in given]
        if len(shapes) < len(given):
            raise InvalidArgumentError("some sources have a shape and others have none")
        shares = shape.choose(self._pools.shape, shapes)
        return [(source, self._pools.cut(source.shape)) for place, source in enumerate(given) if place in shares]

    # --- the core, on the agent's loop ---

    def on_message(self, agent_id: str, message: PartGranted | End | Failed) -> None:
        """A message of a source."""
        with self._lock:
            entry = self._by_transfer.get(message.transfer_id)
            leg = None if entry is None else entry.legs.get(agent_id)
            if entry is None or leg is None or entry.is_over:
                return
            if isinstance(message, Failed):
                self._fail(entry, from_code(message.code, f"the source gave it up: {message.text}"), teller=leg)
            elif leg.is_asked and leg.is_known and not leg.waiting:
                self._on_announced(entry, leg, message)
            elif len(leg.waiting) < WAITING_MAX:
                leg.waiting.append(message)
                if leg.is_asked and len(leg.waiting) == 1:
                    self._start(self._learn(entry, leg))
            else:
                self._fail(entry, ProtocolError(f"WAITING_MAX={WAITING_MAX} messages came before their sender"))

    def legs(self) -> list[PeerLeg]:
        """Peers of the rooms that are not over."""
        with self._lock:
            return [leg for entry in self._by_transfer.values() if not entry.is_over for leg in entry.legs.values()]

    def leg_gone(self, leg: PeerLeg, error: KvxferError) -> None:
        """That peer is gone, and so its room fails."""
        with self._lock:
            entry = self._by_transfer.get(leg.transfer_id)
            if entry is not None:
                self._fail(entry, error)

    def close(self, error: ClosedError) -> None:
        """The engine ends: every room fails once it has drained, and none begins any more."""
        with self._lock:
            self._closed = error
            for entry in list(self._by_transfer.values()):
                self._fail(entry, error)
        for task in self._tasks:
            task.cancel()
        self._callbacks.close()

    # --- inside: on the loop, under the lock ---

    def _ask_all(self, entry: DestinationRoom) -> None:
        for leg in entry.legs.values():
            self._start(self._ask_last_part(entry, leg))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_last_part(self, entry: DestinationRoom, leg: DestinationLeg) -> None:
        """Ask a source for its last part, as soon as it is known."""
        try:
            while not (member := self._agent.find_member(leg.agent_id)) or not member.pools:
                if entry.is_over:
                    return
                if time.monotonic() - leg.began_s >= MEET_S:
                    raise self._agent.explain(PeerGoneError(f"no agent {leg.agent_id!r} is known"))
                await asyncio.sleep(MEET_LOOK_S)
            with self._lock:
                if entry.is_over:
                    return
                leg.ref = leg.ref or member.ref
                transfer_id = self._id(leg, END_PART)
                entry.transfers[transfer_id] = self._agent.ask(
                    self._pools.aux,
                    len(entry.aux),
                    transfer_id=transfer_id,
                    source=leg.agent_id,
                    timeout_s=entry.timeout_s,
                    on_granted=functools.partial(self._on_end_granted, entry, leg),
                    on_ended=functools.partial(self._on_ended, entry, leg),
                )
                leg.is_asked = True
                if leg.waiting:
                    self._start(self._learn(entry, leg))
        except KvxferError as error:
            with self._lock:
                self._fail(entry, error)

    async def _learn(self, entry: DestinationRoom, leg: DestinationLeg) -> None:
        """Handle what a source has announced, once its pool is known. The source registers a pool for this rank when it
        learns of this rank's shape. It reports the pool when asked, or the coordinator does. If the pool is not known
        after MEET_S, the pull fails with the reason."""
        began_s = time.monotonic()
        if not self._knows_pool(leg):
            self._say(leg.agent_id, Unknown(leg.transfer_id))
        async for _ in every(MEET_LOOK_S):
            if self._knows_pool(leg) or entry.is_over or time.monotonic() - began_s >= MEET_S:
                break
        with self._lock:
            leg.is_known = True
            waiting, leg.waiting = leg.waiting, []
            for message in waiting:
                if not entry.is_over:
                    self._on_announced(entry, leg, message)

    def _knows_pool(self, leg: DestinationLeg) -> bool:
        ours, member = leg.cut.pool.published, self._agent.find_member(leg.agent_id)
        return leg.is_known or (member is not None and any(not compare(ours, theirs) for theirs in member.pools))

    def _on_announced(self, entry: DestinationRoom, leg: DestinationLeg, message: PartGranted | End) -> None:
        try:
            if leg.is_all_announced:
                raise ProtocolError("a source says more after its last")
            if isinstance(message, PartGranted):
                self._pull(entry, leg, message)
            else:
                self._check_all(entry, leg, message)
                leg.is_all_announced = True
                self._end_if_over(entry)
        except KvxferError as error:
            self._fail(entry, error)

    def _pull(self, entry: DestinationRoom, leg: DestinationLeg, chunk: PartGranted) -> None:
        at = chunk.first
        is_known = chunk.pool < len(leg.rows) and chunk.part == leg.parts < END_PART
        if not is_known or at != leg.covered[chunk.pool] or not 0 < chunk.count <= len(leg.rows[chunk.pool]) - at:
            wanted = [f"{covered} of {len(rows)}" for covered, rows in zip(leg.covered, leg.rows, strict=True)]
            raise ProtocolError(f"a source gives {chunk}, and part {leg.parts} is due; it gave {wanted} rows so far")
        leg.parts += 1
        leg.covered[chunk.pool] += chunk.count
        entry.granted_s = entry.granted_s or time.monotonic()
        transfer_id = self._id(leg, chunk.part)
        entry.filling.add(transfer_id)
        try:
            transfer = self._agent.pull(
                leg.cut.pool if chunk.pool == KV_POOL else self._pools.all[chunk.pool],
                leg.rows[chunk.pool][at : at + chunk.count],
                transfer_id=transfer_id,
                source=leg.agent_id,
                on_ended=functools.partial(self._on_ended, entry, leg),
            )
        except KvxferError:
            entry.filling.discard(transfer_id)
            raise
        if not transfer.is_drained:
            entry.transfers[transfer_id] = transfer

    def _check_all(self, entry: DestinationRoom, leg: DestinationLeg, end: End) -> None:
        names = ("pages", *(pool.record.axes for pool in self._pools.all[1:]))
        if leg.cut.is_view:
            names = (f"blocks of {leg.cut.pool.record.axes}", *names[1:])
        for place, (name, covered, rows) in enumerate(zip(names, leg.covered, leg.rows, strict=True)):
            is_all = covered == len(rows) if place else leg.cut.is_all(covered, len(rows))
            if not is_all:
                raise ProtocolError(f"a source gave {covered} of {len(rows)} {name}, and says that it is all")
        if end.parts != leg.parts:
            raise ProtocolError(f"a source gave {leg.parts} parts, and says that there are {end.parts}")

    def _on_end_granted(self, entry: DestinationRoom, leg: DestinationLeg, transfer: Transfer) -> None:
        with self._lock:
            if entry.is_over or leg.has_end or transfer.transfer_id in entry.filling:
                return
            entry.granted_s, entry.is_computed = entry.granted_s or time.monotonic(), True
            if not leg.is_first:
                leg.has_end = True
                transfer.cancel()
                self._end_if_over(entry)
                return
            entry.filling.add(transfer.transfer_id)
            try:
                transfer.reserve(entry.aux)
            except InvalidArgumentError as error:  # the transfer is final: its on_ended comes next
                log.debug("a grant ended as soon as it was there: %s", error)
                entry.filling.discard(transfer.transfer_id)
            except KvxferError as error:
                entry.filling.discard(transfer.transfer_id)
                self._fail(entry, error)

    def _on_ended(self, entry: DestinationRoom, leg: DestinationLeg, transfer: Transfer) -> None:
        """A transfer has drained."""
        is_end = transfer.transfer_id == self._id(leg, END_PART)
        with self._lock:
            entry.filling.discard(transfer.transfer_id)
            entry.transfers.pop(transfer.transfer_id, None)
            try:
                result = transfer.result()
            except GrantRevokedError as error:
                if self._closed is None:
                    asyncio.get_running_loop().call_later(REASON_S, self._fail_late, entry, error)
                else:
                    self._fail(entry, error)
            except KvxferError as error:
                if not (is_end and leg.has_end):
                    self._fail(entry, error)
            else:
                entry.take(leg, result)
                leg.has_end |= is_end
                leg.committed += not is_end
            self._end_if_over(entry)
        if self._closed is not None:
            self._callbacks.run()

    def _id(self, leg: DestinationLeg, part: int) -> TransferId:
        return part_id(leg.transfer_id, leg.rank, self._rank, part, 0)

    def _end_if_over(self, entry: DestinationRoom) -> None:
        """End the room if it is done, or if it has failed and drained."""
        if entry.error is None and not entry.is_done and all(leg.is_done for leg in entry.legs.values()):
            entry.is_done = True
            entry.ended_s = time.monotonic()
            self._by_transfer.pop(entry.transfer_id, None)
            self._settle(entry)
            for leg in entry.legs.values():
                self._say(leg.agent_id, AllReceived(entry.transfer_id))
            self._tell(entry, self._on_done)
        elif entry.error is not None and not entry.filling:
            self._settle(entry)
            if self._draining.get(entry.number) is entry:
                del self._draining[entry.number]
            self._tell(entry, self._on_failed, entry.error.code, str(entry.error))

    def _settle(self, entry: DestinationRoom) -> None:
        """The room is over and drained: take its pages from the ledger, and report the outcome."""
        if entry.is_settled:
            return
        entry.is_settled = True
        if self._pools.ledger is not None and entry.is_in_ledger:
            self._pools.ledger.filled(entry.pages)
        self._callbacks.tell(self._on_over, entry.end())

    def _tell(self, entry: DestinationRoom, callback: Callable[..., None], *arguments: object) -> None:
        if not entry.is_told:
            entry.is_told = True
            self._callbacks.tell_of(entry, self._rooms, callback, *arguments)

    def _fail(self, entry: DestinationRoom, error: KvxferError, *, teller: PeerLeg | None = None) -> None:
        """From any thread, under the lock. Cancel running transfers; tell the sources except ``teller``."""
        if entry.is_over:
            return
        entry.error = error
        entry.ended_s = time.monotonic()
        self._by_transfer.pop(entry.transfer_id, None)
        is_own = isinstance(error, (TransferCancelledError, ClosedError))
        about = {"code": error.code, "room": entry.number}
        log.log(logging.DEBUG if is_own else logging.WARNING, "a room failed: %s", error, extra=about)
        for leg in entry.legs.values():
            if leg is not teller and self._closed is None:
                self._say(leg.agent_id, Failed(entry.transfer_id, error.code, str(error)))
        self._call_soon(self._cancel, entry)
        self._end_if_over(entry)

    def _fail_late(self, entry: DestinationRoom, error: KvxferError) -> None:
        with self._lock:
            self._fail(entry, error)

    def _cancel(self, entry: DestinationRoom) -> None:
        with self._lock:
            transfers: Iterable[Transfer] = list(entry.transfers.values())
        for transfer in transfers:
            transfer.cancel()
