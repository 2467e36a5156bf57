"""The fleet in a process that serves: as the leader tells it, and what requests meet there is told to the leader.

So there is one set of ejected workers and pairs, and of drains: this process ejects nothing by itself. It decides only
what is worth telling: a success at a worker of which nothing bad is known is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvxfer.policy.health import WorkerHealth
from kvxfer.policy.pairs import NO_PAIRS, Pair, PairVerdict
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.group.messages import NO_SEAT, ClosedPair, Update
from kvxfer.router.group.plain import to_plain
from kvxfer.router.group.segment import SharedBoard
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.router")

TELL_PAIR_S = 1.0
"""A pair's success is told at most so often while nothing bad is known of it."""

Tell = Callable[..., None]


class _TellingHealth(WorkerHealth):
    """As the leader says; trials that begin or end here are told to it."""

    __slots__ = ("_ref", "_tell")

    def __init__(self, options: Any, ref: AgentRef, tell: Tell) -> None:
        super().__init__(options)
        self._ref = to_plain(ref)
        self._tell = tell

    def begin(self, request_id: str, now_s: float) -> bool:
        is_trial = super().begin(request_id, now_s)
        if is_trial:
            self._tell("trial", self._ref, request_id, True)
        return is_trial

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self._tell("trial", self._ref, request_id, False)


class FollowingWorkers(Workers):
    """``tell`` sends a message to the leader."""

    def __init__(self, board: SharedBoard, tell: Tell, **more: Any) -> None:
        super().__init__(board=board, **more)
        self._shared = board
        self._tell = tell
        self._listed: dict[AgentRef, Worker] = {}
        self._closed: dict[Pair, ClosedPair] = {}
        self._told_pairs: dict[Pair, float] = {}

    def apply(self, update: Update) -> None:
        """Take what the leader says."""
        for ref in update.unseated:
            self._shared.unseat(ref)
        for ref in update.gone:
            self._listed.pop(ref, None)
        for account in update.workers:
            self._listed[account.given.ref] = account.given
            if account.seat != NO_SEAT:
                self._shared.seat(account.given.ref, account.seat)
        self._is_connected = update.is_connected
        self._take(self._listed)
        for account in update.workers:
            entry = self._entries[account.given.ref]
            entry.identity, entry.said = account.identity, account.said
            entry.is_drained, entry.trouble = account.is_drained, account.trouble
            entry.worked_s = account.worked_s
            entry.health.take(account.health)
            entry.refresh()
            self._shared.show(account.given.ref, entry.shown)
        if update.pairs is not None:
            self._closed = {(pair.prefill, pair.decode): pair for pair in update.pairs}
        self._changed()

    def _new_health(self, worker: Worker) -> WorkerHealth:
        return _TellingHealth(self._options, worker.ref, self._tell)

    def ejected_pairs(self) -> frozenset[Pair]:
        if not self._closed:
            return NO_PAIRS
        now_s = self._now()
        return frozenset(pair for pair, account in self._closed.items() if now_s < account.due_s)

    # What an attempt tells.

    def succeeded(self, ref: AgentRef, request_id: str = "") -> None:
        entry = self._entries.get(ref)
        if entry is not None and not entry.health.is_plain:
            self._tell("succeeded", to_plain(ref), request_id)

    def failed(self, ref: AgentRef, kind: str, request_id: str = "") -> None:
        self._tell("failed", to_plain(ref), kind, request_id)

    def pair_started(self, prefill: AgentRef, decode: AgentRef) -> None:
        closed = self._closed.get((prefill, decode))
        if closed is None or not closed.due_s:
            return
        now_s = self._now()
        if now_s >= closed.due_s:  # as the leader will say in a moment
            self._closed[prefill, decode] = ClosedPair(prefill, decode, now_s + closed.delay_s, closed.delay_s)
            self._tell("pair_started", to_plain(prefill), to_plain(decode))

    def pair_succeeded(self, prefill: AgentRef, decode: AgentRef) -> None:
        pair, now_s = (prefill, decode), self._now()
        if pair not in self._closed and now_s - self._told_pairs.get(pair, -TELL_PAIR_S) < TELL_PAIR_S:
            return
        self._told_pairs[pair] = now_s
        self._tell("pair_succeeded", to_plain(prefill), to_plain(decode))

    def pair_failed(self, prefill: AgentRef, decode: AgentRef, request_id: str = "") -> PairVerdict:
        """The leader finds the verdict."""
        self._tell("pair_failed", to_plain(prefill), to_plain(decode), request_id)
        return PairVerdict.UNKNOWN

    def _leave(self, entry: Any) -> None:
        ref = entry.worker.ref
        self._told_pairs = {pair: at_s for pair, at_s in self._told_pairs.items() if ref not in pair}
        super()._leave(entry)
