"""Brings the transport's events to the asyncio loop: in order, and all that are there in one pass. Decides nothing
about an event. A handler that raises must never stop the events after it.

A thread that is not the loop's may wait for events too (:meth:`EventPump.progress`). It handles the events of its own
transfers, and the loop handles the others.
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
"""The longest that one :meth:`EventPump.progress` waits: the loop may have handled the awaited event just before it."""


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
        self._pending: collections.deque[Event] = collections.deque()
        """Events that were read, and that the loop is still to handle."""
        self._is_scheduled = False
        """Whether a call of :meth:`_handle_pending` on the loop is due."""
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
                self._pending += self._transport.drain()
            except Exception as error:
                self._fail(error)
                return
            self._handle_pending()

    def progress(self, timeout_s: float, take: Callable[[Event], bool]) -> None:
        """On a thread that is not the loop's: wait for events, at most ``timeout_s`` and MOMENT_S, and give each to
        ``take(event)``. The loop gets the events for which that returns False. If the loop is handling events, this
        waits for it, at most as long again."""
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
                self._distribute(self._loop, take)
        finally:
            self._lock.release()

    def _distribute(self, loop: asyncio.AbstractEventLoop, take: Callable[[Event], bool]) -> None:
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
                        self._pending.append(event)
                except Exception as error:
                    loop.call_soon_threadsafe(loop.call_exception_handler, _context_of(event, error))
        finally:  # a signal's handler may have raised
            self._pending += rest
            # The loop still has to call `on_drained` for what `take` handled, unless that was progress only.
            is_due = self._pending or not all(isinstance(event, _core.TransferProgress) for event in events)
            if is_due and not self._is_scheduled:
                self._is_scheduled = True
                loop.call_soon_threadsafe(self._handle_pending)

    def _handle_pending(self) -> None:
        with self._lock:
            self._is_scheduled = False
            while self._pending and self._loop is not None:
                event = self._pending.popleft()
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
