"""One request and its answer over ASGI's ``receive`` and ``send``, with the calls of a direct exchange.

So the same handler runs under any ASGI server, at the price of two tasks a request. Decides what waits where ``send``
is slower than the handler. It must never know what a request is about.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.serving.answers import BODYLESS, CLOSE, split_fields
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.cycle import ABORT
from kvxfer.serving.exchange import ExchangeHandler, Headers
from kvxfer.serving.exchange_base import ExchangeBase
from kvxfer.serving.handling import run_handler
from kvxfer.serving.incoming import Incoming
from kvxfer.serving.limits import ServingLimits

PENDING_BYTES_MAX = 64 << 10
"""Of an answer that ``send`` has not taken: beyond it the handler is told to pause."""
PENDING_BYTES_LOW = 16 << 10
"""At most so many are left when it is told to go on."""
SENT_BYTES_MAX = 64 << 10
"""In one message: a server looks at how fast its client reads between two of them."""


def asgi_endpoint(handler: ExchangeHandler, bodies: Bodies | None = None) -> ASGIApp:
    """An ASGI application that serves each request by ``handler``.

    ``bodies`` are the server's own, so that all bodies have one budget; without them this application has its own, with
    the default limits.
    """
    read_with = Bodies(ServingLimits()) if bodies is None else bodies

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, receive, send, read_with)
        try:
            await run_handler(handler, exchange)
        finally:
            await exchange.close()

    return endpoint


class AsgiExchange(ExchangeBase):
    """A :class:`~kvxfer.serving.exchange.ClientExchange`; :meth:`close` must be awaited at its end."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, bodies: Bodies) -> None:
        path: str = scope["path"]
        query: bytes = scope.get("query_string") or b""
        raw_path: bytes = scope.get("raw_path") or path.encode()
        super().__init__(
            scope["method"],
            path,
            raw_path + b"?" + query if query else raw_path,
            [(bytes(name), bytes(value)) for name, value in scope["headers"]],
            "{}:{}".format(*scope["client"]) if scope.get("client") else "",
        )
        self._extensions = scope.get("extensions") or {}
        self._receive = receive
        self._send = send
        self._bodies = bodies
        self._is_cut = False
        self._is_bodyless = False
        self._head: Message | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._changed = asyncio.Event()
        """Something is to be sent."""
        self._taken = asyncio.Event()
        """There is room for more of the request's body."""
        self._caught_up = asyncio.Event()
        self._caught_up.set()
        self.incoming = Incoming(self._taken.set)
        self._sending = asyncio.create_task(self._send_all())
        self._listening: asyncio.Task[None] | None = None
        if self.header(b"expect") is None:  # otherwise the server tells the client to send, at the first receive
            self._listen()

    @property
    def is_paused(self) -> bool:
        return not self._caught_up.is_set()

    async def read_body(self) -> bytes:
        self.begin_reading()
        if self.incoming.is_whole:
            return self._bodies.whole(self.incoming.take())
        self._bodies.check_declared((self.header(b"content-length") or b"0").decode("latin-1"))
        self._listen()
        return await self._bodies.read_chunks(self.incoming)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if self.is_over or self.is_started:
            return
        self._begin(status, headers, None if status in BODYLESS else len(body))
        self.is_ended = True
        self._put(body)
        self._finish()

    def start(self, status: int, headers: Headers) -> None:
        if self.is_over or self.is_started:
            return
        self._begin(status, headers, None)
        self._changed.set()

    def write(self, chunk: bytes) -> None:
        if not chunk or not self.is_started or self.is_over:
            return
        self._put(chunk)
        if self._pending_bytes > PENDING_BYTES_MAX and not self.is_paused:
            self._caught_up.clear()
            self.pause_if_paused()

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        return None

    def end(self) -> None:
        if self.is_over or not self.is_started:
            return
        self.is_ended = True
        self._finish()

    def abort(self) -> None:
        if self.is_over:
            return
        self._is_cut = True
        self._listen()
        self.forget_callbacks()
        self._stop()
        if ABORT in self._extensions:
            self._extensions[ABORT]["call"]()

    async def drained(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._caught_up.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Send what is left of the answer, and stop listening. Where the answer was cut, ASGI has no word for it but
        to return before its end, so this returns early."""
        try:
            if self.is_ended:
                await self._sending
            elif self._is_cut and self._listening is not None and ABORT in self._extensions:
                await self._listening
        finally:
            for task in (self._sending, self._listening):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

    def _begin(self, status: int, headers: Headers, length: int | None) -> None:
        fields, closes = split_fields(status, headers)
        self.is_started = True
        self._is_bodyless = self.method == "HEAD" or status in BODYLESS
        if length is not None:
            fields.append((b"content-length", b"%d" % length))
        if closes:
            fields.append(CLOSE)
        self._head = {"type": "http.response.start", "status": status, "headers": fields}

    def _put(self, chunk: bytes) -> None:
        if not self._is_bodyless:
            self._pending.append(chunk)
            self._pending_bytes += len(chunk)
            self._changed.set()

    def _finish(self) -> None:
        self.forget_callbacks()
        self._changed.set()

    def _listen(self) -> None:
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen_on())

    async def _listen_on(self) -> None:
        """Take the request's body, and then wait until the client leaves."""
        while not self.is_gone or self._is_cut:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left()
                return
            if self.incoming.is_whole or message["type"] != "http.request":
                continue
            if message.get("body"):
                self.incoming.push(message["body"])
            if not message.get("more_body", False):
                self.incoming.finish()
            elif self.incoming.is_full:
                self._taken.clear()
                await self._taken.wait()

    async def _send_all(self) -> None:
        try:
            while await self._send_some():
                self._changed.clear()
                await self._changed.wait()
        except OSError:  # so other servers say that the client has left
            self._left()

    async def _send_some(self) -> bool:
        """All that waits now; False where that was the end."""
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head)
        while self.is_started and (self._pending or self.is_ended):
            data = b"".join(self._pending)
            self._pending.clear()
            for at in range(0, len(data) or 1, SENT_BYTES_MAX):
                piece = data[at : at + SENT_BYTES_MAX]
                is_last = self.is_ended and not self._pending and at + len(piece) == len(data)
                await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})
                self._pending_bytes -= len(piece)
                if self.is_paused and self._pending_bytes <= PENDING_BYTES_LOW:
                    self._caught_up.set()
                    self.resume()
                if is_last:
                    return False
        return True

    def _left(self) -> None:
        """The client has left, or the server takes no more of the answer."""
        if not self.is_gone and not self._sending.done():
            self._stop()

    def _stop(self) -> None:
        self.incoming.cut()
        self._taken.set()
        self._caught_up.set()
        self.leave()
