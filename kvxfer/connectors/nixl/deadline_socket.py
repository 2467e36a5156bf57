"""A TCP connection with one deadline for all that is sent and received on it, in pieces of any size. Must never know
the content.
"""

from __future__ import annotations

import contextlib
import socket
import time


def seconds_left(end_s: float) -> float:
    """Seconds until then. Raises TimeoutError."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


class DeadlineSocket:
    """A connection and what it may still take: every call raises TimeoutError once that is over."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._connection = connection
        self.end_s = end_s

    def send(self, data: bytes) -> None:
        self._connection.settimeout(seconds_left(self.end_s))
        self._connection.sendall(data)

    def receive(self, size: int) -> bytes:
        """Exactly ``size`` bytes. Raises EOFError if the other side hangs up before."""
        data = bytearray()
        while len(data) < size:
            self._connection.settimeout(seconds_left(self.end_s))
            part = self._connection.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("it hung up")
            data += part
        return bytes(data)

    def shut(self) -> None:
        """Ends what another thread is at on this connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
