"""Every worker that the router knows, from all its sources: which may get work, what runs there, and how well they are.

Fails static: a source that is away leaves its last list. It must never choose a worker: it makes the frozen snapshot
over which `policy.place` does, and has no rule of its own for what is ejected: those are in `policy.health` and
`policy.pairs`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvxfer.errors import LimitExceededError, NoWorkerError
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.candidates import Candidate
from kvxfer.policy.health import (
    Blame,
    CountedRequests,
    HealthEvent,
    HealthOptions,
    HealthState,
    WorkerHealth,
    blame_of,
)
from kvxfer.policy.pairs import Pair, PairOptions, PairTable, PairVerdict
from kvxfer.policy.silence import WorkerSigns
from kvxfer.protocol.http_url import HostList
from kvxfer.router.fleet.board import LoadBoard
from kvxfer.router.fleet.entry import WorkerClaim, WorkerEntry, WorkerHold, is_barred, weigh_suspicions
from kvxfer.router.fleet.facts import EngineIdentity, EngineLoad
from kvxfer.router.fleet.members import workers_of
from kvxfer.router.fleet.pools import EnginePools
from kvxfer.router.fleet.roster import Roster
from kvxfer.router.fleet.statistics import FleetCounters, WorkersStatistics, why_none
from kvxfer.router.fleet.worker import Worker, WorkerSource
from kvxfer.router.upstream import UpstreamCounters, UpstreamPool
from kvxfer.types import AgentRef, Member, Membership

log = logging.getLogger("kvxfer.router")

DRAINED_MAX = 65536
"""Workers that an admin may have drained at once, those that are not there included."""


class Workers:
    """The fleet. Belongs to one event loop; ``now`` is a monotonic clock in seconds, ``draw`` uniform in [0, 1)."""

    def __init__(
        self,
        *,
        health: HealthOptions | None = None,
        pairs: PairOptions | None = None,
        allowed: HostList | None = None,
        make_pool: Callable[..., UpstreamPool] = UpstreamPool,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        board: LoadBoard | None = None,
    ) -> None:
        self._options = health or HealthOptions()
        self._board = board
        self._allowed = allowed or HostList("allow_http_host", ())
        self._now = now
        self._draw = draw
        self._roster = Roster()
        self._entries: dict[AgentRef, WorkerEntry] = {}
        self._leaving: dict[AgentRef, WorkerEntry] = {}
        """Gone, with requests in flight."""
        self._offered: tuple[WorkerEntry, ...] = ()
        self._candidates: tuple[Candidate, ...] | None = None
        self._has_unsteady = False
        self._models: tuple[str, ...] | None = None
        self._drained: set[str] = set()
        self._pairs = PairTable(pairs)
        self.make_pool = make_pool
        """Also for what else asks engines: (address, limits), or the address alone."""
        self._pools = EnginePools(make_pool)
        self._counted = CountedRequests()
        self._counted_pairs = CountedRequests()
        self._revision = 0
        self._is_connected: bool | None = None
        self.counters = FleetCounters()
        self.on_probe_due: Callable[[], None] | None = None
        """Called when a worker is to be probed sooner than usual."""
        self.on_left: Callable[[AgentRef], None] | None = None
        """Called with a worker that is gone for good."""
        self.on_change: Callable[[], None] | None = None
        """Called when something else than the requests in flight has changed."""

    # Where workers come from.

    @property
    def is_connected(self) -> bool | None:
        """Whether the coordinator is being heard. None where none is asked."""
        return self._is_connected

    @is_connected.setter
    def is_connected(self, value: bool | None) -> None:
        if value != self._is_connected:
            self._is_connected = value
            self._weigh_suspicions()

    def update(self, membership: Membership, leg_secret: bytes = b"") -> None:
        """Take the coordinator's whole new view; an incarnation that it does not list has ended."""
        self._revision = membership.revision
        self.replace(WorkerSource.COORDINATOR, workers_of(membership, leg_secret))

    def replace(self, source: str, workers: Sequence[Worker]) -> None:
        """Take the whole new list of a source. A worker of which it says nothing new keeps its incarnation."""
        self._roster.replace(source, workers)
        self._join()

    def add(self, worker: Worker) -> None:
        """An admin's. Raises InvalidArgumentError where its name or its address is known already."""
        self._roster.add(worker)
        self._join()

    def move(self, entry: WorkerEntry, url: str) -> None:
        """A worker answers at another of the addresses that its source gives for it, and not where it was."""
        what = {"agent_id": entry.worker.agent_id, "from": entry.worker.url, "http_url": url}
        log.info("a worker is asked at another of its addresses", extra=what)
        self._roster.move(entry.worker.ref, url)
        self._join()

    def remove(self, agent_id: str) -> bool:
        """Forget a worker, and that it was drained: it gets no new work, and what runs there goes on. Returns whether
        it was known.

        It comes back where its source says something new of it: a new incarnation, another address, or its return
        after it was missing.
        """
        self._drained.discard(agent_id)
        is_known = self._roster.remove(agent_id)
        self._join()
        return is_known

    def drain(self, agent_id: str, on: bool = True) -> bool:
        """Give a worker no new work, or again; what runs there goes on. That holds for its name, whatever its source
        lists, until it is lifted or the worker is removed. Returns whether it is known now."""
        if on and agent_id not in self._drained and len(self._drained) >= DRAINED_MAX:
            raise LimitExceededError(f"{DRAINED_MAX} workers are drained already")
        (self._drained.add if on else self._drained.discard)(agent_id)
        found = [entry for entry in self._entries.values() if entry.worker.agent_id == agent_id]
        for entry in found:
            entry.is_drained = on
            entry.refresh()
        self._stale()
        return bool(found)

    def _join(self) -> None:
        """Take the roster's list."""
        self._take(self._roster.listed)

    def _take(self, listed: Mapping[AgentRef, Worker]) -> None:
        before = self._entries
        entries: dict[AgentRef, WorkerEntry] = {}
        for ref, worker in listed.items():
            entries[ref] = self._entry(before.get(ref) or self._leaving.pop(ref, None), worker)
        self._entries = entries
        self._weigh_suspicions()
        for ref in before.keys() - self._entries.keys():
            self._leave(before[ref])
        self._pools.retire({entry.worker.url for entry in before.values()} - self._urls())
        if self._board is not None:
            self._board.again()
        self._changed()
        if self.on_probe_due is not None and before.keys() != entries.keys():
            self.on_probe_due()

    def _entry(self, entry: WorkerEntry | None, worker: Worker) -> WorkerEntry:
        if entry is None:
            entry = WorkerEntry(worker, self._new_health(worker))
            entry.is_barred = is_barred(worker, self._allowed)
        elif entry.given != worker:
            is_moved = entry.given.url != worker.url
            entry.given = worker
            if is_moved:
                entry.is_barred = is_barred(worker, self._allowed)
        else:
            return entry
        entry.is_drained = worker.agent_id in self._drained
        entry.refresh()
        return entry

    def _new_health(self, worker: Worker) -> WorkerHealth:
        return WorkerHealth(self._options)

    def _weigh_suspicions(self) -> None:
        weigh_suspicions(self._entries.values(), is_connected=self._is_connected is True)
        self._stale()

    def _leave(self, entry: WorkerEntry) -> None:
        ref = entry.worker.ref
        self._pairs.forget(ref)
        if self.on_left is not None:
            self.on_left(ref)
        if not any(one.worker.agent_id == ref.agent_id for one in self._entries.values()):
            self.counters.forget(ref.agent_id)
        if entry.inflight:
            self._leaving[ref] = entry
        if entry.given.has_lease:
            watchers, entry.watchers = entry.watchers, set()
            for callback in watchers:
                callback()

    def _urls(self) -> set[str]:
        return {entry.worker.url for entry in self._entries.values()}

    # What placement and an attempt ask.

    def candidates(self) -> tuple[Candidate, ...]:
        """The frozen snapshot for one placement."""
        self._hear()
        kept = self._candidates
        if kept is not None and not self._has_unsteady:
            return kept
        now_s = self._now() if self._has_unsteady else 0.0
        kept = self._candidates = tuple([entry.kept or entry.candidate(now_s) for entry in self._offered])
        if self._has_unsteady:
            self._has_unsteady = not all(entry.health.is_steady for entry in self._offered)
        return kept

    def candidate(self, ref: AgentRef) -> Candidate:
        """One of them as it is now. Raises NoWorkerError where it is not known, or no longer."""
        entry = self._known(ref)
        return entry.kept or entry.candidate(self._now())

    def ejected_pairs(self) -> frozenset[Pair]:
        """The pairs that get no request now, for ``place``."""
        return self._pairs.ejected(self._now())

    def worker(self, ref: AgentRef) -> Worker:
        """Raises NoWorkerError where it is not known, or no longer."""
        return self._known(ref).worker

    def pool(self, ref: AgentRef) -> UpstreamPool:
        """The connections to its address. Raises NoWorkerError where it is not known, or no longer."""
        return self._pools.get(self._known(ref).worker.url, is_leaving=ref not in self._entries)

    def signs(self, ref: AgentRef) -> WorkerSigns:
        """What is known of a worker one of whose streams is silent. Raises NoWorkerError where it is not known."""
        entry, counters = self._known(ref), self.pool(ref).counters
        return entry.signs(self._now(), heard_s=counters.heard_s, others=counters.in_flight - 1)

    def _known(self, ref: AgentRef) -> WorkerEntry:
        entry = self._entries.get(ref) or self._leaving.get(ref)
        if entry is None:
            raise NoWorkerError(f"worker {ref} is gone")
        return entry

    def claim(self, ref: AgentRef, part: Part, request_id: str = "") -> WorkerClaim:
        """Count one request in flight at a worker until the claim is released. Taken right after the placement: one
        that is to be tried by one request gets no second. ``request_id`` is the router's own. Raises NoWorkerError."""
        entry = self._known(ref)
        claim = WorkerClaim(entry, part, request_id, self._now(), self)
        self._count(entry)
        return claim

    def hold(self, ref: AgentRef) -> WorkerHold | None:
        """Count a prompt's KV that is read from a worker until the hold is released. None where it is not known."""
        entry = self._entries.get(ref) or self._leaving.get(ref)
        return None if entry is None else WorkerHold(entry, self.released)

    def _count(self, entry: WorkerEntry) -> None:
        self._candidates = None
        if self._board is not None:
            self._board.show(entry.worker.ref, entry.shown)

    def released(self, entry: WorkerEntry) -> None:
        """A claim or a hold on it is over."""
        self._count(entry)
        if self._leaving and not entry.inflight:
            self._leaving.pop(entry.worker.ref, None)
        self.sweep()

    def _hear(self) -> None:
        """Take what other processes have in flight."""
        changed = () if self._board is None else self._board.changed()
        for ref, counts in changed:
            entry = self._entries.get(ref) or self._leaving.get(ref)
            if entry is not None:
                entry.hear(counts)
                self._candidates = None

    def watch(self, ref: AgentRef, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called when the coordinator says that this very incarnation has ended: at once, within
        this call, where it has already. Returns what ends the watch. Other sources never say so."""
        entry = self._entries.get(ref)
        if entry is None:
            left = self._leaving.get(ref)
            if left is None or left.given.has_lease:
                callback()
            return lambda: None
        entry.watchers.add(callback)
        return lambda: entry.watchers.discard(callback)

    # What an attempt tells.

    def succeeded(self, ref: AgentRef, request_id: str = "") -> None:
        """A worker began to answer a request: with the first byte of a 200, or with an answer that is the client's own
        fault. ``request_id`` is what its claim was taken with."""
        entry = self._entries.get(ref)
        if entry is not None and not entry.health.is_plain:
            if entry.health.succeeded(request_id, self._now(), self._draw()):
                self._moved(entry)
            self._changed_one(entry)

    def failed(self, ref: AgentRef, kind: str, request_id: str = "") -> None:
        """A request failed at a worker; ``kind`` is one of ``policy.health.BLAMES``. However often a request is tried,
        its failures count once in the fleet, but for a refused connection, which is news of each worker."""
        is_counted = blame_of(kind) is Blame.IN_A_ROW and self._counted.add(request_id)
        entry = self._entries.get(ref)
        if entry is None:
            return
        if entry.health.failed(kind, request_id, self._now(), self._draw(), is_counted=is_counted):
            self._moved(entry)
        self._changed_one(entry)
        if self.on_probe_due is not None and entry.health.probe_due_s is not None:
            self.on_probe_due()

    def pair_started(self, prefill: AgentRef, decode: AgentRef) -> None:
        """A request goes to that pair: where it is ejected, no other request tries it until a verdict."""
        self._pairs.started(prefill, decode, self._now())

    def pair_succeeded(self, prefill: AgentRef, decode: AgentRef) -> None:
        """What P computed reached D."""
        if prefill in self._entries and decode in self._entries and self._pairs.succeeded(prefill, decode, self._now()):
            log.info("a pair is back", extra={"prefill": prefill.agent_id, "decode": decode.agent_id})

    def pair_failed(self, prefill: AgentRef, decode: AgentRef, request_id: str = "") -> PairVerdict:
        """What P computed did not reach D, while both answered. Counts once a request; the verdict says against what,
        and a worker's own share in it has been counted."""
        if prefill not in self._entries or decode not in self._entries or self._counted_pairs.add(request_id):
            return PairVerdict.UNKNOWN
        before = self._pairs.ejections.get((prefill, decode), 0)
        verdict = self._pairs.failed(prefill, decode, self._now(), self._draw())
        if self._pairs.ejections.get((prefill, decode), 0) > before:
            self.counters.add(self.counters.pair_ejections, prefill.agent_id, decode.agent_id)
            log.warning("a pair is ejected", extra={"prefill": prefill.agent_id, "decode": decode.agent_id})
        if verdict in (PairVerdict.PREFILL, PairVerdict.DECODE):
            self.failed(prefill if verdict is PairVerdict.PREFILL else decode, "transfer", request_id)
        return verdict

    # What the prober asks and tells.

    def entries(self) -> list[WorkerEntry]:
        """Those with an address that requests are sent to."""
        return [entry for entry in self._entries.values() if entry.worker.url and not entry.is_barred]

    def probed(self, entry: WorkerEntry, event: HealthEvent) -> None:
        """A probe ended."""
        ref = entry.worker.ref
        if self._entries.get(ref) is not entry:
            return
        self.counters.add(self.counters.probes, ref.agent_id, event.value)
        if entry.health.is_plain and event is HealthEvent.PROBE_PASSED:
            return
        if entry.health.probed(event, self._now(), self._draw()):
            self._moved(entry)
        self._changed_one(entry)

    def learn(
        self, entry: WorkerEntry, *, identity: EngineIdentity | None = None, said: EngineLoad | None = None
    ) -> None:
        """What a worker says of itself."""
        if (identity is None or identity == entry.identity) and (said is None or said == entry.said):
            return
        had_model = entry.has_model
        entry.identity = entry.identity if identity is None else identity
        entry.said = entry.said if said is None else said
        entry.refresh()
        self._stale()
        if identity is not None or not had_model:
            self._changed()

    def _moved(self, entry: WorkerEntry) -> None:
        """Its state changed by an event."""
        worker, health = entry.worker, entry.health
        state = health.state(self._now())
        what = {"agent_id": worker.agent_id, "http_url": worker.url, "state": state.value}
        if state is HealthState.OUT:
            self.counters.add(self.counters.ejections, worker.agent_id, health.ejected_for)
            log.warning("a worker is ejected", extra={**what, "reason": health.ejected_for})
        else:
            log.info("a worker comes back", extra=what)

    def _changed_one(self, entry: WorkerEntry) -> None:
        entry.changed()
        self._has_unsteady = self._has_unsteady or not entry.health.is_steady
        self._stale()

    def _stale(self) -> None:
        self._candidates = None
        if self.on_change is not None:
            self.on_change()

    def _changed(self) -> None:
        self._models = None
        self._offered = tuple(entry for entry in self._entries.values() if entry.is_offered)
        self._has_unsteady = not all(entry.health.is_steady for entry in self._offered)
        self._stale()

    # What operators ask.

    def members(self) -> tuple[Member, ...]:
        """All known members, by agent id."""
        return tuple(sorted((entry.worker.member for entry in self._entries.values()), key=lambda member: member.ref))

    def models(self) -> tuple[str, ...]:
        """Names of the models that some worker with an HTTP address serves."""
        if self._models is None:
            served = [entry.worker for entry in self.entries() if entry.has_model]
            names = {name for worker in served for name in (worker.member.info.model, *worker.aliases)}
            self._models = tuple(sorted(names))
        return self._models

    def without_model(self) -> tuple[str, ...]:
        """Workers that get no request yet, because they have not said which model they serve."""
        return tuple(sorted(entry.worker.agent_id for entry in self.entries() if not entry.has_model))

    def why_none(self) -> str:
        """Why no model is served, for people."""
        troubles = {entry.worker.agent_id: entry.trouble for entry in self.entries()}
        return why_none([(name, troubles[name]) for name in self.without_model()])

    def inflight(self) -> dict[tuple[str, str], int]:
        """Requests in flight by (agent id, part); known workers are listed with 0 as well."""
        self._hear()
        counts: dict[tuple[str, str], int] = {}
        for entry in (*self._entries.values(), *self._leaving.values()):
            for part, count in entry.inflight_by_part.items():
                key = (entry.worker.agent_id, part)
                counts[key] = counts.get(key, 0) + count
        return counts

    def parts(self) -> set[Part]:
        """What the known workers can do."""
        return {part for entry in self._entries.values() for part, _ in entry.parts}

    def states(self) -> dict[str, HealthState]:
        """The state of every worker with an address, by agent id."""
        now_s = self._now()
        return {entry.worker.agent_id: entry.health.state(now_s) for entry in self.entries()}

    def describe(self) -> list[dict[str, Any]]:
        """JSON-able account of every known worker, for ``GET /v1/workers``."""
        self._hear()
        now_s = self._now()
        return [entry.describe(now_s) for _, entry in sorted(self._entries.items())]

    def describe_pairs(self) -> list[dict[str, Any]]:
        """JSON-able account of the pairs that are ejected now."""
        ejected = sorted(self.ejected_pairs())
        return [{"prefill": prefill.agent_id, "decode": decode.agent_id} for prefill, decode in ejected]

    def statistics(self) -> WorkersStatistics:
        now_s = self._now()
        roles = [entry.worker.member.info.role for entry in self._entries.values() if entry.is_ready(now_s)]
        states = [entry.health.state(now_s).value for entry in self.entries()]
        return WorkersStatistics(
            is_connected=self._is_connected,
            revision=self._revision,
            members=len(self._entries),
            prefill_ready=sum(role.can_prefill for role in roles),
            decode_ready=sum(role.can_decode for role in roles),
            ejected=sum(
                not entry.health.is_steady and entry.health.is_closed(now_s) for entry in self._entries.values()
            ),
            inflight=sum(self.inflight().values()),
            states={state.value: states.count(state.value) for state in HealthState},
            without_model=len(self.without_model()),
            drained=sum(entry.is_drained for entry in self._entries.values()),
            shadowed=len(self._roster.shadowed),
            pairs=len(self._pairs),
            pairs_ejected=self._pairs.ejected_count,
            pools=len(self._pools),
            pools_retired=self._pools.retired_count,
        )

    def connections(self) -> dict[str, UpstreamCounters]:
        """What each pool of connections counts, by its address. Workers behind one address share it."""
        return self._pools.counters()

    def sweep(self) -> None:
        """Close the connections to addresses that have neither a worker nor a request any more."""
        self._pools.sweep()

    async def close(self) -> None:
        """Close every connection."""
        await self._pools.close()

    def __repr__(self) -> str:
        return f"Workers(revision={self._revision}, members={len(self._entries)}, is_connected={self._is_connected})"
