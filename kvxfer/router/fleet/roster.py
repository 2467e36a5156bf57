"""The lists of all sources as one list of workers.

Decides which of two that name the same engine counts, which incarnation an unchanged worker keeps, and what an admin's
removal means. It must never know whether a worker answers, nor what runs there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvxfer.errors import InvalidArgumentError, LimitExceededError
from kvxfer.router.fleet.places import Places
from kvxfer.router.fleet.worker import Worker, WorkerSource
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.router")


WORKERS_MAX = 16384
"""Of each source, and of all where an admin adds one."""


class Roster:
    """``listed`` is the one list; ``shadowed`` are the workers that another source has too, and that count there."""

    def __init__(self) -> None:
        self._given: dict[str, dict[AgentRef, Worker]] = {source: {} for source in WorkerSource}
        self._removed: set[AgentRef] = set()
        self.listed: dict[AgentRef, Worker] = {}
        self.shadowed: frozenset[AgentRef] = frozenset()

    def replace(self, source: str, workers: Sequence[Worker]) -> None:
        """The whole new list of a source, in which a name stands once unless it is the coordinator's. A worker of which
        it says nothing new keeps its incarnation (``Worker.succeeds``)."""
        known = self._given.get(source, {})
        by_name = {} if source == WorkerSource.COORDINATOR else {one.agent_id: one for one in known.values()}
        given: dict[AgentRef, Worker] = {}
        for worker in workers:
            old = by_name.get(worker.agent_id)
            kept = worker.as_of(old) if old is not None and worker.succeeds(old) else worker
            given[kept.ref] = kept
        self._given[source] = given
        self._join()

    def add(self, worker: Worker) -> None:
        """An admin's. Raises InvalidArgumentError where its name or its address is known already (a worker without a
        rank is all ranks of its address), LimitExceededError where there are WORKERS_MAX."""
        places: Places[Worker] = Places()
        names: dict[str, Worker] = {}
        for one in self.listed.values():
            places.take(one, one)
            names[one.agent_id] = one
        known = names.get(worker.agent_id) or places.find(worker)
        if known is not None:
            raise InvalidArgumentError(f"{known.agent_id} at {known.url} is known already, from {known.source}")
        if len(self.listed) >= WORKERS_MAX:
            raise LimitExceededError(f"there are {WORKERS_MAX} workers already")
        self.replace(WorkerSource.ADMIN, (*self._given[WorkerSource.ADMIN].values(), worker))

    def move(self, ref: AgentRef, url: str) -> None:
        """A worker is reached at another of its addresses from now on."""
        for given in self._given.values():
            if ref in given:
                given[ref] = given[ref].at(url)
        self._join()

    def remove(self, agent_id: str) -> bool:
        """Take a worker off the list until its source says something new of it. Returns whether it was there."""
        found = [worker for worker in self.listed.values() if worker.agent_id == agent_id]
        for worker in found:
            if self._given[WorkerSource.ADMIN].pop(worker.ref, None) is None:
                self._removed.add(worker.ref)
        self._join()
        return bool(found)

    def _join(self) -> None:
        listed: dict[AgentRef, Worker] = {}
        shadowed: set[AgentRef] = set()
        names: set[str] = set()
        places: Places[bool] = Places()
        for source, given in self._given.items():
            is_coordinator = source == WorkerSource.COORDINATOR
            for ref, worker in given.items():
                if ref in self._removed:
                    continue
                is_known = worker.agent_id in names or places.find(worker) is not None
                if is_known and not is_coordinator:
                    shadowed.add(ref)
                    if ref not in self.shadowed:
                        log.warning(
                            "a worker is known from another source, which counts",
                            extra={"agent_id": worker.agent_id, "source": str(source), "http_url": worker.url},
                        )
                    continue
                listed[ref] = worker
                names.add(worker.agent_id)
                places.take(worker, True)
        self._removed &= {ref for given in self._given.values() for ref in given}
        self.listed = listed
        self.shadowed = frozenset(shadowed)

    def __repr__(self) -> str:
        return f"Roster(listed={len(self.listed)}, shadowed={len(self.shadowed)}, removed={len(self._removed)})"
