"""A proxy that tells its connections apart: how much of the blocks each carried, and what is done to one of several."""

from __future__ import annotations

import socket
import threading

from tests.support.faults.fault_proxy import DATA, FaultProxy, _break


class CountingProxy(FaultProxy):
    """Connections are numbered in the order of their dials."""

    def __init__(self, tcp: tuple[str, int], unix_path: str) -> None:
        self._here = threading.local()
        self._known: list[list[int]] = []
        self._ends: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._carried: dict[str, dict[int, int]] = {"to": {}, "from": {}}
        self._most: tuple[str, int] | None = None
        self._held: set[int] = set()
        self._let_go: set[int] = set()
        self._broken: set[int] = set()
        super().__init__(tcp, unix_path)

    def hold_each(self, way: str, payload: int) -> None:
        """Every connection lets so many bytes of blocks through that way, counted from now on, and stops."""
        with self._changed:
            self._most = (way, payload)
            self._carried = {"to": {}, "from": {}}
            self._held.clear()
            self._let_go.clear()

    def wait_held(self, count: int, timeout_s: float = 20.0) -> list[int]:
        """The numbers of those that stopped with more to carry, once there are so many of them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._held) >= count, timeout_s)
            return sorted(self._held)

    def go_on_but(self, number: int) -> None:
        """The others carry what they like; this one says nothing, and is not closed."""
        with self._changed:
            self._let_go.update(self._held - {number})
            self._changed.notify_all()

    def cut(self, number: int) -> None:
        """Break one connection the hard way (TCP: RST); what it held is lost, and the others stay held."""
        with self._changed:
            for end in self._ends[number]:
                _break(end)
            self._broken.add(number)
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self._most = None
        super().resume()

    def carried(self, way: str) -> dict[int, int]:
        """Bytes of blocks by connection, since :meth:`forget` or :meth:`hold_each`; of those that carried any."""
        with self._changed:
            return dict(self._carried[way])

    def forget(self) -> None:
        with self._changed:
            self._carried = {"to": {}, "from": {}}

    def wait_gone(self, number: int, timeout_s: float = 20.0) -> bool:
        """Until that connection is closed on both sides: what it held has arrived, or never will."""
        with self._changed:
            return self._changed.wait_for(lambda: number not in self._ends, timeout_s)

    def _pump(self, way: str, source: socket.socket, target: socket.socket, left: list[int]) -> None:
        with self._changed:
            if not any(left is known for known in self._known):
                self._known.append(left)
            number = next(at for at, known in enumerate(self._known) if known is left)
            self._here.number = number
            self._ends.setdefault(number, (source, target))
        super()._pump(way, source, target, left)
        with self._changed:
            if left[0] == 0:
                self._ends.pop(number, None)
                self._held.discard(number)
                self._changed.notify_all()

    def _let(self, way: str, kind: int, size: int) -> int:
        number = self._here.number
        if kind == DATA and size:
            with self._changed:
                self._changed.wait_for(lambda: self._room(way, number) > 0)
                if number in self._broken:
                    raise ConnectionResetError(f"connection {number} was cut")
                size = min(size, self._room(way, number))
        allowed = super()._let(way, kind, size)
        with self._changed:
            if size:
                self._carried[way][number] = self._carried[way].get(number, 0) + allowed
        return allowed

    def _room(self, way: str, number: int) -> int:
        """Bytes that it may let through; the lock is held."""
        if self._most is None or self._most[0] != way or number in self._let_go | self._broken:
            return 1 << 62
        room = self._most[1] - self._carried[way].get(number, 0)
        if room == 0 and number not in self._held:
            self._held.add(number)
            self._changed.notify_all()
        return room
