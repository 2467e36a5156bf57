"""A client that sends nothing more while its answer is being made: whether it is still there.

A client may close its sending half behind its request and wait for the answer; one that has left closes both halves,
and the two look the same from here, until something is sent: then the kernel of the one that left answers with a reset.
Decides when to send something for that, and when to look. It must never know what may be sent amid an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable

PROBES_S = (0.0, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 240.0)
"""When a client is sent a few bytes, after its end of sending. They are few: all may stand before one chunk."""
LOOKS_S = (0.0, 0.002, 0.01, 0.05, 0.25, 1.0)
"""How long after the last probe it is looked whether a reset has come; later each second."""
KEEPALIVE_S = 10
"""Where nothing may be sent, the kernel asks the client's each so many seconds: that of a client that left answers
with a reset once it has forgotten the connection, on Linux after 60 s."""
KEEPALIVES = 3


class HalfClosed:
    """``probe`` sends a few bytes that change nothing of the answer, where that can be done now. ``left`` is called
    once the connection was reset. Belongs to one event loop; :meth:`stop` at the end of the connection."""

    def __init__(self, sock: socket.socket, *, probe: Callable[[], None], left: Callable[[], None]) -> None:
        self._probe = probe
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._probes = iter(PROBES_S)
        self._next_probe_s = next(self._probes)
        self._looks = iter(LOOKS_S)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), 0)  # errors and hang-ups are always told
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
        self._timer: asyncio.Handle = self._loop.call_soon(self._look)

    def stop(self) -> None:
        """Callable twice."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._poll.poll(0):
            self._left()
            return
        if self._loop.time() >= self._begun_s + self._next_probe_s:
            self._next_probe_s = next(self._probes, float("inf"))
            self._looks = iter(LOOKS_S)
            self._probe()
        self._timer = self._loop.call_later(next(self._looks, LOOKS_S[-1]), self._look)
