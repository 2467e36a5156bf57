"""The kept connections to one engine, and the requests that wait for one.

It decides which connection carries a request: the one that was used last, else a new one, else the first that becomes
free. It must never know what a request means, and sends none twice.

One timer for a pool looks at all deadlines, every ``tick_s`` while a request runs, and every 0.25 s while there are
only idle connections. An empty pool has no timer.
"""

from __future__ import annotations

import asyncio
import collections
import math
import ssl
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from kvxfer.errors import InvalidArgumentError
from kvxfer.router.upstream.connection import Part, UpstreamConnection
from kvxfer.router.upstream.dial import dial
from kvxfer.router.upstream.errors import (
    UpstreamBusyError,
    UpstreamClosedError,
    UpstreamConnectError,
    UpstreamTimeoutError,
)
from kvxfer.router.upstream.head import HEADERS, encode_head
from kvxfer.router.upstream.limits import (
    Patience,
    UpstreamCounters,
    UpstreamDeadlines,
    UpstreamLimits,
    UpstreamPhase,
)
from kvxfer.router.upstream.response import Late, UpstreamResponse

_IDLE_TICK_S = 0.25
_DEFAULT_LIMITS = UpstreamLimits()
_DEFAULT_DEADLINES = UpstreamDeadlines()


def _split(address: str | tuple[str, int], *, is_tls: bool) -> tuple[str, int, bool]:
    """(host, port, whether TLS is spoken)."""
    if isinstance(address, tuple):
        host, port = address
        return host, port, is_tls
    url = urlsplit(address if "://" in address else f"//{address}")
    try:
        number = url.port
    except ValueError as error:
        raise InvalidArgumentError(f"engine address {address!r}: {error}") from None
    if (
        url.scheme not in ("", "http", "https")
        or not url.hostname
        or url.path not in ("", "/")
        or url.query
        or "@" in url.netloc
    ):
        raise InvalidArgumentError(
            f"an engine's address is host:port, http://host:port or https://host:port, not {address!r}"
        )
    is_tls = is_tls or url.scheme == "https"
    return url.hostname, number or (443 if is_tls else 80), is_tls


class UpstreamPool:
    """Made in a running loop. ``tls`` is the context to speak TLS with, or gives the newest one: no connection with an
    earlier one carries a new request. An ``https://`` address has a default one."""

    def __init__(
        self,
        address: str | tuple[str, int],
        limits: UpstreamLimits = _DEFAULT_LIMITS,
        *,
        tls: ssl.SSLContext | Callable[[], ssl.SSLContext] | None = None,
        check_peer: Callable[[ssl.SSLObject], None] | None = None,
    ) -> None:
        """``check_peer`` raises SSLCertVerificationError for a server with a certificate that is not good enough."""
        self._check_peer = check_peer
        self._host, self._port, is_tls = _split(address, is_tls=tls is not None)
        self._tls = (tls or ssl.create_default_context()) if is_tls else None
        name = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"{name}:{self._port}"
        self.counters = UpstreamCounters()
        self._limits = limits
        self._host_header = self.address.encode("idna" if not name.isascii() else "ascii")
        self._loop = asyncio.get_running_loop()
        self._slots = 0
        """Connections that are open, that are being opened, or that a waiting request may open."""
        self._idle: collections.deque[UpstreamConnection] = collections.deque()
        self._busy: set[UpstreamConnection] = set()
        self._owned: set[UpstreamConnection] = set()
        """Open connections: each has a slot."""
        self._waiting: dict[asyncio.Future[UpstreamConnection | None], float] = {}
        self._connecting: dict[asyncio.Task[UpstreamConnection], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tick_s = math.inf
        self._is_closed = False
        self._emptied: asyncio.Future[None] | None = None

    async def request(
        self,
        method: str,
        target: str,
        headers: HEADERS = (),
        body: Sequence[Part] = (),
        deadlines: UpstreamDeadlines = _DEFAULT_DEADLINES,
        *,
        late: Late | None = None,
        patience: Patience | None = None,
    ) -> UpstreamResponse:
        """Sends one request and returns its answer when the head has come. ``late``: `UpstreamResponse.hear_late`.
        ``patience``: `limits.Patience`.

        ``body`` is sent slice by slice as it is. Use the answer under ``async with``. Raises the errors of
        ``kvxfer.router.upstream.errors``; a cancelled call leaves nothing behind.
        """
        length = sum(memoryview(part).nbytes for part in body)
        head = encode_head(method, target, self._host_header, headers, length)
        self.counters.requests += 1
        whole_due = self._loop.time() + deadlines.whole_s
        connection = await self._acquire(deadlines, whole_due)
        self._busy.add(connection)
        self._arm(self._limits.tick_s)
        is_head = method == "HEAD"
        response = connection.start(
            head, body, length, to_head=is_head, deadlines=deadlines, whole_due=whole_due, patience=patience
        )
        if late is not None:
            response.hear_late(late)
        await response.wait_for_head()
        return response

    async def close(self) -> None:
        """Gives up what runs, refuses what waits, and returns when every connection is closed."""
        self._is_closed = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(self._closed())
        for task in self._connecting:
            task.cancel()
        for connection in tuple(self._owned):
            connection.close()
        if self._slots:
            self._emptied = self._loop.create_future()
            await self._emptied
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _acquire(self, deadlines: UpstreamDeadlines, whole_due: float) -> UpstreamConnection:
        queue_due = min(self._loop.time() + deadlines.queue_s, whole_due)
        while True:
            if self._is_closed:
                raise self._closed()
            while self._idle:
                connection = self._idle.pop()
                self.counters.idle -= 1
                if self._may_carry(connection):
                    self.counters.reused += 1
                    return connection
                connection.close()
            if self._slots < self._limits.connections_max:
                self._slots += 1
                return await self._connect(deadlines, whole_due)
            given = await self._queue(queue_due)
            if given is None:
                return await self._connect(deadlines, whole_due)
            if self._may_carry(given):
                self.counters.reused += 1
                return given
            given.close()

    async def _queue(self, due: float) -> UpstreamConnection | None:
        """A connection that became free, or ``None``: the slot of one that ended."""
        if self.counters.waiting >= self._limits.waiting_max:
            self.counters.failed[UpstreamPhase.QUEUE] += 1
            text = f"{self._limits.connections_max} connections are taken and {self.counters.waiting} requests wait"
            raise UpstreamBusyError(text, address=self.address, phase=UpstreamPhase.QUEUE)
        future: asyncio.Future[UpstreamConnection | None] = self._loop.create_future()
        self._waiting[future] = due
        self.counters.waiting += 1
        self._arm(self._limits.tick_s)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                given = future.result()
                if given is None:
                    self._free_slot()
                elif not given.is_lost:
                    self._keep(given)
            raise
        finally:
            self._waiting.pop(future, None)
            self.counters.waiting -= 1

    async def _connect(self, deadlines: UpstreamDeadlines, whole_due: float) -> UpstreamConnection:
        """Opens a connection in a slot that is the caller's."""
        task = self._loop.create_task(self._open())
        self._connecting[task] = min(self._loop.time() + deadlines.connect_s, whole_due)
        self._arm(self._limits.tick_s)
        connection: UpstreamConnection | None = None
        try:
            connection = await task
            if connection.is_lost or self._is_closed:
                connection.close()
                raise ConnectionResetError("the connection was closed as soon as it was open")
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
            self._free_slot()
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            if self._is_closed:
                raise self._closed() from None
            self.counters.failed[UpstreamPhase.CONNECT] += 1
            text = f"over its deadline of {deadlines.connect_s:g} s"
            raise UpstreamTimeoutError(text, address=self.address, phase=UpstreamPhase.CONNECT) from None
        except (OSError, ssl.SSLError) as error:
            self._free_slot()
            self.counters.failed[UpstreamPhase.CONNECT] += 1
            raise UpstreamConnectError(str(error), address=self.address, phase=UpstreamPhase.CONNECT) from error
        except BaseException:
            self._free_slot()
            raise
        finally:
            del self._connecting[task]
        self._owned.add(connection)
        self.counters.open += 1
        self.counters.connected += 1
        return connection

    async def _open(self) -> UpstreamConnection:
        tls = self._newest_tls()

        def make() -> UpstreamConnection:
            return UpstreamConnection(
                self.address, self._limits, self.counters, on_free=self._on_free, on_lost=self._on_lost, tls=tls
            )

        transport, connection = await dial(make, self._host, self._port, tls)
        if self._check_peer is not None:
            try:
                self._check_peer(transport.get_extra_info("ssl_object"))
            except ssl.SSLCertVerificationError:
                connection.close()
                raise
        return connection

    def _newest_tls(self) -> ssl.SSLContext | None:
        return self._tls() if callable(self._tls) else self._tls

    def _may_carry(self, connection: UpstreamConnection) -> bool:
        """Whether an open connection without a request takes a new one."""
        return connection.is_usable and connection.tls is self._newest_tls()

    def _on_free(self, connection: UpstreamConnection, is_kept: bool) -> None:
        self._busy.discard(connection)
        if is_kept:
            self._keep(connection)

    def _keep(self, connection: UpstreamConnection) -> None:
        if self._is_closed or connection.tls is not self._newest_tls():
            connection.close()  # and its slot goes to the request that waits longest
        elif not self._hand_over(connection):
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
            self.counters.idle += 1

    def _on_lost(self, connection: UpstreamConnection) -> None:
        if connection not in self._owned:
            return  # it never became one of the pool's
        self._owned.discard(connection)
        self._busy.discard(connection)
        self.counters.open -= 1
        if connection in self._idle:
            self._idle.remove(connection)
            self.counters.idle -= 1
        self._free_slot()

    def _free_slot(self) -> None:
        if self._is_closed or not self._hand_over(None):
            self._slots -= 1
            if not self._slots and self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)

    def _hand_over(self, given: UpstreamConnection | None) -> bool:
        """To the request that waits longest."""
        for future in self._waiting:
            if not future.done():
                future.set_result(given)
                return True
        return False

    def _closed(self) -> UpstreamClosedError:
        return UpstreamClosedError("the pool is closed", address=self.address, phase=UpstreamPhase.QUEUE)

    def _arm(self, seconds: float) -> None:
        if seconds < self._tick_s:
            if self._timer is not None:
                self._timer.cancel()
            self._tick_s = seconds
            self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._tick_s = math.inf
        now = self._loop.time()
        for connection in tuple(self._busy):
            connection.check(now)
        for future, due in self._waiting.items():
            if now >= due and not future.done():
                self.counters.failed[UpstreamPhase.QUEUE] += 1
                text = "no connection became free before the deadline"
                future.set_exception(UpstreamTimeoutError(text, address=self.address, phase=UpstreamPhase.QUEUE))
        for task, due in self._connecting.items():
            if now >= due:
                task.cancel()
        while self._idle and now - self._idle[0].idle_since >= self._limits.idle_s:
            self._idle.popleft().close()
            self.counters.idle -= 1
        if self._busy or self._waiting or self._connecting:
            self._arm(self._limits.tick_s)
        elif self._owned:
            self._arm(min(_IDLE_TICK_S, max(self._limits.tick_s, self._limits.idle_s)))
