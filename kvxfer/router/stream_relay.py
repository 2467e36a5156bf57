"""Passes one worker's stream of events to the client: bytes as they came, whole events only.

Decides what has to be looked at. Until the first event with some of the answer it looks at all, and holds them back, so
that a worker that fails before can be replaced. Keep-alives (comments, pings) are no answer: they pass at once, and
count as no progress. From then on a chunk of whole events passes unread that has an object as an event's data, and in
which no mark occurs; marks stand in errors, in the last event, in pings, and in what the router adds to. It must never
know workers, legs or HTTP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from kvxfer._native import _core
from kvxfer.errors import ProtocolError
from kvxfer.openai.sse import EVENT_BYTES_MAX, LATE_LF, Event, EventDecoder
from kvxfer.router import failure
from kvxfer.router.apis import StreamStyle
from kvxfer.router.failure import Failure, LegFailed

HELD_EVENTS_MAX = 64
"""So many events without an answer are an answer; keep-alives are not among them."""
WHAT = "decode"
KEEPALIVE_BYTES_MAX = 4096
"""An event that is longer is none, also before it is whole."""
_OBJECT, _CLOSE_OBJECT = b"\ndata: {", b"\ndata:{"
"""Lines with an event's object, as engines write them, behind the end of a line, which a chunk's frame has too. What is
written otherwise is looked at."""


@functools.lru_cache(maxsize=64)
def _chunks_without(marks: tuple[bytes, ...]) -> _core.EventChunks:
    return _core.EventChunks(marks)


class StreamRelay:
    """Of one attempt: :meth:`feed` takes what the worker sends, :meth:`end` its end.

    ``open`` is called before a keep-alive is written, ``begin`` before the first event. ``write_chunks`` gives what
    writes chunks of HTTP/1.1, frames included, or None where the client's answer is framed otherwise. ``edit`` gives
    the bytes of an event that has one of ``edit_marks``, or None where it cannot yet: then that event and those after
    it wait for :meth:`go_on`.
    ``before_end`` gives the bytes that go before the event that ends the stream, or None likewise. ``event_bytes_max``
    bounds one event.
    """

    def __init__(
        self,
        style: StreamStyle,
        *,
        open: Callable[[], None] = lambda: None,
        begin: Callable[[], None],
        write: Callable[[bytes], None],
        write_chunks: Callable[[], Callable[[bytes], None] | None] = lambda: None,
        edit: Callable[[Event], bytes | None],
        edit_marks: tuple[bytes, ...],
        before_end: Callable[[], bytes | None] = bytes,
        event_bytes_max: int = EVENT_BYTES_MAX,
    ) -> None:
        self._style = style
        self._open = open
        self._begin = begin
        self._write = write
        self._edit = edit
        self._edit_marks = edit_marks
        self._before_end = before_end
        self._marks = (*style.END_MARKS, *style.PING_MARKS, *edit_marks)
        self._chunks = _chunks_without(self._marks)
        self._write_chunks: Callable[[bytes], None] | None = None
        """Set while bytes may pass unread."""
        self._find_write_chunks = write_chunks
        self._event_bytes_max = event_bytes_max
        self._decoder = EventDecoder(event_bytes_max=event_bytes_max)
        self._held: list[Event] = []
        self._waiting: list[Event] = []
        self._has_begun = False
        self._is_whole = False
        self._passed_unread = self._passed_read = self._heard_read = 0
        self.error: Failure | None = None
        """The error that the worker itself put into the stream, once it was passed on."""

    @property
    def bytes_passed(self) -> int:
        """That the client was sent."""
        return self._passed_unread + self._passed_read

    @property
    def bytes_heard(self) -> int:
        """It grows with each event that is no keep-alive, and with each read of a long one: what the worker does, seen
        from here. In a chunk beside such an event a keep-alive may count too."""
        return self._passed_unread + self._heard_read

    @property
    def has_begun(self) -> bool:
        """Whether anything but keep-alives was passed on."""
        return self._has_begun

    @property
    def is_whole(self) -> bool:
        """Whether the event that ends a stream was passed on."""
        return self._is_whole

    @property
    def is_waiting(self) -> bool:
        """Whether an event waits for :meth:`go_on`."""
        return bool(self._waiting)

    def take(self, data: bytes) -> int:
        """Pass on chunks of HTTP/1.1 as they are, where they are whole, of whole events, and nothing in them has to be
        looked at. Returns how many bytes of body they have; 0 where they are for :meth:`feed`."""
        write = self._write_chunks
        if write is None or (data.find(_OBJECT) < 0 and data.find(_CLOSE_OBJECT) < 0):  # half the time of `in`
            return 0
        size = self._chunks.body_bytes(data)
        if size:
            self._passed_unread += size
            write(data)
        return size

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Raises LegFailed for a failure before the first event that was passed on, and for bytes
        that are no events."""
        self._write_chunks = None
        if self._passes_unread and self._is_plain(chunk):
            self._passed_unread += len(chunk)
            self._write(chunk)
        else:
            self._look_at(chunk)
        if self._passes_unread:
            self._write_chunks = self._find_write_chunks()

    @property
    def _passes_unread(self) -> bool:
        return self._has_begun and not self._waiting and self._decoder.is_empty

    def _is_plain(self, chunk: bytes) -> bool:
        """Whether it is whole events, some of them no keep-alive, and nothing in them has to be looked at."""
        has_object = chunk.startswith((_OBJECT[1:], _CLOSE_OBJECT[1:])) or _OBJECT in chunk or _CLOSE_OBJECT in chunk
        return has_object and chunk.endswith(b"\n\n") and not any(mark in chunk for mark in self._marks)

    def _is_keepalive(self, event: Event) -> bool:
        return event is LATE_LF or self._style.is_keepalive(event)

    def _look_at(self, chunk: bytes) -> None:
        try:
            events = self._decoder.feed(chunk)
        except ProtocolError:
            too_long = f"an event is longer than {self._event_bytes_max} bytes"
            raise LegFailed(failure.too_long(WHAT, too_long)) from None
        self._heard_read += sum(len(event.raw) for event in events if not self._is_keepalive(event))
        if self._decoder.pending_bytes > KEEPALIVE_BYTES_MAX:
            self._heard_read += len(chunk)
        if self._has_begun:
            self._pass_on(events)
        elif events:
            self._hold(events)

    def end(self) -> None:
        """The worker's answer is over. Raises LegFailed where it was not whole."""
        if not self._is_whole and self.error is None:
            raise LegFailed(failure.lost(WHAT))

    def go_on(self, *, at_last: bool) -> None:
        """Try again to edit what waits; ``at_last``: what cannot be edited passes as it is."""
        waiting, self._waiting = self._waiting, []
        self._pass_on(waiting, at_last=at_last)

    def _hold(self, events: list[Event]) -> None:
        for event in events:
            failed = self._style.failure(WHAT, event)
            if failed is not None:
                raise LegFailed(failed)
        alive = b"".join(event.raw for event in events if self._style.is_keepalive(event))
        frames = [event for event in events if not self._style.is_keepalive(event)] if alive else events
        has_content = any(self._style.has_content(event.data) for event in frames)
        if has_content or len(self._held) + len(frames) > HELD_EVENTS_MAX:
            held, self._held = [*self._held, *events], []
            self._has_begun = True
            self._begin()
            self._pass_on(held)
            return
        self._held += frames
        if alive:
            self._open()
            self._passed_read += len(alive)
            self._write(alive)

    def _pass_on(self, events: list[Event], *, at_last: bool = False) -> None:
        if self._waiting:
            self._waiting += events
            return
        parts: list[bytes] = []
        for at, event in enumerate(events):
            content: bytes | None = event.raw
            before: bytes | None = b""
            if any(mark in event.data for mark in self._edit_marks):
                content = self._edit(event)
            is_end = self._style.is_end(event)
            if is_end and not self._is_whole and content is not None:
                before = self._before_end()
            if (content is None or before is None) and not at_last:
                self._waiting = events[at:]
                break
            parts.append((before or b"") + (event.raw if content is None else content))
            if is_end:
                self._is_whole = True
            elif self.error is None:
                self.error = self._style.failure(WHAT, event)
        if parts:
            content = b"".join(parts)
            self._passed_read += len(content)
            self._write(content)
