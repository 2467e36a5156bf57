"""One answer of an engine after the other, from the bytes of one connection; no socket, no clock.

It decides where an answer ends, whether the connection can carry another one, and which bytes are no answer. The same
bytes give the same answer however they were split. It must never know the consumer: chunks of the body go to ``emit``
as they came, one call for each read of the connection.

``httptools`` cannot be told that an answer has no body (to HEAD, 204, 304), and cannot be told of the end of the
connection: both are decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools

from kvxfer.errors import ProtocolError
from kvxfer.router.upstream.limits import UpstreamLimits

HEAD, BODY, COMPLETE = range(3)
"""Stages: the head has not come whole, the body runs, the answer is over."""

Emit = Callable[[bytes], object]


def discard(chunk: bytes) -> None:
    """Where chunks go that no consumer wants any more."""


class AnswerParser:
    __slots__ = (
        *(
            "_head_bytes",
            "_interims",
            "_is_bodyless",
            "_is_chunked",
            "_is_in_chunk",
            "_is_interim",
            "_is_spent",
            "_is_until_close",
            "_limits",
            "_parser",
            "_pieces",
        ),
        *("_silent_bytes", "_tail", "_to_head", "body_bytes", "emit", "headers", "is_clean", "keeps_alive", "stage"),
        *("is_between_chunks", "status"),
    )

    def __init__(self, limits: UpstreamLimits) -> None:
        self._limits = limits
        self._parser: Any = None
        self._is_spent = True
        self.stage = COMPLETE
        self.emit: Emit = discard
        self.is_between_chunks = False
        """Whether the next byte begins a chunk of the body. Whole chunks may then be taken as they came (`passed`)."""

    def begin(self, emit: Emit, *, to_head: bool) -> None:
        """The next bytes are the answer to a request that was sent, to HEAD where ``to_head``."""
        if self._is_spent:
            self._parser = httptools.HttpResponseParser(self)
            self._is_spent = False
        self.emit = emit
        self.stage = HEAD
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body_bytes = 0
        self._pieces: list[bytes] = []
        self.is_clean = True
        """No byte came after the end of the answer."""
        self.keeps_alive = False
        self._to_head = to_head
        self._head_bytes = 0
        self._interims = 0
        self._silent_bytes = 0
        self._is_interim = self._is_until_close = self._is_bodyless = False
        self._is_chunked = self._is_in_chunk = self.is_between_chunks = False
        self._tail = b""

    def end(self) -> None:
        """Nothing more is fed: lets go of ``httptools``, which refers back to this object."""
        self._parser = None
        self._is_spent = True
        self.emit = discard

    def feed(self, data: bytes) -> None:
        """Raises ``ProtocolError``, or what ``emit`` raised."""
        if self.stage == HEAD:
            self._feed_head(data)
            return
        before = self.body_bytes
        self.is_between_chunks = False
        self._push(data)
        # A begun line of a chunk's size never ends so: `on_chunk_header` is called at its end.
        self.is_between_chunks = (
            self._is_chunked and not self._is_in_chunk and self.stage == BODY and data.endswith(b"\r\n")
        )
        self._hand_on()
        if self.body_bytes == before:
            self._silent_bytes += len(data)
            if self._silent_bytes > self._limits.silent_bytes_max and self.stage == BODY:
                raise ProtocolError(f"more than {self._limits.silent_bytes_max} bytes without a byte of the body")
        else:
            self._silent_bytes = 0

    def passed(self, size: int) -> None:
        """Whole chunks with ``size`` bytes of body came, and the consumer took them as they were."""
        self.body_bytes += size
        self._silent_bytes = 0

    def eof(self) -> bool:
        """The engine sends nothing more. Whether that ends the answer well."""
        if self.stage == BODY and self._is_until_close:
            self.stage = COMPLETE
        self.is_clean = False
        return self.stage == COMPLETE

    @property
    def has_begun(self) -> bool:
        return self._head_bytes > 0

    def _feed_head(self, data: bytes) -> None:
        room = self._limits.head_bytes_max - self._head_bytes
        part = data[:room]
        self._head_bytes += len(part)
        if part:
            self._tail = (self._tail + part[-4:])[-4:]
            self._push(part)
        if len(data) > room:
            if self.stage == HEAD:
                raise ProtocolError(f"the answer's head has more than {self._limits.head_bytes_max} bytes")
            self._tail = b""
            self._push(data[room:])
        self._hand_on()
        if self._is_bodyless and self._tail != b"\r\n\r\n":
            self.is_clean = False

    def _hand_on(self) -> None:
        """What one read brought of the body, in one call."""
        pieces = self._pieces
        if pieces:
            self._pieces = []
            self.emit(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _push(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._is_spent = True
            self.is_clean = False
            cause = error.__context__
            self._hand_on()
            if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
                raise cause from None
            if self.stage != COMPLETE:
                raise ProtocolError(f"no answer of HTTP/1.1: {error}") from None

    def on_message_begin(self) -> None:
        if self.stage == COMPLETE:
            self.is_clean = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.stage != HEAD:
            return
        if len(self.headers) >= self._limits.headers_max:
            raise ProtocolError(f"the answer has more than {self._limits.headers_max} headers")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.stage != HEAD:
            return
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ProtocolError(f"an answer of HTTP/{version}")
        status = self._parser.get_status_code()
        length, is_chunked, connection = self._framing()
        if status < 200:
            self._skip_interim(status, has_body=is_chunked or bool(length))
            return
        if is_chunked and version == "1.0":
            raise ProtocolError("chunks in an answer of HTTP/1.0")
        self.status = status
        self._is_bodyless = self._to_head or status in (204, 304)
        self._is_chunked = is_chunked
        self._is_until_close = not self._is_bodyless and length is None and not is_chunked
        is_kept = b"close" not in connection if version == "1.1" else b"keep-alive" in connection
        self.keeps_alive = is_kept and not self._is_until_close
        self.stage = BODY
        if self._is_bodyless:
            self.stage = COMPLETE
            self._is_spent = True

    def on_chunk_header(self) -> None:
        self._is_in_chunk = True

    def on_chunk_complete(self) -> None:
        self._is_in_chunk = False

    def on_body(self, chunk: bytes) -> None:
        if self.stage == BODY:
            self.body_bytes += len(chunk)
            self._pieces.append(chunk)
        else:
            self.is_clean = False

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        elif self.stage == BODY:
            self.stage = COMPLETE

    def _skip_interim(self, status: int, *, has_body: bool) -> None:
        if status < 100 or status == 101 or has_body:
            raise ProtocolError(f"an answer of status {status}, which was not asked for")
        self._interims += 1
        if self._interims > self._limits.interim_max:
            raise ProtocolError(f"more than {self._limits.interim_max} interim answers")
        self.headers = []
        self._is_interim = True

    def _framing(self) -> tuple[int | None, bool, set[bytes]]:
        """Content-Length, whether the body comes in chunks, and the words of Connection."""
        length: int | None = None
        is_chunked = False
        connection: set[bytes] = set()
        for name, value in self.headers:
            if len(name) == 14 and name.lower() == b"content-length":
                if length is not None or not value.isdigit() or len(value) > 18:
                    raise ProtocolError(f"content-length {value[:40]!r}")
                length = int(value)
            elif len(name) == 17 and name.lower() == b"transfer-encoding":
                if is_chunked or value.lower() != b"chunked":
                    raise ProtocolError(f"transfer-encoding {value[:40]!r}")
                is_chunked = True
            elif len(name) == 10 and name.lower() == b"connection":
                connection.update(word.strip() for word in value.lower().split(b","))
        if is_chunked and length is not None:
            raise ProtocolError("content-length beside chunks")
        return length, is_chunked, connection
