"""Counts that all processes of one router share: a segment of memory with one row for each process.

::

            | inside | connections | serving | -  | worker 0: prefill, decode, held | worker 1: ... | keys: see below |
    row 0   |   12   |     40      |    1    |    |     2          10      0        |     0         |                 |
    row 1   |   ...

Each cell is an aligned 64-bit number that one process alone writes, whole, in one store, from a count that it keeps
itself. So no reader sees half a number, no two writers meet, and nothing needs a lock. A reader adds up the other
rows. The leader empties the row of a process that it has seen end, before it gives that row to another.

At the end of a row, for each limited holder of API keys (``key_cells``): its requests in flight, and what was ever used
of its limits of requests and of tokens, in millionths. What was used stays used when a process ends, so the leader
leaves that in the row, and the next process goes on from there. The leader has a row for this alone: the last one.
Before these lies which worker keeps which Response (``router.responses``); that stays too, for the workers outlive the
process.

The memory has no name: it is a memfd, which children inherit. Decides where a number is; it must never know why.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError
from kvxfer.router.fleet.board import InFlight
from kvxfer.router.responses import ROW_CELLS as RESPONSE_CELLS
from kvxfer.types import AgentRef

INSIDE, CONNECTIONS, SERVING = 0, 1, 2
HEADER = 8
"""Cells before the first seat: one cache line."""
SEATS = 16384
"""Workers whose load is shared. One beyond them is counted by each process for itself."""
KEY_SEATS = 2048
"""Limited holders of API keys whose use is shared: twice as many as a file may name, as one that is gone keeps its seat
for a moment. One beyond them has its limits in each process by itself."""
KEY_INFLIGHT, KEY_REQUESTS, KEY_TOKENS = 0, 1, 2
_KEY_NUMBERS = 3
_CELL = 8
_UNSEEN = -1
_EACH = len(InFlight._fields)
_LOAD_CELLS = HEADER + _EACH * SEATS
_KEY_CELLS = _KEY_NUMBERS * KEY_SEATS
_ROW_CELLS = _LOAD_CELLS + RESPONSE_CELLS + _KEY_CELLS

Cells = npt.NDArray[np.int64]


class SharedCounts:
    """The memory, of ``rows`` processes. ``close`` lets the descriptor go; the mapping lasts as long as the object."""

    def __init__(self, descriptor: int, rows: int) -> None:
        self.descriptor = descriptor
        size = rows * _ROW_CELLS * _CELL
        if os.fstat(descriptor).st_size != size:
            raise InvalidArgumentError(f"the shared memory is not that of {rows} processes")
        self._memory = mmap.mmap(descriptor, size)
        self.table: Cells = np.frombuffer(self._memory, dtype=np.int64).reshape(rows, _ROW_CELLS)
        self.keys: Cells = self.table[:, -_KEY_CELLS:].reshape(rows, _KEY_NUMBERS, KEY_SEATS)
        """The same memory: by row, number (KEY_INFLIGHT and the others) and seat."""
        self.responses: Cells = self.table[:, _LOAD_CELLS:-_KEY_CELLS]
        """The same memory: as `router.responses` has it."""

    @classmethod
    def make(cls, rows: int) -> SharedCounts:
        """New memory, all zero, that no process can open by a name, and whose size stays."""
        descriptor = os.memfd_create("kvxfer-router", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, rows * _ROW_CELLS * _CELL)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(descriptor, rows)

    def close(self) -> None:
        os.close(self.descriptor)

    def clear(self, row: int) -> None:
        """The process that wrote this row has ended: nothing of it is in flight. What it used stays used."""
        self.table[row, :_LOAD_CELLS] = 0
        self.keys[row, KEY_INFLIGHT] = 0

    def inflight(self, seat: int) -> int:
        """Of all processes, at one worker."""
        at = HEADER + _EACH * seat
        return int(self.table[:, at : at + _EACH].sum())

    def key_inflight(self, seat: int) -> int:
        """Of all processes, of one holder of API keys."""
        return int(self.keys[:, KEY_INFLIGHT, seat].sum())


class SharedBoard:
    """A `LoadBoard` over a segment. ``row`` is this process's own; the leader, which serves no request, has none."""

    def __init__(self, segment: SharedCounts, row: int | None) -> None:
        self._table = segment.table
        self._row: Cells | None = None if row is None else segment.table[row]
        self._others = [index for index in range(len(segment.table)) if index != row]
        self._seats: dict[AgentRef, int] = {}
        self._refs: list[AgentRef | None] = []
        self._seen: Cells = np.zeros(0, dtype=np.int64)

    def seat(self, ref: AgentRef, seat: int) -> None:
        """That worker's counts are there from now on."""
        if self._seats.get(ref) == seat:
            return
        if not 0 <= seat < SEATS:
            raise InvalidArgumentError(f"seat {seat} is not one of {SEATS}")
        self._seats[ref] = seat
        more = seat + 1 - len(self._refs)
        if more > 0:
            self._refs += [None] * more
            self._seen = np.concatenate((self._seen, np.zeros(_EACH * more, dtype=np.int64)))
        self._refs[seat] = ref
        self._seen[_EACH * seat : _EACH * (seat + 1)] = _UNSEEN

    def unseat(self, ref: AgentRef) -> None:
        """Nothing is counted of that worker any more, in no process."""
        seat = self._seats.pop(ref, None)
        if seat is not None:
            self._refs[seat] = None

    def show(self, ref: AgentRef, counts: InFlight) -> None:
        seat = self._seats.get(ref)
        if seat is not None and self._row is not None:
            at = HEADER + _EACH * seat
            for cell, count in enumerate(counts, at):
                self._row[cell] = count

    def again(self) -> None:
        self._seen[:] = _UNSEEN

    def changed(self) -> Iterable[tuple[AgentRef, InFlight]]:
        used = len(self._seen)
        now = self._table[:, HEADER : HEADER + used].sum(axis=0)
        if self._row is not None:
            now -= self._row[HEADER : HEADER + used]
        differs = now != self._seen
        if not differs.any():
            return ()
        self._seen = now
        found = []
        for seat in dict.fromkeys((np.flatnonzero(differs) // _EACH).tolist()):
            ref = self._refs[seat]
            if ref is not None:
                found.append((ref, InFlight(*now[_EACH * seat : _EACH * (seat + 1)].tolist())))
        return found

    # Of the process itself.

    def show_self(self, cell: int, value: int) -> None:
        """One of INSIDE, CONNECTIONS, SERVING."""
        if self._row is not None:
            self._row[cell] = value

    def elsewhere(self, cell: int) -> list[int]:
        """That cell of every other process that serves."""
        rows = self._table
        return [int(rows[index, cell]) for index in self._others if rows[index, SERVING]]
