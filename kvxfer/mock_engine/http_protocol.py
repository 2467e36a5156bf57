"""HTTP/1.1 on a socket: cuts bytes into requests, one at a time, and says when the client left.

Decides limits and keep-alive. It must never know what a request means: ``serve`` gets it whole. There is no framework
in between, because the mock engine must cost less than what is measured with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools
import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.mock_engine.faults import FaultKind, FaultTable
from kvxfer.mock_engine.responder import Responder
from kvxfer.openai.errors import RequestError, error_body, status_for
from kvxfer.protocol.http_target import path_and_query
from kvxfer.protocol.http_url import is_one_host

log = logging.getLogger("kvxfer.mock_engine")

HEAD_BYTES_MAX = 1 << 18
PIPELINED_MAX = 64
_SLOW = frozenset({FaultKind.SLOW_READ})


class MockRequest:
    """One request, whole. ``on_gone`` is called once if its client leaves before the answer is complete."""

    __slots__ = ("body", "headers", "keep_alive", "method", "on_gone", "path", "peer", "query")

    def __init__(self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], keep_alive: bool) -> None:
        path, _, query = target.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self.query = query.decode("latin-1")
        self.headers = headers
        self.keep_alive = keep_alive
        self.body = b""
        self.peer = ""
        self.on_gone: Callable[[], None] | None = None

    def header(self, name: bytes) -> str:
        """The first header of that name, in small letters; empty if there is none."""
        for one, value in self.headers:
            if one == name:
                return value.decode("latin-1")
        return ""

    def json(self) -> dict[str, Any]:
        """The body as an object. Raises RequestError for anything else."""
        value = self.json_value()
        if not isinstance(value, dict):
            raise RequestError("the body must be a JSON object")
        return value

    def json_value(self) -> Any:
        """The body as any JSON. Raises RequestError where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None


class ConnectionOwner(Protocol):
    """The engine behind a port, as far as its connections need it."""

    faults: FaultTable
    max_body_bytes: int

    def opened(self, connection: MockConnection) -> None: ...

    def closed(self, connection: MockConnection, *, left: bool) -> None:
        """``left``: a client left before its answer was complete."""

    def serve(self, request: MockRequest, responder: Responder, connection: MockConnection) -> None:
        """Answer ``request`` through ``responder``, now or later."""

    def computes(self, path: str) -> bool:
        """Whether an engine computes something for this path."""


class MockConnection(asyncio.Protocol):
    """One connection. Requests that a client sends ahead wait until the one before is answered."""

    transport: asyncio.Transport

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._request: MockRequest | None = None
        """Its head is here, and its body is not whole."""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._slow_s = 0.0
        self._active: MockRequest | None = None
        self._responder: Responder | None = None
        self._waiting: deque[MockRequest] = deque()
        self._peer = ""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self._peer = str(name[0]) if isinstance(name, tuple) else ""
        self._owner.opened(self)

    def eof_received(self) -> None:
        """The client has left: what runs for it ends now, not in the loop's next turn, in which it might finish."""
        if self._active is not None and self._active.on_gone is not None:
            self._active.on_gone()

    def connection_lost(self, error: Exception | None) -> None:
        active, responder = self._active, self._responder
        left = active is not None and responder is not None and not responder.is_closed
        self._active = self._responder = None
        self._waiting.clear()
        if responder is not None:
            responder.close()
        self._owner.closed(self, left=left)
        if active is not None and active.on_gone is not None:
            active.on_gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # it was served without an upgrade; the parser reads no further request
        except httptools.HttpParserCallbackError as error:
            self._refuse(error.__context__ if error.__context__ is not None else error)
        except httptools.HttpParserError as error:
            self._refuse(RequestError(f"the request is not valid HTTP: {error}"))
        if self._slow_s and self._request is not None and not self.transport.is_closing():
            self.transport.pause_reading()
            self._loop.call_later(self._slow_s, self._read_on)

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise RequestError(f"the head is longer than {HEAD_BYTES_MAX} bytes", status=431)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        method = self._parser.get_method().decode()
        keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        hosts = [value for name, value in self._headers if name == b"host"]
        if not is_one_host(hosts, is_required=self._parser.get_http_version() == "1.1"):
            raise RequestError("the request needs one host field: a name or an address, and maybe a port")
        try:
            target = path_and_query(self._target, hosts[0] if hosts else None)
        except ProtocolError as error:
            raise RequestError(str(error)) from None
        self._request = request = MockRequest(method, target, self._headers, keep_alive)
        request.peer = self._peer
        self._target, self._headers, self._head_bytes = b"", [], 0
        if len(self._owner.faults):
            computes = self._owner.computes(request.path)
            fault = self._owner.faults.take(request.path, None, computes=computes, kinds=_SLOW)
            self._slow_s = fault.delay_s if fault is not None else 0.0
        if request.header(b"expect").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._owner.max_body_bytes:
            raise RequestError(f"the body is longer than {self._owner.max_body_bytes} bytes", status=413)
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        if request is None:
            return
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._request, self._body, self._body_bytes = None, [], 0
        if self._active is None:
            self._serve(request)
        elif len(self._waiting) < PIPELINED_MAX:
            self._waiting.append(request)
        else:
            raise RequestError(f"more than {PIPELINED_MAX} requests were sent ahead")

    def answered(self) -> None:
        self._active = self._responder = None
        if self._waiting and not self.transport.is_closing():
            self._loop.call_soon(self._serve_next)

    def _serve_next(self) -> None:
        if self._waiting and self._active is None and not self.transport.is_closing():
            self._serve(self._waiting.popleft())

    def _serve(self, request: MockRequest) -> None:
        is_head = request.method == "HEAD"
        if is_head:
            request.method = "GET"
        responder = Responder(self, request.keep_alive, is_bodyless=is_head)
        self._active, self._responder = request, responder
        self._owner.serve(request, responder, self)

    def use(self, responder: Responder) -> None:
        """The active request is answered by ``responder`` in place of the one that ``serve`` got."""
        self._responder = responder

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _refuse(self, error: BaseException) -> None:
        """The client's bytes cannot be read on: say why, if no answer is under way, and close."""
        if not isinstance(error, RequestError):
            log.error("a request could not be served", exc_info=error)
        if self.transport.is_closing():
            return
        if self._active is None:
            Responder(self, False).answer(status_for(error), msgspec.json.encode(error_body(error)))
        else:
            self.transport.close()
