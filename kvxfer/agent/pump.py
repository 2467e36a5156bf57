"""Brings the transport's events to the asyncio loop: in order, and all that are there in one pass. Decides nothing
about an event; must never let one failing handler keep the others from their events.

A thread that is not the loop's may wait for events too. It handles its own, and the loop handles the others.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable
from typing import Any

from kvxfer._native import _core
from kvxfer.errors import KvxferError, TransportError
from kvxfer.transport.base import Event, Transport

MOMENT_S = 5e-3
"""The longest that one call waits: the loop may have handled the awaited event just before the call."""


class EventPump:
    """Reads one transport from one loop, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        transport: Transport,
        on_event: Callable[[Event], None],
        on_failure: Callable[[KvxferError], None],
        on_drained: Callable[[], None],
    ) -> None:
        """``on_failure`` is called once, if the transport broke; the pump has stopped then. ``on_drained`` is called
        after each batch."""
        self._transport = transport
        self._on_event = on_event
        self._on_failure = on_failure
        self._on_drained = on_drained
        self._lock = threading.RLock()
        """Held while events are read and handled, so that they keep their order."""
        self._left: collections.deque[Event] = collections.deque()
        """Events that were read and that the loop has still to handle."""
        self._is_told = False
        """Whether the loop was told that some are left."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fileno = -1

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fileno = self._transport.fileno()
        self._loop.add_reader(self._fileno, self.drain)

    def stop(self) -> None:
        """Callable twice; must come before the transport is closed."""
        with self._lock:
            if self._loop is not None:
                self._loop.remove_reader(self._fileno)
                self._loop = None

    def drain(self) -> None:
        """Read and handle all events. On the loop."""
        with self._lock:
            if self._loop is None:
                return
            try:
                self._left += self._transport.drain()
            except Exception as error:
                self._fail(error)
                return
            self._handle_left()

    def progress(self, timeout_s: float, take: Callable[[Event], bool]) -> None:
        """On a thread that is not the loop's: wait for events, at most ``timeout_s`` and MOMENT_S, and handle them. The
        loop gets the events for which ``take(event)`` returns False. If the loop is handling events, this waits for it,
        at most as long again."""
        timeout_s = min(max(timeout_s, 0.0), MOMENT_S)
        loop = self._loop
        if loop is None:
            return
        try:
            if timeout_s > 0:
                self._transport.wait(timeout_s)
        except Exception as error:
            loop.call_soon_threadsafe(self._fail, error)
            return
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            if self._loop is not None:
                self._hand_out(self._loop, take)
        finally:
            self._lock.release()

    def _hand_out(self, loop: asyncio.AbstractEventLoop, take: Callable[[Event], bool]) -> None:
        try:
            events = self._transport.drain()
        except Exception as error:
            loop.call_soon_threadsafe(self._fail, error)
            return
        rest = collections.deque(events)
        try:
            while rest:
                event = rest.popleft()
                try:
                    if not take(event):
                        self._left.append(event)
                except Exception as error:
                    loop.call_soon_threadsafe(loop.call_exception_handler, _context_of(event, error))
        finally:  # a signal's handler may have raised
            self._left += rest
            # For the progress of what is this thread's the loop need not be woken.
            is_due = self._left or not all(isinstance(event, _core.TransferProgress) for event in events)
            if is_due and not self._is_told:
                self._is_told = True
                loop.call_soon_threadsafe(self._handle_left)

    def _handle_left(self) -> None:
        with self._lock:
            self._is_told = False
            while self._left and self._loop is not None:
                event = self._left.popleft()
                if isinstance(event, _core.CoreFailed):
                    self._fail(TransportError(f"the native core failed: {event.text}"))
                    return
                try:
                    self._on_event(event)
                except Exception as error:
                    self._loop.call_exception_handler(_context_of(event, error))
            self._on_drained()

    def _fail(self, error: Exception) -> None:
        if self._loop is not None:
            self.stop()
            self._on_failure(error if isinstance(error, KvxferError) else _broken(error))


def _broken(error: Exception) -> KvxferError:
    return TransportError(f"the native core broke: {error!r}")


def _context_of(event: Event, error: Exception) -> dict[str, Any]:
    return {"message": f"kvxfer: a handler of {type(event).__name__} raised", "exception": error}
