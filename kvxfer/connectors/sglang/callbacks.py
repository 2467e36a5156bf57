"""Callbacks from the agent's thread. Decides when one is called: soon, on the loop, and never under a lock of this
package; must never know what it does.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

log = logging.getLogger("kvxfer.sglang")


class NumberedRoom(Protocol):
    @property
    def number(self) -> int: ...


def _call_of(
    room: NumberedRoom, rooms: Mapping[int, NumberedRoom], callback: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    if rooms.get(room.number) is room:
        callback(room.number, *arguments)


class Callbacks:
    """Of one half of a core, in the order in which they were told."""

    def __init__(self, call_soon: Callable[..., None]) -> None:
        """``call_soon(function)`` calls on the agent's loop."""
        self._call_soon = call_soon
        self._due: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = collections.deque()
        self._calling = threading.RLock()
        self._is_closed = False

    def tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call it soon. From any thread."""
        self._due.append((callback, arguments))
        if not self._is_closed:
            self._call_soon(self.run)

    def tell_of(
        self, room: NumberedRoom, rooms: Mapping[int, NumberedRoom], callback: Callable[..., None], *arguments: Any
    ) -> None:
        """Call it soon with the room's number, unless the room is not among ``rooms`` any more by then: the number may
        be another room's."""
        self.tell(_call_of, room, rooms, callback, arguments)

    def run(self) -> None:
        """Call those that are due. One that raises is logged."""
        with self._calling:
            while self._due:
                callback, arguments = self._due.popleft()
                try:
                    callback(*arguments)
                except Exception:
                    log.exception("a callback raised")

    def close(self) -> None:
        """The loop ends: those that are due are called now, and later ones by :meth:`run` alone."""
        self._is_closed = True
        self.run()
