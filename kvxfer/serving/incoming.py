"""The body of one request, between the connection that receives it and the handler that reads it.

Decides where the body ends and when its client is to be slowed down. It must never know how large a body may be:
``bodies`` says that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from kvxfer.serving.exchange import ClientGoneError
from kvxfer.serving.heads import FIELDS, HEAD_BYTES_MAX, MalformedRequestError

BUFFERED_BYTES_MAX = 64 << 10
"""Of a body that its handler does not take: beyond it the client has to wait."""
CHUNK_LINE_BYTES_MAX = 1024
"""Longest line before a chunk: its size and extensions."""

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*+)?\r\n")
_LINE_END = b"\r\n"

Push = Callable[[bytes], None]


class LengthReader:
    """Cuts a body of known length out of a connection's bytes."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def is_over(self) -> bool:
        return not self._left

    def feed(self, data: bytes, push: Push) -> bytes:
        """Hand the body's bytes to ``push``; returns what is not of this body."""
        if len(data) <= self._left:
            self._left -= len(data)
            push(data)
            return b""
        piece, rest = data[: self._left], data[self._left :]
        self._left = 0
        push(piece)
        return rest


class ChunkReader:
    """Cuts a body in chunks out of a connection's bytes. httptools cannot say where the last chunk ended, so that a
    request behind it could not be found.
    """

    __slots__ = ("_held", "_left", "_step", "_trailer_bytes", "is_over")

    def __init__(self) -> None:
        self._held = b""
        """The beginning of a line."""
        self._left = 0
        """Of the chunk that is being read."""
        self._trailer_bytes = 0
        self._step: Callable[[bytes, int, Push], int] = self._read_line
        self.is_over = False

    def feed(self, data: bytes, push: Push) -> bytes:
        """As LengthReader's. Raises MalformedRequestError."""
        if self._held:
            data, self._held = self._held + data, b""
        at = 0
        while not self.is_over:
            end = self._step(data, at, push)
            if end == at:  # more bytes are needed
                self._held = data[at:]
                return b""
            at = end
        return data[at:]

    def _read_line(self, data: bytes, at: int, push: Push) -> int:
        line = _CHUNK_LINE.match(data, at)
        if line is None:
            if data.find(b"\n", at, at + CHUNK_LINE_BYTES_MAX) >= 0 or len(data) - at >= CHUNK_LINE_BYTES_MAX:
                raise MalformedRequestError(f"illegal chunk header: {data[at : at + 40]!r}")
            return at
        if line.end() - at > CHUNK_LINE_BYTES_MAX:
            raise MalformedRequestError(f"a chunk's header exceeds {CHUNK_LINE_BYTES_MAX} bytes")
        self._left = int(line[1], 16)
        self._step = self._read_chunk if self._left else self._read_trailer
        return line.end()

    def _read_chunk(self, data: bytes, at: int, push: Push) -> int:
        piece = data[at : at + self._left]
        if piece:
            self._left -= len(piece)
            push(piece)
        if not self._left:
            self._step = self._read_chunk_end
        return at + len(piece)

    def _read_chunk_end(self, data: bytes, at: int, push: Push) -> int:
        found = data[at : at + 2]
        if not _LINE_END.startswith(found):
            raise MalformedRequestError(f"malformed chunk footer: {found!r}")
        if len(found) < 2:
            return at
        self._step = self._read_line
        return at + 2

    def _read_trailer(self, data: bytes, at: int, push: Push) -> int:
        """One line of the trailer, which is thrown away; an empty one is the end of the body."""
        end = data.find(b"\n", at, at + HEAD_BYTES_MAX) + 1
        if self._trailer_bytes + (end - at if end else len(data) - at) > HEAD_BYTES_MAX:
            raise MalformedRequestError(f"the request's trailer exceeds {HEAD_BYTES_MAX} bytes")
        if not end:
            return at
        self._trailer_bytes += end - at
        if data[at:end] == _LINE_END:
            self.is_over = True
        elif FIELDS.fullmatch(data, at, end) is None:
            raise MalformedRequestError(f"illegal trailer line: {data[at : min(end, at + 40)]!r}")
        return end


class Incoming:
    """What of a body has come and was not taken yet; one reader at a time. ``on_taken`` is called when it was taken."""

    __slots__ = ("_on_taken", "_parts", "_waiter", "held_bytes", "is_cut", "is_whole")

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self._on_taken = on_taken
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.held_bytes = 0
        self.is_whole = False
        self.is_cut = False
        """The rest will not come."""

    @property
    def is_full(self) -> bool:
        return self.held_bytes > BUFFERED_BYTES_MAX

    def push(self, piece: bytes) -> None:
        if not self.is_cut:
            self._parts.append(piece)
            self.held_bytes += len(piece)
            self._wake()

    def finish(self) -> None:
        self.is_whole = True
        self._wake()

    def cut(self) -> None:
        """The client has left, or its bytes are not read on."""
        self.is_cut = True
        self._parts.clear()
        self.held_bytes = 0
        self._wake()

    def take(self) -> bytes:
        """All that has come since the last time."""
        parts = self._parts
        if len(parts) == 1:
            taken = parts.pop()
        else:
            taken = b"".join(parts)
            parts.clear()
        self.held_bytes = 0
        self._on_taken()
        return taken

    def __aiter__(self) -> Incoming:
        return self

    async def __anext__(self) -> bytes:
        """The next bytes of the body. Raises ClientGoneError."""
        while not self._parts:
            if self.is_cut:
                raise ClientGoneError("the client left amid its request")
            if self.is_whole:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
