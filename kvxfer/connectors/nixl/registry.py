"""What one agent has registered, row by row of NIXL's lists. Decides which registration a row means; must never know
peers. Each row is a region of kvxfer: an open-ended grant and offer of all its bytes to every holder of our metadata.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from kvxfer.connectors.nixl.dlists import nixlRegDList
from kvxfer.connectors.nixl.errors import nixlError, nixlInvalidParamError, nixlNotFoundError, translate, translated
from kvxfer.errors import BlocksBusyError, KvxferError
from kvxfer.transport.base import Region
from kvxfer.transport.engine import MemoryRegistration, TransferEngine
from kvxfer.types import RegionRecord

DRAIN_S = 2.0
"""How long taking memory back waits for transfers that still use it."""
DRAIN_STEP_S = 0.001

Key = tuple[int, int]


class Registry:
    """Registered rows, by (address, length). A row registered twice must be deregistered twice. Thread-safe."""

    def __init__(self, poster: TransferEngine) -> None:
        self._poster = poster
        self._lock = threading.RLock()
        self._held: dict[Key, list[MemoryRegistration | None]] = {}
        """``None``: a row of no bytes, which no peer reads or writes."""
        self.empties: frozenset[int] = frozenset()
        """Where rows of no bytes are registered."""

    def register(self, descs: nixlRegDList) -> None:
        """All rows, or none. A row of no bytes may lie anywhere. Raises nixlInvalidParamError for an empty list, or
        bytes at 0."""
        if descs.isEmpty():
            raise nixlInvalidParamError("a list to register must not be empty")
        done: list[tuple[Key, MemoryRegistration | None]] = []
        with self._lock:
            try:
                for place, (address, length, _) in enumerate(descs.rows.tolist()):
                    if length == 0:
                        done.append(((address, length), None))
                        continue
                    if address == 0:
                        raise nixlInvalidParamError(f"descriptor {place} is no memory: {length} bytes at {address:#x}")
                    with translated():
                        region = Region(address, length, descs.owners or None)
                        done.append(((address, length), self._poster.register(region)))
            except BaseException:
                for _, registration in done:
                    if registration is not None:
                        self._poster.deregister(registration)
                raise
            for key, registration in done:
                self._held.setdefault(key, []).append(registration)
            self._find_empties(descs)

    def deregister(self, descs: nixlRegDList) -> None:
        """Once this returns no peer reads or writes these rows.

        Raises nixlNotFoundError (and takes nothing back) where a row is not registered, nixlRepostActiveError where a
        transfer does not let go of one within DRAIN_S; the others are taken back.
        """
        failure: nixlError | None = None
        with self._lock:
            wanted = self._find(descs)
            for key, registration in wanted:
                try:
                    if registration is not None:
                        self._take_back(registration)
                except KvxferError as error:
                    failure = failure or translate(error)
                    continue
                self._held[key].remove(registration)
                if not self._held[key]:
                    del self._held[key]
            self._find_empties(descs)
        if failure is not None:
            raise failure

    def records(self, descs: nixlRegDList) -> tuple[RegionRecord, ...]:
        """Of these rows. Raises nixlNotFoundError."""
        with self._lock:
            return tuple(found.record for _, found in self._find(descs) if found is not None)

    def _find_empties(self, changed: nixlRegDList) -> None:
        if not changed.rows[:, 1].all():
            self.empties = frozenset(address for address, length in self._held if length == 0)

    def __repr__(self) -> str:
        return f"<Registry of {sum(map(len, self._held.values()))} rows>"

    def _find(self, descs: nixlRegDList) -> list[tuple[Key, MemoryRegistration | None]]:
        left: dict[Key, list[MemoryRegistration | None]] = {}
        found = []
        for place, (address, length, _) in enumerate(descs.rows.tolist()):
            key = (address, length)
            stack = left.setdefault(key, list(self._held.get(key, ())))
            if not stack:
                raise nixlNotFoundError(f"descriptor {place}, {length} bytes at {address:#x}, is not registered")
            found.append((key, stack.pop()))
        if not found:
            raise nixlNotFoundError("an empty list is not registered")
        return found

    def _take_back(self, registration: MemoryRegistration) -> None:
        end_s = time.monotonic() + DRAIN_S
        while True:
            try:
                self._poster.deregister(registration)
                return
            except BlocksBusyError:
                if time.monotonic() > end_s:
                    raise
            self._poster.poll()
            time.sleep(DRAIN_STEP_S)


def newest(records: Iterable[RegionRecord]) -> tuple[RegionRecord, ...]:
    """Without those that a later registration covers wholly: region ids grow, and where a peer registered memory again,
    the older record is likely stale."""
    kept: list[RegionRecord] = []
    for record in sorted(records, key=lambda r: (r.address, -r.length_bytes, -r.region_id)):
        last = kept[-1] if kept else None
        end = record.address + record.length_bytes
        if last is not None and last.region_id > record.region_id and end <= last.address + last.length_bytes:
            continue
        kept.append(record)
    return tuple(kept)
