"""Server-sent events both ways: encode one event, and cut a byte stream into whole events.

The decoder keeps each event's own bytes, so that a relay can pass them on unchanged and never forwards half an
event; it must never know what the events mean.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from kvxfer.errors import ProtocolError

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which no client takes for an event."""
EVENT_BYTES_MAX = 64 << 20
"""As long as a whole answer may be that is not streamed: an engine may put all of one into its last event."""
CR, LF = 0x0D, 0x0A
_LINE_END = re.compile(rb"[\r\n]")


def encode_object(obj: Any) -> bytes:
    """Compact JSON, pure ASCII. Raises ValueError for a number that JSON has not, RecursionError for deep nesting."""
    return json.dumps(obj, separators=(",", ":"), allow_nan=False).encode("ascii")


def encode_event(obj: Any) -> bytes:
    """One ``data:`` event with ``obj`` as :func:`encode_object` writes it: no line break can appear inside."""
    return b"data: " + encode_object(obj) + b"\n\n"


@dataclasses.dataclass(frozen=True)
class Event:
    """One event: ``raw`` with its closing blank line, ``data`` the joined data lines (empty for a comment)."""

    raw: bytes
    data: bytes

    @property
    def is_done(self) -> bool:
        return self.data == b"[DONE]"

    def json(self) -> Any:
        """The data as JSON; raise ProtocolError if it is not."""
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            raise ProtocolError("event data is not JSON") from None


LATE_LF = Event(raw=b"\n", data=b"")


def _is_one_line(chunk: bytes) -> bool:
    """Whether it is one whole event, of one line of data."""
    return (
        chunk.startswith(b"data: ")
        and chunk.endswith(b"\n\n")
        and chunk.find(b"\n") == len(chunk) - 2
        and b"\r" not in chunk
    )


class EventDecoder:
    """Incremental splitter: bytes in, whole events out. Lines end with LF, CRLF or CR.

    A CR ends its line at once. The LF of an event's last CRLF may come after the event was returned: it is returned as
    an event without data then, as a comment is.
    """

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._buffer = bytearray()
        self._line_start = 0
        self._scan = 0
        self._data: list[bytes] = []
        self._after_cr = False
        """Whether the event before ended with a CR."""

    @property
    def is_empty(self) -> bool:
        """Whether no byte waits for more of its event."""
        return not self._buffer

    @property
    def pending_bytes(self) -> int:
        """How many bytes wait for more of their event."""
        return len(self._buffer)

    @property
    def has_partial_event(self) -> bool:
        """Whether bytes of an unfinished event are held; blank lines alone are not an event."""
        return bool(self._buffer.strip(b"\r\n"))

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes, return the events they complete; raise ProtocolError if one grows past its bound."""
        if not self._buffer and _is_one_line(chunk) and len(chunk) <= self._event_bytes_max:
            self._after_cr = False
            return [Event(raw=chunk, data=chunk[6:-2])]  # as engines send most of them
        events: list[Event] = []
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):
                events.append(LATE_LF)
                chunk = chunk[1:]
        self._buffer += chunk
        while (line := self._next_line()) is not None:
            if line:
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value[1:] if value.startswith(b" ") else value)
                continue
            raw = bytes(self._buffer[: self._line_start])
            self._after_cr = raw.endswith(b"\r")
            events.append(Event(raw=raw, data=b"\n".join(self._data)))
            del self._buffer[: self._line_start]
            self._line_start = self._scan = 0
            self._data = []
        if len(self._buffer) > self._event_bytes_max:
            raise ProtocolError(f"an event is longer than event_bytes_max {self._event_bytes_max}")
        return [event for event in events if event is LATE_LF or event.raw.strip(b"\r\n")]

    def _next_line(self) -> bytes | None:
        """The next whole line without its end. An LF that comes after a CR belongs to the end of the line before."""
        buffer, start = self._buffer, self._line_start
        if 0 < start == self._scan < len(buffer) and buffer[start - 1] == CR and buffer[start] == LF:
            start = self._line_start = self._scan = start + 1
        found = _LINE_END.search(buffer, self._scan)
        if found is None:
            self._scan = len(buffer)
            return None
        end = found.start()
        is_crlf = buffer[end] == CR and buffer[end + 1 : end + 2] == b"\n"
        line = bytes(buffer[start:end])
        self._line_start = self._scan = end + (2 if is_crlf else 1)
        return line
