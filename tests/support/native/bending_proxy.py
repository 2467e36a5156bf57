"""A TCP proxy that changes what passes: flips a bit, cuts off, keeps what it saw. Must never know a protocol."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

CHUNK_BYTES = 65536

Bend = Callable[[int, int, bytes], bytes]
"""``(connection, offset, bytes)``, of what comes back from the far end; fewer bytes than given: the connection ends."""


class BendingProxy:
    """Forwards connections to ``to``, a port of this host. ``bend`` changes what the far end answers."""

    def __init__(self, to: int, bend: Bend = lambda connection, offset, data: data) -> None:
        self._to, self._bend = to, bend
        self.seen = bytearray()
        """All bytes of both directions, as the near and the far end sent them."""
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    def __enter__(self) -> BendingProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            self._end(one)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._sockets += [near, far]
            number = self.connections
            self.connections += 1
            self._start(self._forward, near, far, lambda offset, data: data)
            self._start(self._forward, far, near, lambda offset, data, number=number: self._bend(number, offset, data))

    def _forward(self, origin: socket.socket, to: socket.socket, bend: Callable[[int, bytes], bytes]) -> None:
        offset = 0
        try:
            while data := origin.recv(CHUNK_BYTES):
                self.seen += data
                bent = bend(offset, data)
                to.sendall(bent)
                if len(bent) < len(data):
                    break
                offset += len(data)
        except OSError:
            pass
        self._end(to)
        self._end(origin)

    @staticmethod
    def _end(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
