"""Brings the transport's events to the asyncio loop: in batches, in order, each batch in one pass. Decides nothing
about an event; must never let one bad handler keep the others from theirs.

Another thread may take events too, where it waits for one itself: what is not for it goes on to the loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer._native import _core
from kvxfer.errors import KvxferError, TransportError
from kvxfer.transport.base import Event, Transport

TAKE_MAX_S = 0.5e-3
"""How long another thread keeps the loop from its events where it waits for its own; to the transport, which finishes
what it is at and may sleep by the millisecond, that is a wish."""

ASIDE_S = 0.1e-3
"""How long it stands aside for a loop that waits to be let at them."""


class EventPump:
    """Reads one transport from one loop, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        transport: Transport,
        on_event: Callable[[Event], None],
        on_failure: Callable[[KvxferError], None],
        on_drained: Callable[[], None],
    ) -> None:
        """``on_failure`` is told once, if the transport broke; the pump has stopped then. ``on_drained`` comes after
        each batch."""
        self._transport = transport
        self._on_event = on_event
        self._on_failure = on_failure
        self._on_drained = on_drained
        self._lock = threading.RLock()
        """Held while events are taken and handled: they keep their order."""
        self._is_asked = self._is_told = False
        """The loop waits for the lock, which whoever takes and takes would not leave to it; the loop was told that some
        events are left."""
        self._left: collections.deque[Event] = collections.deque()
        """Taken by another thread, and not for it."""
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
        with self._turn():
            if self._loop is not None:
                self._loop.remove_reader(self._fileno)
                self._loop = None

    def drain(self) -> None:
        """Handle what waits now. On the loop."""
        with self._turn():
            if self._loop is None:
                return
            try:
                self._left += self._transport.drain()
            except Exception as error:
                self._fail(error)
                return
            self._handle_left()

    def take(self, timeout_s: float, take: Callable[[Event], bool]) -> None:
        """Wait for events, at most so long and TAKE_MAX_S, on a thread that is not the loop's; the loop gets those that
        ``take(event)`` does not want. While the loop is at its events there is nothing to take, and at most as long is
        waited for it."""
        timeout_s = min(max(timeout_s, 0.0), TAKE_MAX_S)
        if self._is_asked:
            time.sleep(min(timeout_s, ASIDE_S))
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            if self._loop is not None:
                self._take(self._loop, timeout_s, take)
        finally:
            self._lock.release()

    def _take(self, loop: asyncio.AbstractEventLoop, timeout_s: float, take: Callable[[Event], bool]) -> None:
        try:
            events = self._transport.take(timeout_s) if timeout_s > 0 else self._transport.drain()
        except Exception as error:
            loop.call_soon_threadsafe(self._fail, error)
            return
        except BaseException:  # a signal's handler raised: what was taken waits in the transport
            loop.call_soon_threadsafe(self.drain)
            raise
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

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The loop's, at the events."""
        self._is_asked = True
        with self._lock:
            self._is_asked = False
            yield

    def _handle_left(self) -> None:
        with self._turn():
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
