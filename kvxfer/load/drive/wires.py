"""One HTTP/1.1 connection of a sending process: dials, sends, receives, and hands what came to the answer's reader.

Decides when a request was begun, when its last byte was handed to the kernel, when bytes came, and whether a failed
request may be tried again: once, where a connection that had stood idle failed at once and before any byte of the
answer. It must never know a schedule.
"""

from __future__ import annotations

import enum
import errno
import os
import select
import socket
import ssl
import time
from typing import Any, Protocol

import httptools

from kvxfer.load.drive.answer import BAD_ANSWER, BROKEN_STREAM, CONNECTION_LOST, UNREACHABLE, AnswerReader
from kvxfer.load.drive.endpoint import LoadEndpoint
from kvxfer.load.record import MeasuredRequest

RECEIVE_BYTES = 1 << 18
BARE_BYTES_MAX = 1 << 20
"""Of heads, trailers and extensions without a byte of a body between them."""
RETRY_S = 1.0
"""A kept connection that ends later than this after the request was sent had not stood idle: the server has dropped a
request that it had."""
IN, OUT = select.EPOLLIN, select.EPOLLOUT


class SentRequest:
    """A request in flight."""

    __slots__ = ("begun_s", "payload", "reader", "record", "was_retried", "wire")

    def __init__(self, record: MeasuredRequest, payload: bytes, begun_s: float) -> None:
        self.record = record
        self.payload = payload
        self.reader = AnswerReader()
        self.was_retried = False
        self.begun_s = begun_s
        self.wire: Wire | None = None

    def note_begun(self, now_s: float) -> None:
        """The driver has done its part. Only the first attempt counts: what delays a later one is the server's."""
        if self.record.begun_s is None:
            self.record.begun_s = now_s


class WireOwner(Protocol):
    """What a connection tells. Times in seconds after the beginning of the run."""

    began_s: float
    """Of the run, by the monotonic clock."""
    epoll: select.epoll

    def wire_ready(self, wire: Wire) -> None:
        """It is connected and has no request."""

    def wire_closed(self, wire: Wire) -> None:
        """It is gone."""

    def wire_ended(self, request: SentRequest, now_s: float) -> None:
        """The request has its answer, or has failed."""

    def wire_retries(self, request: SentRequest) -> None:
        """The request is to be sent again, over a new connection."""


class WireState(enum.Enum):
    DIALING = enum.auto()
    SHAKING = enum.auto()
    IDLE = enum.auto()
    BUSY = enum.auto()
    CLOSED = enum.auto()


class Wire:
    """A connection. ``request`` is what it carries, or will carry once it is connected."""

    __slots__ = (
        *(
            "_bare_bytes",
            "_content_type",
            "_events",
            "_has_bytes",
            "_is_complete",
            "_is_framed",
            "_is_junk",
            "_is_kept",
            "_now_s",
            "_out",
            "_owner",
        ),
        *("_parser", "_sock", "_stood_idle", "_buffer", "_view", "fd", "request", "state", "_is_tls"),
    )

    def __init__(
        self, owner: WireOwner, endpoint: LoadEndpoint, context: ssl.SSLContext | None, buffer: bytearray
    ) -> None:
        """Begins to dial. Raises OSError where that fails at once."""
        self._owner = owner
        self._parser: Any = None
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._out: memoryview | None = None
        self._content_type = ""
        self._has_bytes = self._is_complete = self._is_framed = self._is_junk = self._is_kept = self._stood_idle = False
        self._now_s = 0.0
        self._bare_bytes = 0
        self.request: SentRequest | None = None
        self.state = WireState.DIALING
        self._is_tls = context is not None
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(endpoint.address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            if context is not None:
                host = endpoint.host
                sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self.fd = sock.fileno()
        self._events = OUT
        owner.epoll.register(self.fd, OUT)

    @property
    def can_carry(self) -> bool:
        """It is idle, or will be once it is connected."""
        return self.request is None and self.state in (WireState.IDLE, WireState.DIALING, WireState.SHAKING)

    def send(self, request: SentRequest) -> None:
        """Send it, now or once connected."""
        self.request = request
        request.wire = self
        if self.state is WireState.IDLE:
            self._begin(request, stood_idle=True)
        else:
            request.note_begun(time.monotonic() - self._owner.began_s)

    def close(self) -> None:
        """Nothing is told of its request."""
        if self.state is not WireState.CLOSED:
            self.state = WireState.CLOSED
            self._owner.epoll.unregister(self.fd)
            self._sock.close()
            self._parser = self._out = None
            self._owner.wire_closed(self)

    def ready(self, events: int) -> None:
        """The kernel says that something can be done."""
        if self.state is WireState.BUSY:
            if events & OUT and self._out is not None:
                self._send_more()
            if events & ~OUT and self.state is WireState.BUSY:
                self._receive()
        elif self.state is WireState.DIALING:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._undialed(os.strerror(code))
            elif self._is_tls:
                self.state = WireState.SHAKING
                self._shake()
            else:
                self._connected()
        elif self.state is WireState.SHAKING:
            self._shake()
        elif self.state is WireState.IDLE and not self._is_quiet():
            self.close()

    def _is_quiet(self) -> bool:
        """What an idle connection has to say is TLS's own, such as tickets: it is neither closed by the server, nor is
        there something that was not asked for."""
        if not self._is_tls:
            return False
        try:
            self._sock.recv_into(self._buffer, 1)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False
        return False

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._events = events
            self._owner.epoll.modify(self.fd, events)

    def _shake(self) -> None:
        assert isinstance(self._sock, ssl.SSLSocket)
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(IN)
        except ssl.SSLWantWriteError:
            self._watch(OUT)
        except (OSError, ValueError) as error:
            self._undialed(str(error))
        else:
            self._connected()

    def _undialed(self, reason: str) -> None:
        request, self.request = self.request, None
        self.close()
        if request is not None:
            now_s = time.monotonic() - self._owner.began_s
            request.reader.fail(UNREACHABLE, reason, now_s)
            self._owner.wire_ended(request, now_s)

    def _connected(self) -> None:
        self._watch(IN)
        self.state = WireState.IDLE
        if self.request is None:
            self._owner.wire_ready(self)
        else:
            self._begin(self.request, stood_idle=False)

    def _begin(self, request: SentRequest, *, stood_idle: bool) -> None:
        self.state = WireState.BUSY
        self._stood_idle = stood_idle
        self._has_bytes = self._is_complete = self._is_framed = self._is_junk = self._is_kept = False
        self._content_type = ""
        self._bare_bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        self._out = memoryview(request.payload)
        self._send_more()

    def _send_more(self) -> None:
        assert self._out is not None
        assert self.request is not None
        try:
            while True:
                count = self._sock.send(self._out)
                if count == len(self._out):
                    break
                self._out = self._out[count:]
                self.request.note_begun(time.monotonic() - self._owner.began_s)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self.request.note_begun(time.monotonic() - self._owner.began_s)
            self._watch(IN | OUT)
            return
        except OSError as error:  # an answer that says why may have come before
            self.request.note_begun(time.monotonic() - self._owner.began_s)
            self._out = None
            self._receive()
            if self.state is WireState.BUSY:
                self._lost(CONNECTION_LOST, error.strerror or str(error))
            return
        now_s = time.monotonic() - self._owner.began_s
        self.request.note_begun(now_s)
        self.request.record.sent_s = now_s
        self._out = None
        self._watch(IN)

    def _receive(self) -> None:
        try:
            count = self._sock.recv_into(self._buffer)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._lost(CONNECTION_LOST, error.strerror or str(error))
            return
        self._now_s = time.monotonic() - self._owner.began_s
        if not count:
            self._end_of_file()
            return
        self._has_bytes = True
        self._bare_bytes += count
        try:
            self._parser.feed_data(self._view[:count])
        except httptools.HttpParserError as error:
            if not self._is_complete:
                self._lost(BAD_ANSWER, f"no HTTP: {error}")
                return
            self._is_junk = True
        except httptools.HttpParserUpgrade:
            self._lost(BAD_ANSWER, "the server wants another protocol")
            return
        if self._is_complete:
            self._complete()
        elif self._is_junk:
            self._lost(BAD_ANSWER, "")
        elif self._bare_bytes > BARE_BYTES_MAX:
            self._lost(BAD_ANSWER, "the head of the answer is too long")
        elif self._is_tls and self._sock.pending():  # type: ignore[attr-defined]
            self._receive()

    def _end_of_file(self) -> None:
        assert self.request is not None
        reader = self.request.reader
        if reader.status is not None and not self._is_framed:  # the end of the connection is the end of the body
            self._is_junk = True
            reader.end(self._now_s)
            self._complete()
        elif reader.status == 200:
            self._lost(BROKEN_STREAM, "the connection ended within the answer")
        else:
            self._lost(CONNECTION_LOST, "the server closed the connection")

    def _complete(self) -> None:
        """The answer is whole, as far as HTTP goes."""
        request, self.request = self.request, None
        assert request is not None
        if self._out is not None:
            request.reader.came_before_its_request(self._now_s)
        is_kept = self._is_kept and not self._is_junk and self._out is None
        self._parser = None
        if is_kept:
            self.state = WireState.IDLE
            self._owner.wire_ready(self)
        else:
            self.close()
        self._owner.wire_ended(request, self._now_s)

    def _lost(self, error: str, message: str) -> None:
        request, self.request = self.request, None
        assert request is not None
        is_retried = self._stood_idle and not self._has_bytes and not request.was_retried
        self.close()
        now_s = time.monotonic() - self._owner.began_s
        if is_retried and error == CONNECTION_LOST and now_s - (request.record.sent_s or request.begun_s) <= RETRY_S:
            request.was_retried = True
            request.record.sent_s = None
            self._owner.wire_retries(request)
            return
        request.reader.fail(error, message, now_s)
        self._owner.wire_ended(request, now_s)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._is_complete or self.request is None:
            self._is_junk = True
        elif status >= 200:
            self.request.reader.head(status, self._content_type)
            self._is_framed = self._is_framed or status in (204, 304)

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        if not self._is_complete and self.request is not None and not self.request.reader.data(body, self._now_s):
            self._is_junk = True

    def on_message_complete(self) -> None:
        if self.request is not None and self.request.reader.status is not None and not self._is_complete:
            self._is_complete = True
            self._is_kept = self._parser.should_keep_alive()  # what it says is no longer so after this call
            self.request.reader.end(self._now_s)
