"""How an answer is put on a connection: whole, or in chunks; and how it goes wrong where a fault says so.

Decides bytes of HTTP's framing. It must never know what an answer says.
"""

from __future__ import annotations

import asyncio
import http
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from kvxfer.mock_engine.faults import FaultKind, MockFault

JSON = b"application/json"
STREAM_HEAD = b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
GARBAGE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is no HTTP \xff\xfe\r\n"
GARBAGE_EVENT = b'data: {"id": "cmpl-\xff", "choices": [{]}\n\n'


def status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "Status"
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


def encoded_headers(headers: Mapping[str, str]) -> bytes:
    return b"".join([f"{name}: {value}\r\n".encode("latin-1", "replace") for name, value in headers.items()])


_OK = status_line(200)


class ResponseSide(Protocol):
    """The connection, as far as an answer needs it."""

    transport: asyncio.Transport

    def answered(self) -> None:
        """The answer is complete: the next request may begin."""


class Responder:
    """The answer to one request. After :meth:`close` nothing is written."""

    __slots__ = ("_is_bodyless", "_keep_alive", "_side", "begun", "is_closed")

    def __init__(self, side: ResponseSide, keep_alive: bool, *, is_bodyless: bool = False) -> None:
        """``is_bodyless``: of HEAD, which gets the head of what GET gets."""
        self._side = side
        self._keep_alive = keep_alive
        self._is_bodyless = is_bodyless
        self.begun = False
        self.is_closed = False

    def answer(self, status: int, body: bytes, kind: bytes = JSON, headers: bytes = b"") -> None:
        """All of an answer."""
        if self.is_closed:
            return
        close = b"" if self._keep_alive else b"connection: close\r\n"
        self.send(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (status_line(status), kind, len(body), headers, close, b"" if self._is_bodyless else body)
        )
        self.finish()

    def begin(self) -> None:
        """The head of an answer in chunks."""
        if not self.begun:
            close = b"" if self._keep_alive else b"connection: close\r\n"
            self.send(_OK + STREAM_HEAD + close + b"\r\n")

    def chunk(self, framed: bytes) -> None:
        """One or more chunks, framed already, with what belongs to one token."""
        if not self.is_closed:
            self._side.transport.write(framed)

    def end(self, framed: bytes) -> None:
        """The last chunks, framed already, and the end of the answer."""
        if not self.is_closed:
            self._side.transport.write(framed + LAST_CHUNK)
            self.finish()

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.begun = True
        if not self.is_closed:
            self._side.transport.write(data)

    def finish(self) -> None:
        """The answer is complete."""
        self.is_closed = True
        if not self._keep_alive:
            self._side.transport.close()
        self._side.answered()

    def close(self) -> None:
        """The client left, or must not get more."""
        self.is_closed = True


class FaultyResponder(Responder):
    """An answer that goes wrong in the middle. ``down`` closes the whole engine."""

    __slots__ = ("_down", "_fault", "_held", "_tokens")

    def __init__(
        self, side: ResponseSide, keep_alive: bool, fault: MockFault, down: Callable[[MockFault], None]
    ) -> None:
        super().__init__(side, keep_alive)
        self._fault = fault
        self._down = down
        self._tokens = 0
        self._held: list[Callable[[], None]] | None = None

    def answer(self, status: int, body: bytes, kind: bytes = JSON, headers: bytes = b"") -> None:
        if self._fault.kind is FaultKind.HEADERS:
            super().answer(status, body, kind, headers + self._filler())
        elif self._breaks():
            close = b"%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status_line(status), kind, len(body))
            self._break(close + body if self._fault.kind is FaultKind.HALF else b"")
        elif self._held is not None:
            self._held.append(lambda: super(FaultyResponder, self).answer(status, body, kind, headers))
        else:
            super().answer(status, body, kind, headers)

    def begin(self) -> None:
        if self._fault.kind is FaultKind.HEADERS and not self.begun:
            self.send(_OK + STREAM_HEAD + self._filler() + b"\r\n")
        elif self._fault.after_tokens or self._fault.kind not in (FaultKind.GARBAGE, FaultKind.EXIT, FaultKind.DOWN):
            super().begin()

    def chunk(self, framed: bytes) -> None:
        if self._breaks():
            self._break(framed)
        if self._held is not None:
            self._held.append(lambda: super(FaultyResponder, self).chunk(framed))
        else:
            super().chunk(framed)
        self._tokens += 1

    def end(self, framed: bytes) -> None:
        if self._breaks():
            self._break(framed)
        if self._held is not None:
            self._held.append(lambda: super(FaultyResponder, self).end(framed))
        else:
            super().end(framed)

    def _filler(self) -> bytes:
        line = b"x-mock-filler: " + b"f" * 4000 + b"\r\n"
        return line * (-(-self._fault.bytes // len(line)))

    def _breaks(self) -> bool:
        return (
            self._fault.kind is not FaultKind.HEADERS
            and self._held is None
            and self._tokens >= self._fault.after_tokens
        )

    def _break(self, framed: bytes) -> None:
        """Perform the fault, once. ``framed`` would be sent now."""
        if self.is_closed:
            return
        fault, transport = self._fault, self._side.transport
        if fault.kind is FaultKind.STALL:
            self._held = []
            if fault.delay_s:
                asyncio.get_running_loop().call_later(fault.delay_s, self._go_on)
            return
        self.close()
        if fault.kind is FaultKind.EXIT:
            os._exit(fault.status)
        if fault.kind is FaultKind.DOWN:
            self._down(fault)
        elif fault.kind is FaultKind.CUT and fault.reset:
            transport.abort()
        elif fault.kind is FaultKind.HALF:
            transport.write(framed[: max(1, len(framed) // 2)])
            transport.close()
        elif fault.kind is FaultKind.GARBAGE and self.begun:
            transport.write(b"%x\r\n%b\r\n" % (len(GARBAGE_EVENT), GARBAGE_EVENT) + LAST_CHUNK)
            transport.close()
        elif fault.kind is FaultKind.GARBAGE:
            transport.write(GARBAGE)
            transport.close()
        else:
            transport.close()

    def _go_on(self) -> None:
        held, self._held = self._held or [], None
        self._tokens = -(1 << 40)
        for send in held:
            send()
