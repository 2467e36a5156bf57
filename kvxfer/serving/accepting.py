"""Takes connections from a listening socket, one at a time, as long as there is room.

Where there is no room, an open connection is given up for the next one (``connections``). Where every connection is
being served, new ones wait in the kernel's queue. asyncio's own servers accept all waiting connections at once, log a
line for each one when descriptors run out, and try again each second.

A connection that has not finished its TLS handshake has no phase yet. It counts against the maximum; one that takes
long is ended where a new one waits. Decides when to accept; it must never know what a connection says.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import cast

from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.serving.connections import Connections
from kvxfer.serving.tls import ServerTls
from kvxfer.serving.transport import WRITE_STALL_S

log = logging.getLogger("kvxfer.serving")

ACCEPTED_AT_ONCE = 64
"""Connections that are accepted in one turn of the event loop."""
RETRY_S = 0.25
"""How long accepting rests where the process, or the system, has no descriptors or no memory."""
COMPLAIN_S = 30.0
HANDSHAKES_MAX = 512
"""Unfinished TLS handshakes at a time; each costs about 60 KB."""
HANDSHAKE_FAIR_S = 2.0
"""A handshake that takes longer may be ended for a new connection."""
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


Turn = Callable[[int], float]
"""Gets the number of connections of this process, gives the seconds for which a new one is left to other processes that
accept from the same listener."""


class Acceptor:
    """Accepts from ``listener``, which stays the caller's, between :meth:`start` and :meth:`stop`."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        new_protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ServerTls | None = None,
        handshake_timeout_s: float = 10.0,
        turn: Turn | None = None,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._new_protocol = new_protocol
        self._turn = turn
        self._has_waited = False
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._opening: dict[asyncio.Task[None], float] = {}
        """When each was accepted, oldest first. Without TLS they open within a turn of the loop."""
        self._fair: asyncio.TimerHandle | None = None
        """Rings when the oldest handshake has had its time."""
        self._retry: asyncio.TimerHandle | None = None
        self._is_started = False
        self._is_reading = False
        self._exhausted = RateLimitedWarning(log, "cannot accept connections: %s", period_s=COMPLAIN_S)
        self._full = RateLimitedWarning(
            log,
            "max_connections %d are open and all at work: new connections wait",
            period_s=COMPLAIN_S,
        )

    def start(self) -> None:
        self._is_started = True
        self._connections.on_room = self._resume
        self._resume()

    def stop(self) -> None:
        """Accept nothing more; what is open stays open. Callable twice."""
        self._is_started = False
        self._connections.on_room = lambda: None
        self._pause()
        for timer in (self._retry, self._fair):
            if timer is not None:
                timer.cancel()
        self._retry = self._fair = None
        if self._tls is not None:
            for task in self._opening:
                task.cancel()

    def _resume(self) -> None:
        if self._is_started and not self._is_reading and self._retry is None:
            self._is_reading = True
            self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._listener.fileno())

    def _on_readable(self) -> None:
        if self._turn is not None and self._leaves_it_to_others(self._turn):
            return
        for _ in range(ACCEPTED_AT_ONCE if self._turn is None else 1):
            if not self._has_room():
                self._pause()  # _make_room, or the connections' on_room, goes on
                if not self._opening or self._tls is not None:
                    self._loop.call_soon(self._make_room)
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    log.debug("a connection was lost while it was accepted: %s", error)
                    return
                self._exhausted.say(error.strerror)
                self._accept_later()
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted))
            self._opening[task] = self._loop.time()
            task.add_done_callback(self._opened)

    def _leaves_it_to_others(self, turn: Turn) -> bool:
        """Once for each connection: one that is still there afterwards is accepted."""
        wait_s = 0.0 if self._has_waited else turn(len(self._connections) + len(self._opening))
        self._has_waited = wait_s > 0
        if wait_s > 0:
            self._pause()
            self._retry = self._loop.call_later(wait_s, self._accept_again)
        return wait_s > 0

    def _has_room(self) -> bool:
        opening = len(self._opening)
        return self._connections.kept + opening < self._connections.maximum and not self._is_full_of_handshakes()

    def _is_full_of_handshakes(self) -> bool:
        return self._tls is not None and len(self._opening) >= HANDSHAKES_MAX

    def _make_room(self) -> None:
        """Give up a connection for the next one. It runs in the turn of the loop after the one that found no room. In
        that turn the loop may not have read all readable sockets yet, so a connection whose request has arrived could
        still look idle.
        """
        if not self._is_started or self._is_reading or (self._opening and self._tls is None):
            return
        if not self._has_room():
            is_made = not self._is_full_of_handshakes() and self._connections.make_room()
            if not is_made and not self._end_handshake():
                self._full.say(self._connections.maximum)
        if self._has_room():
            self._resume()

    def _end_handshake(self) -> bool:
        """End the oldest handshake, now or when it has had its time; False where there is none. There is room once it
        has ended."""
        for task, begun_s in self._opening.items():
            if task.cancelling():
                continue
            left_s = begun_s + HANDSHAKE_FAIR_S - self._loop.time()
            if left_s <= 0:
                task.cancel()
            elif self._fair is None:
                self._fair = self._loop.call_later(left_s, self._is_fair)
            return True
        return bool(self._opening)

    def _is_fair(self) -> None:
        self._fair = None
        self._make_room()

    def _accept_later(self) -> None:
        """Descriptors ran out before the maximum of connections was open: give one up, and accept again after
        RETRY_S."""
        self._pause()
        if not self._connections.hurry() and not self._connections.make_room():
            self._end_handshake()
        self._retry = self._loop.call_later(RETRY_S, self._accept_again)

    def _accept_again(self) -> None:
        self._retry = None
        self._resume()

    async def _open(self, accepted: socket.socket) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._new_protocol, accepted)
            else:
                handshake = _Handshake(self._tls, self._new_protocol)
                await self._loop.connect_accepted_socket(
                    lambda: handshake,
                    accepted,
                    ssl=handshake.context,
                    ssl_handshake_timeout=self._handshake_timeout_s,
                    ssl_shutdown_timeout=WRITE_STALL_S,
                )
        except OSError as error:
            accepted.close()
            log.debug("a connection was lost while it was opened: %s", error)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection could not be opened", exc_info=error)
        if not self._opening or self._tls is not None:
            self._resume()


class _Handshake(asyncio.Protocol):
    """Stands for a connection until its handshake is over. Where that took place under a context that counts no more,
    the connection ends before any byte of it is read as a request: the loop reads what came with the end of a handshake
    before whoever waits for the handshake goes on."""

    def __init__(self, tls: ServerTls, new_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._tls = tls
        self._new_protocol = new_protocol
        self.context = tls.context

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.context is not self._tls.context and not self._tls.keeps_handshakes:
            cast(asyncio.Transport, transport).abort()
            return
        protocol = self._new_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
