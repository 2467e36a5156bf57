"""One request and its answer on the socket itself, without ASGI.

Decides how an answer is framed: by its length, in chunks, or by the end of the connection where the client speaks
HTTP/1.0. A chunk costs one call of the transport's ``write``. It must never know what a request is about, nor when its
connection is kept: that is the connection's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from kvxfer.serving.answers import BODYLESS, CONTINUE, LAST_CHUNK, LEADING_ZERO, encode_head, split_fields
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.exchange import Headers
from kvxfer.serving.exchange_base import ExchangeBase
from kvxfer.serving.heads import RequestHead
from kvxfer.serving.incoming import Incoming

_AT_ONCE = struct.pack("ii", 1, 0)
"""Closed by a reset: otherwise the kernel keeps what a client does not read, for as long as that client acknowledges
it."""


class DirectConnection(Protocol):
    """What an exchange needs of its connection."""

    transport: Any
    bodies: Bodies
    client_name: str

    @property
    def common_fields(self) -> bytes:
        """Lines that are in the head of each answer."""

    @property
    def is_write_paused(self) -> bool:
        """Whether the client reads more slowly than it is written to."""

    async def wait_writable(self, timeout_s: float) -> bool:
        """Wait until the client has caught up, or has left; False after ``timeout_s``."""

    def wake_writers(self) -> None:
        """End all :meth:`wait_writable`."""

    def on_body_taken(self) -> None:
        """There is room for more of the request's body."""

    def on_answered(self) -> None:
        """The answer is whole."""


class DirectExchange(ExchangeBase):
    """A :class:`~kvxfer.serving.exchange.ClientExchange`."""

    __slots__ = (
        *("_connection", "_head", "_is_bodyless", "_is_chunked", "_write", "incoming", "keeps_alive", "request"),
    )

    def __init__(self, connection: DirectConnection, request: RequestHead) -> None:
        super().__init__(request.method, request.path, request.raw_target, request.headers, connection.client_name)
        self._connection = connection
        self._write: Callable[[bytes], None] = connection.transport.write
        self.request = request
        self.incoming = Incoming(connection.on_body_taken)
        self.keeps_alive = request.keeps_alive
        """Whether the connection goes on after the answer, as far as is known now."""
        self._head = b""
        """Waits for the first chunk, no longer than this turn of the loop."""
        self._is_chunked = False
        self._is_bodyless = False

    @property
    def is_paused(self) -> bool:
        return self._connection.is_write_paused

    async def read_body(self) -> bytes:
        self.begin_reading()
        bodies = self._connection.bodies
        if self.incoming.is_whole:
            return bodies.whole(self.incoming.take())
        bodies.check_declared((self.header(b"content-length") or b"0").decode("ascii"))
        if self.request.expects_continue and not self.incoming.held_bytes and not self.is_started:
            self._write(CONTINUE)
        return await bodies.read_chunks(self.incoming)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if self.is_over or self.is_started:
            return
        head = self._begin(status, headers, None if status in BODYLESS else len(body))
        self.is_ended = True
        self._write(head if self._is_bodyless else head + body)
        self._finish()

    def start(self, status: int, headers: Headers) -> None:
        if self.is_over or self.is_started:
            return
        self._head = self._begin(status, headers, None)
        asyncio.get_running_loop().call_soon(self._flush_head)

    def write(self, chunk: bytes) -> None:
        if not chunk or not self.is_started or self.is_ended or self.is_gone or self._is_bodyless:
            return
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        if self._head:
            chunk, self._head = self._head + chunk, b""
        self._write(chunk)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        return self._write_framed if self._is_chunked else None

    def _write_framed(self, chunks: bytes) -> None:
        if self.is_ended or self.is_gone:
            return
        if self._head:
            chunks, self._head = self._head + chunks, b""
        self._write(chunks)

    def end(self) -> None:
        if self.is_over or not self.is_started:
            return
        self.is_ended = True
        last = self._head + LAST_CHUNK if self._is_chunked else self._head
        self._head = b""
        if last:
            self._write(last)
        self._finish()

    def abort(self) -> None:
        if self.is_over:
            return
        self.forget_callbacks()
        self.disconnect()
        transport = self._connection.transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        transport.abort()

    async def drained(self, timeout_s: float) -> bool:
        if self.is_gone or not self.is_paused:
            return True
        return await self._connection.wait_writable(timeout_s)

    # What the connection tells.

    @property
    def is_full(self) -> bool:
        return self.incoming.is_full

    def push(self, piece: bytes) -> None:
        """Some of the body."""
        self.incoming.push(piece)

    def finish(self) -> None:
        """The request is whole."""
        self.incoming.finish()

    def harmless(self) -> bytes:
        """What may be sent now and changes nothing of the answer; empty where there is no such."""
        if not self.is_started:
            return CONTINUE if self.request.version == "1.1" else b""
        return LEADING_ZERO if self._is_chunked and not self._head else b""

    def disconnect(self) -> None:
        """The client has left, or is refused amid its request. Callable twice."""
        if not self.is_gone:
            self._head = b""
            self.incoming.cut()
            self._connection.wake_writers()
            self.leave()

    def _begin(self, status: int, headers: Headers, length: int | None) -> bytes:
        """The answer's head; ``length`` of its body, where that is known."""
        fields, closes = split_fields(status, headers)
        self.is_started = True
        if closes or not self.incoming.is_whole:  # the next request is behind a body that is not read to its end
            self.keeps_alive = False
        self._is_bodyless = self.method == "HEAD" or status in BODYLESS
        more = self._connection.common_fields
        if length is not None:
            more += b"content-length: %d\r\n" % length
        elif not self._is_bodyless:
            self._is_chunked = self.request.version == "1.1"
            if self._is_chunked:
                more += b"transfer-encoding: chunked\r\n"
        if not self.keeps_alive:
            more += b"connection: close\r\n"
        return encode_head(status, fields, more)

    def _finish(self) -> None:
        self.forget_callbacks()
        self._connection.on_answered()

    def _flush_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._write(head)
