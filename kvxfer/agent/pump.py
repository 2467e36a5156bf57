"""Brings the transport's events to the asyncio loop: in batches, in order, each batch in one pass. Decides nothing
about an event; must never let one bad handler keep the others from theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvxfer._native import _core
from kvxfer.errors import KvxferError, TransportError
from kvxfer.transport.base import Event, Transport


class EventPump:
    """Reads one transport from one loop, from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        transport: Transport,
        on_event: Callable[[Event], None],
        on_failure: Callable[[KvxferError], None],
    ) -> None:
        """``on_failure`` is told once, if the transport broke; the pump has stopped then."""
        self._transport = transport
        self._on_event = on_event
        self._on_failure = on_failure
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
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.remove_reader(self._fileno)

    def drain(self) -> None:
        """Handle what waits now."""
        loop = self._loop
        if loop is None:
            return
        try:
            events = self._transport.drain()
        except Exception as error:
            self._fail(error if isinstance(error, KvxferError) else TransportError(f"the native core broke: {error!r}"))
            return
        for event in events:
            if isinstance(event, _core.CoreFailed):
                self._fail(TransportError(f"the native core failed: {event.text}"))
                return
            try:
                self._on_event(event)
            except Exception as error:
                name = type(event).__name__
                loop.call_exception_handler({"message": f"kvxfer: a handler of {name} raised", "exception": error})

    def _fail(self, error: KvxferError) -> None:
        self.stop()
        self._on_failure(error)
