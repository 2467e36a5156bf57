"""Passes one worker's stream of events to the client: bytes as they came, whole events only.

Decides what has to be looked at. Until the first event with some of the answer it looks at all, and holds them back, so
that a worker that fails before can be replaced. From then on a chunk of whole events in which no mark occurs passes
unread; marks stand in errors, in the last event, and in what the router adds to. It must never know workers, legs or
HTTP.
"""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.errors import ProtocolError
from kvxfer.openai.sse import Event, EventDecoder
from kvxfer.router import failure
from kvxfer.router.apis import StreamStyle
from kvxfer.router.failure import Failure, LegFailed

HELD_EVENTS_MAX = 64
"""So many events without an answer are an answer."""
WHAT = "decode"


class StreamRelay:
    """Of one attempt: :meth:`feed` takes what the worker sends, :meth:`end` its end.

    ``begin`` is called before the first ``write``. ``edit`` gives the bytes of an event that has one of ``edit_marks``,
    or None where it cannot yet: then that event and those after it wait for :meth:`go_on`.
    """

    def __init__(
        self,
        style: StreamStyle,
        *,
        begin: Callable[[], None],
        write: Callable[[bytes], None],
        edit: Callable[[Event], bytes | None],
        edit_marks: tuple[bytes, ...],
    ) -> None:
        self._style = style
        self._begin = begin
        self._write = write
        self._edit = edit
        self._edit_marks = edit_marks
        self._marks = (*style.END_MARKS, *edit_marks)
        self._decoder = EventDecoder()
        self._held: list[Event] = []
        self._waiting: list[Event] = []
        self._has_begun = False
        self._is_whole = False
        self.bytes_passed = 0
        self.error: Failure | None = None
        """The error that the worker itself put into the stream, once it was passed on."""

    @property
    def has_begun(self) -> bool:
        """Whether anything was passed on."""
        return self._has_begun

    @property
    def is_whole(self) -> bool:
        """Whether the event that ends a stream was passed on."""
        return self._is_whole

    @property
    def is_waiting(self) -> bool:
        """Whether an event waits for :meth:`go_on`."""
        return bool(self._waiting)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Raises LegFailed for a failure before the first event that was passed on, and for bytes
        that are no events."""
        if self._has_begun and not self._waiting and chunk.endswith(b"\n\n") and self._decoder.is_empty:
            for mark in self._marks:
                if mark in chunk:
                    break
            else:
                self.bytes_passed += len(chunk)
                self._write(chunk)
                return
        try:
            events = self._decoder.feed(chunk)
        except ProtocolError as error:
            raise LegFailed(failure.malformed(WHAT, str(error))) from None
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
        self._held += events
        if len(self._held) > HELD_EVENTS_MAX or any(self._style.has_content(event.data) for event in events):
            held, self._held = self._held, []
            self._has_begun = True
            self._begin()
            self._pass_on(held)

    def _pass_on(self, events: list[Event], *, at_last: bool = False) -> None:
        if self._waiting:
            self._waiting += events
            return
        parts: list[bytes] = []
        for at, event in enumerate(events):
            content: bytes | None = event.raw
            if any(mark in event.data for mark in self._edit_marks):
                content = self._edit(event)
                if content is None and not at_last:
                    self._waiting = events[at:]
                    break
            parts.append(event.raw if content is None else content)
            if self._style.is_end(event):
                self._is_whole = True
            elif self.error is None:
                self.error = self._style.failure(WHAT, event)
        if parts:
            content = b"".join(parts)
            self.bytes_passed += len(content)
            self._write(content)
