"""How the events of a streamed answer are read, and how a stream that broke is ended well.

Decides what an event means for the router: some of the answer, the end, an error. It must never know which engine wrote
it, nor what the router does about it. Engines write the names of members plainly, not as ``\\u0065``; a byte search
relies on that, and only for engines' bytes, never for a client's.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvxfer.openai import scanner
from kvxfer.openai.scanner import Kind, Scan
from kvxfer.openai.sse import LATE_LF, Event
from kvxfer.router.failure import Failure

EVENT_FIELDS = scanner.Fields(["choices", "error", "type", "response", "code", "message", "meta_info", "delta"])
"""Members of an event's object that a style looks at. Lists of token ids and usage are beside them, and stay bytes."""


class StreamStyle(Protocol):
    """The events of one API. Stateless: one object serves every stream."""

    LAST: bytes
    """What clients wait for at the end of a stream, also behind an error; empty where an event itself is the end."""
    END_MARKS: tuple[bytes, ...]
    """One of these is in every event that ends a stream or is an error. A chunk without any of them needs no look at
    its events; a chunk that has one may still hold neither."""

    PING_MARKS: tuple[bytes, ...]
    """One of these is in every keep-alive that has data."""

    def has_content(self, data: bytes) -> bool:
        """Whether an event with these data has some of the answer, not only its frame (the role, a start, a ping). A
        frame may be thrown away and the request tried elsewhere. What cannot be read counts as content."""

    def is_keepalive(self, event: Event) -> bool:
        """Whether an event only keeps the connection alive: a comment, a ping. It has no place among the others, so
        that it may pass before those that are held back."""

    def is_end(self, event: Event) -> bool:
        """Whether the stream is whole with this event."""

    def failure(self, what: str, event: Event) -> Failure | None:
        """The failure that the ``what`` worker tells by this event; None where it is no error."""

    def end_with_error(self, body: dict[str, Any]) -> bytes:
        """The bytes that end a broken stream, behind whole events: an error event in this API's shape that says what
        ``body`` (OpenAI's error object) says, and what a client waits for at the end."""

    def error_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """``body`` as this API's whole answer to a request that failed."""


def is_comment(event: Event) -> bool:
    """Whether an event has no data. The late end of the event before is not one of its own."""
    return not event.data and event is not LATE_LF


def scanned(data: bytes) -> Scan | None:
    """The object that an event is; None where it is none."""
    try:
        return EVENT_FIELDS.scan(data)
    except ValueError:
        return None


def text_of(scan: Scan, name: str) -> str:
    """A member that is a string; empty for any other."""
    value = scan.scalar(name) if scan.kind(name) is Kind.STRING else None
    return value if isinstance(value, str) else ""
