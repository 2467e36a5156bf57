"""Rooms that this rank computes and others read: which readers are promised which pages, and how it ends. Decides when
a room is done and when it has failed; must never know SGLang, nor wait on the thread that calls it.

A room begins when the engine here accepted its prompt and a reader is known: from then on the reader, which asks for
the last part first, is told that it is queued. Each chunk of pages is one grant to each reader, and then a message. The
room is done when every reader has said that it committed everything. A reader with another tensor parallel size gets
what both have in common, in a view of the same pages (:mod:`.views`). Grants alone decide what a reader may read: once
:meth:`SourceRooms.abort` has revoked them nothing that it reads is confirmed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy.typing as npt

from kvxfer.agent import Agent, Grant, Pool
from kvxfer.connectors.common.ids import part_id
from kvxfer.connectors.sglang.callbacks import Callbacks
from kvxfer.connectors.sglang.device_callbacks import DeviceCallbacks, Fence
from kvxfer.connectors.sglang.messages import END_PART, KV_POOL, AllReceived, End, Failed, Message, PartGranted
from kvxfer.connectors.sglang.pools import RankPools, rows_of
from kvxfer.connectors.sglang.pulses import Pulses
from kvxfer.connectors.sglang.source_room import COMMITTED, Moved, RoomReader, SourceCallbacks, SourceLeg, SourceRoom
from kvxfer.connectors.sglang.views import SharedRows
from kvxfer.connectors.sglang.watch import PeerLeg
from kvxfer.errors import (
    ClosedError,
    GrantExpiredError,
    GrantGoneError,
    GrantRevokedError,
    InvalidArgumentError,
    KvxferError,
    PeerGoneError,
    ProtocolError,
    RefusedError,
    TransferCancelledError,
    from_code,
)
from kvxfer.observe import OpenSpan
from kvxfer.transport.base import Blocks
from kvxfer.types import GrantState, TransferId

__all__ = ["Fence", "Moved", "RoomReader", "SourceCallbacks", "SourceRooms"]

log = logging.getLogger("kvxfer.sglang")

EARLY_MAX = 4096
"""Rooms that readers want and that the engine here has not accepted; the oldest go first."""
DECLINE_S = 0.5
"""A reader that was told why and still waits learns from its grant's end that nothing will come."""
ENDED_MAX = 4096
"""Rooms remembered that failed here: readers that ask for one are told so."""
GIVEN_UP_MAX = 4096
"""Transfers that readers aborted before this rank knew their room."""

_ENDED: dict[GrantState, type[KvxferError]] = {
    GrantState.EXPIRED: GrantExpiredError,
    GrantState.REVOKED: GrantRevokedError,
    GrantState.READER_GONE: PeerGoneError,
}


class SourceRooms:
    """Any thread may call all methods but those of the core. They return at once."""

    def __init__(
        self,
        agent: Agent,
        pools: RankPools,
        rank: int,
        callbacks: SourceCallbacks,
        call_soon: Callable[..., None],
        say: Callable[[str, Message], None],
        pulses: Pulses,
        early_s: float,
    ) -> None:
        """``call_soon(function, *arguments)`` calls on the agent's loop, ``say`` sends a message to an agent, in order.
        ``pulses`` hears that the engine is idle. A reader waits at most ``early_s`` until its room is accepted."""
        self._agent = agent
        self._pools = pools
        self._rank = rank
        self._on_done, self._on_failed, self._on_began = callbacks.on_done, callbacks.on_failed, callbacks.on_began
        self._on_over = callbacks.on_over
        self._callbacks = Callbacks(call_soon)
        self._call_soon = call_soon
        self._say = say
        self._pulses = pulses
        self._early_s = early_s
        self._lock = threading.RLock()
        self._rooms: dict[int, SourceRoom] = {}
        self._early: collections.OrderedDict[int, SourceRoom] = collections.OrderedDict()
        self._ended: collections.OrderedDict[int, KvxferError] = collections.OrderedDict()
        self._by_transfer: dict[TransferId, tuple[SourceRoom, SourceLeg]] = {}
        self._given_up: collections.OrderedDict[tuple[str, TransferId], Failed] = collections.OrderedDict()
        self._device = DeviceCallbacks()
        self._closed: KvxferError | None = None

    def __len__(self) -> int:
        """Rooms that are accepted and not over."""
        with self._lock:
            return sum(not room.is_over for room in self._rooms.values())

    def __repr__(self) -> str:
        return f"<SourceRooms of rank {self._rank}: {len(self)} open, {len(self._early)} early>"

    # --- the engine ---

    def accept(self, room: int, traceparent: str | None = None) -> None:
        """The engine here accepted that prompt, in a request with that ``traceparent``. Raises InvalidArgumentError if
        the room is in use; ClosedError."""
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if room in self._rooms:
                raise InvalidArgumentError(f"room {room} is in use: the request that had it before is not over here")
            self._ended.pop(room, None)
            made = self._early.pop(room, None) or SourceRoom(room, time.monotonic())
            self._rooms[room] = made
            made.accept(traceparent)
            error, made.error = made.error, None
            if error is not None:  # its reader came, and went
                self._fail(made, error)
            for leg in made.legs:
                self._expect(made, leg)

    def reader(self, room: int, reader: RoomReader) -> None:
        """A decode rank wants the room; may come before :meth:`accept`. A reader that comes too late, for another
        reader's room (``refused``), with nothing in common with this rank (``incompatible``), or with a wrong ``lead``
        (``protocol``) is told so and changes nothing. A dummy rank is no reader."""
        leg = SourceLeg(reader.transfer_id, reader.agent_id, reader.rank)
        with self._lock:
            if self._is_known(leg):
                return
            made = self._rooms.get(room) or self._early.get(room)
            error = self._why_not(room, made, leg)
            if error is None:
                try:
                    leg.cut = self._pools.cut(reader.shape)
                    leg.wanted = reader.pages * leg.cut.peer_rows
                    leg.lead = _lead(reader, leg.cut)
                except KvxferError as reason:
                    error = reason
            if error is not None:
                self._turn_away(leg, error)
                return
            if made is None:
                made = self._early[room] = SourceRoom(room, time.monotonic())
                if len(self._early) > EARLY_MAX:
                    self._drop_early(next(iter(self._early)))
            made.legs.append(leg)
            self._by_transfer[leg.transfer_id] = (made, leg)
            self._call_soon(self._note_incarnation, leg)
            given_up = self._given_up.pop((leg.agent_id, leg.transfer_id), None)
            if given_up is not None:  # it says why; the agent knows that it did, and no more
                self.on_message(leg.agent_id, given_up)
            if room in self._rooms:
                self._expect(made, leg)

    def send(
        self,
        room: int,
        first: int,
        pages: npt.ArrayLike,
        *,
        is_last: bool,
        aux_row: int | None = None,
        states: Sequence[npt.ArrayLike | None] = (),
        fence: Fence | None = None,
    ) -> None:
        """``pages`` (may be empty) are written, now or once ``fence`` returns, and do not change until the room is
        over. They are the pages from the ``first`` on, in this rank's size, of what every reader wants; the last may
        extend beyond that for a reader with smaller pages. ``is_last`` adds the row of the auxiliary buffers and the
        rows of each state component (``None``: none). Nothing happens for a room that is over or unknown. An error in
        it fails the room."""
        with self._lock:
            made = self._rooms.get(room)
            if made is None or made.is_over:
                return
            made.is_sending = True
            try:
                granted = self._grant_all(made, first, pages, is_last, aux_row, states)
                if fence is None:
                    _announce(granted)
            except KvxferError as error:
                self._fail(made, error)
                return
            if is_last:
                made.is_all_sent = True
                self._look(made)
        if fence is not None and granted:
            self._device.after(fence, functools.partial(self._fence_passed, made, granted))

    def abort(self, room: int, why: str) -> None:
        """End the reads of a room: when this returns its pages may be reused. Readers are told, and no callback comes.
        May be repeated; does nothing for a room that is over or unknown."""
        with self._lock:
            made = self._rooms.get(room)
            if made is not None and not made.is_over:
                self._fail(made, TransferCancelledError(why or "the request was aborted"), is_told=False)

    def fail_unsent(self, error: KvxferError) -> None:
        """No room of which something is not sent yet comes to an end, for that reason."""
        with self._lock:
            for made in self._rooms.values():
                if not made.is_over and not made.is_all_sent:
                    self._fail(made, error)

    def clear(self, room: int) -> None:
        """Forget a room, after :meth:`abort` if it is not over. May be repeated."""
        with self._lock:
            self.abort(room, "the request is over")
            made = self._rooms.pop(room, None)
            if made is None:
                return
            for leg in made.legs:
                self._by_transfer.pop(leg.transfer_id, None)
            if made.error is not None:
                self._ended[room] = made.error
                if len(self._ended) > ENDED_MAX:
                    self._ended.popitem(last=False)
            if not self._rooms:
                self._pulses.step(False)

    def moved(self, room: int) -> Moved:
        """What was sent of a room; nothing for an unknown one."""
        with self._lock:
            made = self._rooms.get(room)
            return Moved(0, 0.0) if made is None else made.moved

    # --- the core, on the agent's loop ---

    def on_message(self, agent_id: str, message: AllReceived | Failed) -> None:
        """A message of a reader."""
        with self._lock:
            made, leg = self._by_transfer.get(message.transfer_id, (None, None))
            if made is None and isinstance(message, Failed):  # it may overtake the reader, which SGLang tells of
                self._given_up[agent_id, message.transfer_id] = message
                if len(self._given_up) > GIVEN_UP_MAX:
                    self._given_up.popitem(last=False)
            if made is None or leg is None or leg.agent_id != agent_id or made.is_over:
                return
            if isinstance(message, Failed):
                error = from_code(message.code, f"the reader gave it up: {message.text}")
                if made.number in self._rooms:
                    self._fail(made, error, teller=leg)
                else:
                    made.error = error
            elif made.is_all_sent:
                leg.is_done = True
                self._look(made)
            else:
                self._fail(made, ProtocolError("a reader says that it has everything, before it was given"))

    def legs(self) -> list[PeerLeg]:
        """Peers of the rooms that are accepted and not over."""
        with self._lock:
            return [leg for made in self._rooms.values() if not made.is_over for leg in made.legs]

    def readers(self) -> set[str]:
        """The agents that wait for a room of this rank that is not over, accepted or not."""
        with self._lock:
            made = [*self._rooms.values(), *self._early.values()]
            return {leg.agent_id for one in made if not one.is_over for leg in one.legs}

    def leg_gone(self, leg: PeerLeg, error: KvxferError) -> None:
        """That peer is gone, and so its room fails."""
        with self._lock:
            made, _ = self._by_transfer.get(leg.transfer_id, (None, None))
            if made is not None and not made.is_over:
                self._fail(made, error)

    def sweep(self, now_s: float) -> None:
        """Tell which readers began to read, forget readers whose room was not accepted."""
        with self._lock:
            for made in self._rooms.values():
                if not made.has_begun and not made.is_over and any(one.has_begun for one in made.grants.values()):
                    self._tell_begun(made)
            for room in [room for room, made in self._early.items() if now_s - made.made_s >= self._early_s]:
                self._drop_early(room)

    def close(self, error: ClosedError) -> None:
        """The engine ends: every room fails, and none is accepted any more."""
        with self._lock:
            self._closed = error
            for made in self._rooms.values():
                if not made.is_over:
                    self._fail(made, error)
            self._early.clear()
        self._device.close()
        self._callbacks.close()

    # --- inside, under the lock ---

    def _is_known(self, leg: SourceLeg) -> bool:
        _, known = self._by_transfer.get(leg.transfer_id, (None, None))
        return known is not None and (known.agent_id, known.rank) == (leg.agent_id, leg.rank)

    def _why_not(self, room: int, made: SourceRoom | None, leg: SourceLeg) -> KvxferError | None:
        """Why that reader cannot have the room."""
        if self._closed is not None:
            return self._closed
        if made is None:
            return self._ended.get(room)
        if made.error is not None:
            return made.error
        if leg.transfer_id in self._by_transfer:
            return RefusedError(f"room {room}: its transfer id is another's")
        if any((one.agent_id, one.rank) == (leg.agent_id, leg.rank) for one in made.legs):
            return RefusedError(f"room {room} is in use: another request of {leg.agent_id} waits for it")
        if made.is_sending or made.is_done:
            return RefusedError(f"room {room} is in use: it is being sent to others")
        return None

    def _note_incarnation(self, leg: SourceLeg) -> None:
        """On the loop, once its agent is known."""
        with contextlib.suppress(KvxferError):
            member = self._agent.find_member(leg.agent_id)
            leg.ref = leg.ref or (None if member is None else member.ref)

    def _turn_away(self, leg: SourceLeg, error: KvxferError) -> None:
        self._say(leg.agent_id, Failed(leg.transfer_id, error.code, str(error)))
        self._call_soon(self._decline, self._id(leg, END_PART))

    def _drop_early(self, room: int) -> None:
        for leg in self._early.pop(room).legs:
            self._by_transfer.pop(leg.transfer_id, None)

    def _expect(self, made: SourceRoom, leg: SourceLeg) -> None:
        if made.is_over:
            return
        try:
            self._agent.expect(self._id(leg, END_PART), reader=leg.agent_id)
        except KvxferError as error:
            self._fail(made, error)

    def _grant_all(
        self,
        made: SourceRoom,
        first: int,
        pages: npt.ArrayLike,
        is_last: bool,
        aux_row: int | None,
        states: Sequence[npt.ArrayLike | None],
    ) -> list[Grant]:
        """Grant every reader what is sent now, and tell it. Raises KvxferError's kinds."""
        if made.is_all_sent:
            raise InvalidArgumentError(f"room {made.number}: more is sent after its last")
        if len(states) > len(self._pools.all) - 1:
            raise InvalidArgumentError(
                f"{len(states)} state components are sent, and {len(self._pools.all) - 1} registered"
            )
        index = rows_of(self._pools.all[KV_POOL], pages)
        beside = [(pool, 0, rows_of(self._pools.all[pool], rows)) for pool, rows in enumerate(states, 1)]
        if self._pools.ledger is not None and made.legs:
            self._pools.ledger.give(index)
            made.pages.append(index)
        granted = []
        for leg in made.legs:
            assert leg.cut is not None
            for pool, at, rows in [(KV_POOL, *_share(leg, leg.cut, first, index)), *beside]:
                if len(rows):
                    whose = leg.cut.pool if pool == KV_POOL else self._pools.all[pool]
                    granted.append(self._grant(made, leg, leg.parts, whose, rows))
                    self._say(leg.agent_id, PartGranted(leg.transfer_id, leg.parts, pool, at, len(rows)))
                    leg.parts += 1
            if is_last:
                row = rows_of(self._pools.aux, [] if aux_row is None else [aux_row])
                if not len(row):
                    raise InvalidArgumentError(f"room {made.number} has no auxiliary row")
                granted.append(self._grant(made, leg, END_PART, self._pools.aux, row))
                self._say(leg.agent_id, End(leg.transfer_id, leg.parts))
        return granted

    def _grant(self, made: SourceRoom, leg: SourceLeg, part: int, pool: Pool, rows: Blocks) -> Grant:
        transfer_id = self._id(leg, part)
        grant = self._agent.grant(pool, rows, transfer_id=transfer_id, reader=leg.agent_id)
        made.grants[transfer_id] = grant
        span = made.grant_span(leg, part, len(rows))
        grant.on_ended(functools.partial(self._grant_ended, made, transfer_id, span))
        made.bytes += len(rows) * pool.block_bytes
        made.began_s = time.monotonic() if made.began_s is None else made.began_s
        return grant

    def _id(self, leg: SourceLeg, part: int) -> TransferId:
        return part_id(leg.transfer_id, self._rank, leg.rank, part, 0)

    def _fence_passed(self, made: SourceRoom, granted: list[Grant], failure: Exception | None) -> None:
        """On the thread of the device callbacks."""
        try:
            if failure is None:
                _announce(granted)
        except KvxferError as error:
            failure = error
        if failure is not None:
            with self._lock:
                if not made.is_over:
                    self._fail(made, KvxferError(f"the device failed: {failure!r}"))

    def _grant_ended(self, made: SourceRoom, transfer_id: TransferId, span: OpenSpan, state: GrantState) -> None:
        """On the loop."""
        kind = _ENDED.get(state)
        span.end(None if kind is None else kind.code)
        with self._lock:
            made.grants.pop(transfer_id, None)
            if kind is not None and not made.is_over:
                self._fail(made, kind(f"a grant of room {made.number} ended: {state.name.lower()}"))

    def _look(self, made: SourceRoom) -> None:
        """Whether it is done."""
        if made.is_over or not made.is_all_sent or not all(leg.is_done for leg in made.legs):
            return
        made.is_done = True
        for grant in list(made.grants.values()):
            grant.release()
        made.grants.clear()
        made.end()
        self._strike(made)
        if not made.has_begun:
            self._tell_begun(made)
        self._callbacks.tell_of(made, self._rooms, self._on_done)
        self._callbacks.tell(self._on_over, made.number, COMMITTED)

    def _strike(self, made: SourceRoom) -> None:
        """Take its pages from the ledger: every grant has ended."""
        given, made.pages = made.pages, []
        for pages in given:
            assert self._pools.ledger is not None
            self._pools.ledger.given(pages)

    def _tell_begun(self, made: SourceRoom) -> None:
        made.has_begun = True
        self._callbacks.tell(self._on_began, made.number)

    def _fail(
        self, made: SourceRoom, error: KvxferError, *, teller: PeerLeg | None = None, is_told: bool = True
    ) -> None:
        """Revoke its grants at once; tell the readers except ``teller`` and, with ``is_told``, the engine."""
        made.error = error
        for grant in list(made.grants.values()):
            grant.revoke(str(error))
        made.grants.clear()
        made.end()
        self._strike(made)
        about = {"code": error.code, "room": made.number}
        log.log(logging.WARNING if is_told else logging.DEBUG, "a room failed: %s", error, extra=about)
        for leg in made.legs:
            if leg is not teller and self._closed is None:
                self._say(leg.agent_id, Failed(leg.transfer_id, error.code, str(error)))
            self._call_soon(self._decline, self._id(leg, END_PART))
        if is_told:
            self._callbacks.tell_of(made, self._rooms, self._on_failed, error.code, str(error))
        self._callbacks.tell(self._on_over, made.number, error.code)

    def _decline(self, transfer_id: TransferId) -> None:
        """On the loop, after the reader had time to learn why."""
        asyncio.get_running_loop().call_later(DECLINE_S, self._decline_now, transfer_id)

    def _decline_now(self, transfer_id: TransferId) -> None:
        with contextlib.suppress(KvxferError):
            self._agent.abort_grant(transfer_id)


def _lead(reader: RoomReader, cut: SharedRows) -> int:
    """Raises ProtocolError for a lead that is not within our page, or that such a reader cannot have."""
    if not 0 <= reader.lead < (1 if cut.own_rows == cut.peer_rows else cut.own_rows):
        raise ProtocolError(f"a reader has {reader.lead} tokens of the first page already: that cannot be")
    return reader.lead


def _share(leg: SourceLeg, cut: SharedRows, first: int, pages: Blocks) -> tuple[int, Blocks]:
    """The place of these pages in what the reader wants, and the blocks that they are there. Raises
    InvalidArgumentError for pages beyond that."""
    start = first * cut.own_rows - leg.lead
    at, rows = max(start, 0), cut.rows(pages)[max(-start, 0) :]
    surplus = max(at + len(rows) - leg.wanted, 0)
    if first < 0 or surplus >= (cut.own_rows if cut.own_rows != cut.peer_rows else 1):
        end, wanted = first + len(pages), leg.wanted / cut.own_rows
        raise InvalidArgumentError(f"pages {first} to {end} are sent, and {leg.agent_id} wants {wanted:g}")
    return at, rows[: len(rows) - surplus]


def _announce(granted: list[Grant]) -> None:
    """Announce that their pages are written. A grant that is over, or whose reader needs no more, has reported that
    itself. Raises KvxferError's kinds."""
    for grant in granted:
        try:
            grant.ready(grant.blocks, complete=True)
        except GrantGoneError as error:
            log.debug("a grant ended before its pages were written: %s", error)
