"""Connections between processes: ordered byte streams with latency that can be held up, cut, or (frame by frame)
robbed of their promises; must never know what a frame means beyond what its sender says of it.

What TCP does, this does: bytes arrive in order, late during a partition, not at all after a cut, and either side may
learn of a cut much later than the other. What TCP never does (a frame lost, doubled or overtaken while the connection
incarnations) it does too, because the machines must be safe on a wire that is worse than promised.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import random
from collections.abc import Callable
from typing import Any

from kvxfer.testing.sim.virtual_clock import MS, US, VirtualClock


class FrameFate(enum.Enum):
    """The fate of one unit."""

    ARRIVES = "arrives"
    DROPPED = "dropped"
    DOUBLED = "doubled"
    LATE = "late"
    OVERTAKEN = "overtaken"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Where and when the bytes of one payload block were read, and what they were; ``memory``: sent zero-copy, and read
    in this memory when they land."""

    at: int
    incarnation: int
    cell: Any
    data: bytes
    memory: Any = None


@dataclasses.dataclass(slots=True)
class Unit:
    """One frame, and for DATA its payload: what is lost, doubled or overtaken as a whole. Chunks arrive one by one."""

    name: str
    transfer: bytes | None = None
    fate: FrameFate = FrameFate.ARRIVES
    chunks: list[tuple[bytes, Sample | None]] = dataclasses.field(default_factory=list)
    is_whole: bool = False


_END = Unit("end")


class Links:
    """Which direction between two places is blocked, and until when."""

    def __init__(self) -> None:
        self._blocked: dict[tuple[str, str], int] = {}

    def block(self, source: str, target: str, until_ns: int) -> None:
        self._blocked[source, target] = max(self.blocked_until(source, target), until_ns)

    def blocked_until(self, source: str, target: str) -> int:
        return self._blocked.get((source, target), 0)

    def heal(self) -> None:
        self._blocked.clear()


class Half:
    """One direction: chunks on their way from one place to another."""

    def __init__(
        self,
        clock: VirtualClock,
        rng: random.Random,
        links: Links,
        route: tuple[str, str],
        deliver: Callable[..., None],
    ) -> None:
        self._clock, self._rng, self._links, self._route, self._deliver = clock, rng, links, route, deliver
        self._line: collections.deque[tuple[int, Unit, bytes, Sample | None, bool]] = collections.deque()
        self._is_awaited = False
        self._last = 0
        self._at_end: Callable[[], None] = lambda: None
        self.is_cut = False

    def send(self, unit: Unit, data: bytes, sample: Sample | None, *, is_last: bool) -> None:
        """Put one chunk of ``unit`` on the wire; what its fate says is done here."""
        if unit.fate is FrameFate.DROPPED:
            return
        latency = self._rng.randrange(50 * US, 2 * MS)
        if unit.fate is FrameFate.LATE and not unit.chunks:
            latency += self._rng.randrange(20 * MS, 900 * MS)
        unit.chunks.append((data, sample))
        if unit.fate is FrameFate.OVERTAKEN:
            if is_last:
                self._clock.call_after(latency + self._rng.randrange(1 * MS, 400 * MS), self._arrive_alone, unit)
            return
        self._line_up(latency, unit, data, sample, is_last)
        if unit.fate is FrameFate.DOUBLED and is_last:
            again = Unit(unit.name, unit.transfer, FrameFate.OVERTAKEN, list(unit.chunks), True)
            self._clock.call_after(latency + self._rng.randrange(0, 300 * MS), self._arrive_alone, again)

    def end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after all chunks that were sent in order have arrived."""
        self._at_end = callback
        self._line_up(self._rng.randrange(50 * US, 2 * MS), _END, b"", None, True)

    def cut(self) -> None:
        """Chunks in transit are lost, and so are all that follow."""
        self.is_cut = True
        self._line.clear()

    def _line_up(self, latency: int, unit: Unit, data: bytes, sample: Sample | None, is_last: bool) -> None:
        self._last = max(self._last, self._clock.now + latency)
        self._line.append((self._last, unit, data, sample, is_last))
        if not self._is_awaited:
            self._is_awaited = True
            self._clock.call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        self._is_awaited = False
        while self._line and not self.is_cut:
            due, unit, data, sample, is_last = self._line[0]
            due = max(due, self._links.blocked_until(*self._route))
            if due > self._clock.now:
                self._is_awaited = True
                self._clock.call_at(due, self._arrive)
                return
            self._line.popleft()
            if unit is _END:
                return self._at_end()
            self._deliver(unit, data, sample, is_last)

    def _arrive_alone(self, unit: Unit) -> None:
        if self.is_cut:
            return
        due = self._links.blocked_until(*self._route)
        if due > self._clock.now:
            return self._clock.call_at(due, self._arrive_alone, unit)
        for index, (data, sample) in enumerate(unit.chunks):
            self._deliver(unit, data, sample, index + 1 == len(unit.chunks))


class Reassembly:
    """Puts chunks that arrived into an order in which no unit tears another one apart: an overtaken frame cannot fall
    into the middle of a payload.
    """

    def __init__(self) -> None:
        self._open: Unit | None = None
        self._overtaken: list[tuple[Unit, bytes, Sample | None, bool]] = []

    def take(self, unit: Unit, data: bytes, sample: Sample | None, is_last: bool) -> list[tuple[bytes, Sample | None]]:
        """The chunks that may be read now."""
        if self._open is not None and unit is not self._open:
            self._overtaken.append((unit, data, sample, is_last))
            return []
        self._open = None if is_last else unit
        out = [(data, sample)]
        if self._open is None and self._overtaken:
            waiting, self._overtaken = self._overtaken, []
            for later in waiting:
                out += self.take(*later)
        return out
