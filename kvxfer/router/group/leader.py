"""The fleet of which all processes of one router are told: what is new of it, and what they report.

Decides which seat of the shared memory a worker has, and when a member is told what. Whether a worker is ejected is
decided where it always is, in `fleet.workers`: a member's report is an event there like any other. It must never know a
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.policy.pairs import Pair
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.group.channel import Channel, Message
from kvxfer.router.group.messages import NO_SEAT, ClosedPair, Update, WorkerAccount
from kvxfer.router.group.plain import from_plain, to_plain
from kvxfer.router.group.seats import Seats
from kvxfer.router.group.segment import SEATS, SharedBoard, SharedCounts
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.router")

GATHER_S = 0.002
"""Changes within so long are told together."""
SETTLE_S = 2.0
LOOK_S = 0.25
"""What changes by time alone, such as the end of a slow start, is looked for so often."""


class LeadingWorkers(Workers):
    """The fleet, with what the leader needs of it beside what every router needs."""

    def accounts(self, now_s: float) -> list[WorkerAccount]:
        """Of every known worker, without its seat."""
        return [
            WorkerAccount(
                entry.given,
                entry.identity,
                entry.said,
                entry.is_drained,
                entry.trouble,
                entry.health.account(now_s),
                entry.worked_s,
            )
            for entry in self._entries.values()
        ]

    def closed_pairs(self) -> dict[Pair, tuple[float, float]]:
        """As `PairTable.closed`."""
        return self._pairs.closed()

    def trial(self, ref: AgentRef, request_id: str, *, begins: bool) -> None:
        """A member sent a request that is a trial, or that one is over."""
        entry = self._entries.get(ref)
        if entry is not None:
            if begins:
                entry.health.begin(request_id, self._now())
            else:
                entry.health.end(request_id)
            self._changed_one(entry)


@dataclasses.dataclass
class ToldMember:
    """A member, as far as it is told things."""

    row: int
    channel: Channel
    applied: int = 0
    trials: set[tuple[AgentRef, str]] = dataclasses.field(default_factory=set)
    """That it began and did not end."""


class Leader:
    """Belongs to one event loop. Made before any source runs."""

    def __init__(
        self,
        workers: LeadingWorkers,
        board: SharedBoard,
        segment: SharedCounts,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._board = board
        self._segment = segment
        self._now = now
        self._seats: Seats[AgentRef] = Seats(SEATS)
        self._listeners: dict[int, ToldMember] = {}
        self._told: dict[AgentRef, WorkerAccount] = {}
        self._told_pairs: tuple[ClosedPair, ...] = ()
        self._is_connected: bool | None = None
        self._version = 0
        self._failing: set[Pair] = set()
        """Pairs that failed and did not succeed since: every success there is worth telling."""
        self._is_due = asyncio.Event()
        self._has_applied = asyncio.Event()
        workers.on_change = self._is_due.set

    # Members.

    def join(self, listener: ToldMember) -> None:
        """Tell a new member everything."""
        self._tell()
        self._listeners[listener.row] = listener
        whole = Update(self._version, self._is_connected, workers=tuple(self._told.values()), pairs=self._told_pairs)
        listener.applied = self._version
        listener.channel.send("update", to_plain(whole))

    def leave(self, row: int) -> None:
        """A member has ended. Its claims are over, and so are its trials."""
        self._segment.clear(row)
        listener = self._listeners.pop(row, None)
        if listener is not None:
            for ref, request_id in listener.trials:
                self._workers.trial(ref, request_id, begins=False)
        self._is_due.set()

    def report(self, row: int, message: Message) -> None:
        """What a member met. A report that makes no sense is logged, and changes nothing."""
        listener = self._listeners.get(row)
        if listener is None:
            return
        try:
            self._report(listener, message)
        except (KvxferError, TypeError, ValueError, IndexError) as error:
            log.error("a report of another process of this router is not taken: %s", error)

    def _report(self, listener: ToldMember, message: Message) -> None:
        workers = self._workers
        match message:
            case ["applied", int(version)]:
                listener.applied = version
                self._has_applied.set()
            case ["failed", ref, kind, request_id]:
                workers.failed(_ref(ref), kind, request_id)
            case ["succeeded", ref, request_id]:
                workers.succeeded(_ref(ref), request_id)
            case ["trial", ref, request_id, begins]:
                known = _ref(ref)
                (listener.trials.add if begins else listener.trials.discard)((known, request_id))
                workers.trial(known, request_id, begins=begins)
            case ["pair_started", prefill, decode]:
                workers.pair_started(_ref(prefill), _ref(decode))
                self._is_due.set()
            case ["pair_succeeded", prefill, decode]:
                pair = _ref(prefill), _ref(decode)
                workers.pair_succeeded(*pair)
                self._failing.discard(pair)
                self._is_due.set()
            case ["pair_failed", prefill, decode, request_id]:
                pair = _ref(prefill), _ref(decode)
                workers.pair_failed(*pair, request_id)
                self._failing.add(pair)
                self._is_due.set()
            case _:
                log.error("a process of this router said what is not understood: %.100r", message[0])

    # What they are told.

    async def run(self) -> None:
        """Tell members what is new, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._is_due.wait()
                await asyncio.sleep(GATHER_S)
            except TimeoutError:
                pass
            self._is_due.clear()
            try:
                self._tell()
            except Exception:
                log.exception("telling the processes of this router broke")

    async def settle(self) -> None:
        """Return when every member does as is decided now, or is too slow: what ran there before is counted by then."""
        self._tell()
        version = self._version
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(listener.applied < version for listener in self._listeners.values()):
                    self._has_applied.clear()
                    await self._has_applied.wait()

    def _tell(self) -> None:
        update = self._news()
        if update is not None:
            plain = to_plain(update)
            for listener in self._listeners.values():
                listener.channel.send("update", plain)

    def _news(self) -> Update | None:
        now_s = self._now()
        accounts: dict[AgentRef, WorkerAccount] = {}
        for account in self._workers.accounts(now_s):
            ref = account.given.ref
            seat = self._seats.take(ref)
            if seat != NO_SEAT:
                self._board.seat(ref, seat)
            accounts[ref] = dataclasses.replace(account, seat=seat)
        changed = tuple(account for ref, account in accounts.items() if self._told.get(ref) != account)
        gone = tuple(ref for ref in self._told if ref not in accounts)
        applied = min((listener.applied for listener in self._listeners.values()), default=self._version)
        unseated = self._seats.freed(applied, self._segment.inflight)
        pairs = self._pairs(set(accounts))
        is_connected = self._workers.is_connected
        if not (changed or gone or unseated) and (pairs, is_connected) == (self._told_pairs, self._is_connected):
            return None
        self._version += 1
        for ref in gone:
            self._seats.leave(ref, self._version)
        for ref in unseated:
            self._board.unseat(ref)
        told_pairs = None if pairs == self._told_pairs else pairs
        self._told, self._told_pairs, self._is_connected = accounts, pairs, is_connected
        return Update(self._version, is_connected, changed, gone, unseated, told_pairs)

    def _pairs(self, known: set[AgentRef]) -> tuple[ClosedPair, ...]:
        self._failing = {pair for pair in self._failing if known.issuperset(pair)}
        closed = self._workers.closed_pairs()
        told = {pair: ClosedPair(*pair) for pair in self._failing}
        told |= {pair: ClosedPair(*pair, due_s, delay_s) for pair, (due_s, delay_s) in closed.items()}
        return tuple(told[pair] for pair in sorted(told))


def _ref(plain: Any) -> AgentRef:
    return from_plain(AgentRef, plain)
