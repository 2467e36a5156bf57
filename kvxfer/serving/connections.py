"""The connections of one server: how many there may be, and which one is closed where one too many wants in.

Decides by the phase of a connection and by the time in it; it must never know bytes or requests. A connection that was
*given up* for another one, and is still open, is *parting*.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

PARTING_MAX = 4
"""Most parting connections at a time: each has a descriptor beyond the maximum, one of those that are kept spare."""


class ConnectionPhase(enum.Enum):
    """What a connection is doing; in the order in which connections are given up for a new one."""

    CLOSING = enum.auto()
    """Its last answer is out: its client is given time to read it."""
    IDLE = enum.auto()
    """No byte of a next request has come."""
    HEAD = enum.auto()
    """Some of a request's head has come."""
    BODY = enum.auto()
    """A request's head is here, and its body is not."""
    WORK = enum.auto()
    """A whole request is being served: never given up."""


class Dispensable(Protocol):
    """A connection, as far as it can be given up."""

    def give_up(self) -> None:
        """Begin to close it: what is going out is sent, and a request that is not whole is refused."""

    def abort(self) -> None:
        """Let its descriptor go with the next turn of the loop, whatever is still going out."""


class Connections:
    """Counts connections by phase, each with the longest in it first.

    ``on_room`` is called when a connection has ended, and when one leaves the phase WORK, so that it could be given up.
    A parting connection does not count against ``maximum``, so its client keeps no other client out.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.on_room: Callable[[], None] = lambda: None
        self.given_up = 0
        self._phases: dict[Dispensable, ConnectionPhase] = {}
        self._members: dict[ConnectionPhase, dict[Dispensable, None]] = {phase: {} for phase in ConnectionPhase}
        self._parting: dict[Dispensable, None] = {}
        """Connections that are parting, longest first; at most PARTING_MAX."""

    def __len__(self) -> int:
        return len(self._phases)

    @property
    def kept(self) -> int:
        """Connections that count against the maximum."""
        return len(self._phases) - len(self._parting)

    def count(self, phase: ConnectionPhase) -> int:
        return len(self._members[phase])

    def move(self, connection: Dispensable, phase: ConnectionPhase) -> bool:
        """Note that ``connection``, new or known, is in ``phase`` now. False where it was in that phase already."""
        before = self._phases.get(connection)
        if before is phase:
            return False
        if before is not None:
            del self._members[before][connection]
        self._phases[connection] = phase
        self._members[phase][connection] = None
        if before is ConnectionPhase.WORK:
            self.on_room()
        return True

    def remove(self, connection: Dispensable) -> None:
        """``connection`` has ended."""
        phase = self._phases.pop(connection, None)
        if phase is not None:
            del self._members[phase][connection]
            self._parting.pop(connection, None)
            self.on_room()

    def make_room(self) -> bool:
        """Give up the connection that is longest in the earliest phase; False where all are in WORK.

        There is room at once. Where PARTING_MAX are parting already, the first of them is aborted instead, and there is
        room when :meth:`remove` is called for it.
        """
        candidate = self._first_to_give_up()
        if candidate is None:
            return False
        if len(self._parting) < PARTING_MAX:
            self.given_up += 1
            self._parting[candidate] = None
            candidate.give_up()
        else:
            self.hurry()
        return True

    def hurry(self) -> bool:
        """Abort the connection that is parting longest, even if its last answer is not sent yet. False where there is
        none."""
        first = next(iter(self._parting), None)
        if first is not None:
            first.abort()
        return first is not None

    def _first_to_give_up(self) -> Dispensable | None:
        for phase in ConnectionPhase:
            if phase is not ConnectionPhase.WORK:
                for connection in self._members[phase]:
                    if connection not in self._parting:
                        return connection
        return None

    def abort_all(self) -> None:
        """End all that are left."""
        for connection in tuple(self._phases):
            connection.abort()

    def __repr__(self) -> str:
        counts = ", ".join(f"{phase.name.lower()}={self.count(phase)}" for phase in ConnectionPhase)
        return f"Connections({len(self)} of {self.maximum}: {counts})"
