"""The table of one agent's transfers that have not drained, by id: pulls, reads and writes. Decides which of them an
event of the transport belongs to, and keeps every event until it is handled; must never know what a transfer is for.

The event pump of an agent on a loop gives each event to :meth:`TransferTable.handle`. Without a loop the table takes
the events itself, whenever it is polled.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain, starmap
from typing import Any, Protocol

from kvxfer._native import _core
from kvxfer._native._core import TransferDrained, TransferFinal, TransferGranted, TransferProgress
from kvxfer.errors import KvxferError, TransportError
from kvxfer.transport.base import Event, Transport

TRANSFER_EVENTS = (TransferProgress, TransferGranted, TransferFinal, TransferDrained)


class Handle(Protocol):
    """A table entry for one or several ids. If a signal handler raised out of one of the four event methods, the same
    event is handled again, and must then not repeat its changes.
    """

    @property
    def is_final(self) -> bool: ...
    @property
    def is_drained(self) -> bool: ...

    def progressed(self, event: TransferProgress) -> None: ...
    def granted(self) -> None: ...
    def finished(self, event: TransferFinal) -> None: ...
    def drained(self, event: TransferDrained) -> None:
        """Its last event: it takes that id out of the table."""
        ...

    def cancel(self, error: KvxferError | None = None) -> None:
        """End as cancelled, or with ``error``, unless it has ended."""
        ...

    def fail(self, error: KvxferError) -> None:
        """The transport has ended: end with ``error``, unless it has ended, and drain."""
        ...


class TransferTable:
    """Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        *,
        drain: Callable[[], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Without ``drain`` a poll takes the transport's events and gives those of no transfer to ``on_event``, which
        must not block. With it, a poll calls ``drain``, by which the owner takes them."""
        self.transport = transport
        self.lock = threading.RLock()
        """Guards this table and its handles. Reentrant: a signal handler may poll inside of a call."""
        self.failure: KvxferError | None = None
        """The error that ended the transport."""
        self.explain: Callable[[KvxferError], KvxferError] = lambda error: error
        """What a transfer's caller is told in place of the transport's error. From any thread."""
        self._drain = drain
        self._on_event = on_event
        self._handles: dict[bytes, Handle] = {}
        self._poll_lock = threading.RLock()
        self._left: deque[Event] = deque()
        """Taken from the transport, and not handled yet."""

    def __repr__(self) -> str:
        return f"<TransferTable of {self.transport.ref}: {len(self._handles)} transfers>"

    @property
    def handles(self) -> tuple[Handle, ...]:
        """Those that have not drained, each once."""
        return tuple(handle for handle in dict.fromkeys(list(self._handles.values())) if not handle.is_drained)

    def add(self, identity: bytes, handle: Handle) -> bool:
        """Whether the id was free. Comes before the transport is asked: events may follow at once."""
        return self._handles.setdefault(identity, handle) is handle

    def remove(self, identity: bytes, handle: Handle) -> bool:
        """Whether it was there; only one of several threads that remove it gets True."""
        with self.lock:
            if self._handles.get(identity) is not handle:
                return False
            del self._handles[identity]
            return True

    def is_alone(self, handle: Handle) -> bool:
        """Whether every other transfer is final."""
        return all(other is handle or other.is_final for other in self.handles)

    def handle(self, event: Any) -> bool:
        """Take one event of the transport (an Event); False where it is of no transfer here. If a signal handler raised
        before it returned, call it again with the same event."""
        if not isinstance(event, TRANSFER_EVENTS):
            return False
        found = self._handles.get(event.id)
        if found is None:
            return False
        if isinstance(event, TransferProgress):
            found.progressed(event)
        elif isinstance(event, TransferGranted):
            found.granted()
        elif isinstance(event, TransferFinal):
            found.finished(event)
        else:
            found.drained(event)
        return True

    def poll(self) -> None:
        """Take the events since the last poll; never waits. Raises what a callback raises (each is still called once),
        and what a signal handler raises; the next poll continues after the interruption."""
        if self._drain is not None:
            self._drain()
            return
        with self._poll_lock:
            left = self._left
            # One call of C, so that no signal handler runs between the drain and the keeping of what it gave.
            left.extend(chain.from_iterable(starmap(self.transport.drain, [()])))
            while left:
                event = left[0]
                if not self.handle(event) and not isinstance(event, TRANSFER_EVENTS):
                    try:
                        self._pass_on(event)
                    except Exception:  # as it would again
                        self._taken(event)
                        raise
                self._taken(event)

    def cancel_all(self, error: KvxferError | None = None) -> None:
        """Cancel every transfer; they end with ``error``."""
        for handle in self.handles:
            with contextlib.suppress(KvxferError):  # a transport that is gone has nothing left to cancel
                handle.cancel(error)

    def fail_all(self, error: KvxferError) -> None:
        """The transport has ended: end the open transfers, and refuse new ones."""
        with self.lock:
            self.failure = error
        for handle in self.handles:
            handle.fail(error)

    def _pass_on(self, event: Event) -> None:
        if isinstance(event, _core.CoreFailed):
            self.fail_all(TransportError(f"the native core failed: {event.text}"))
        if self._on_event is not None:
            self._on_event(event)

    def _taken(self, event: Event) -> None:
        """Unless a signal handler polled, and took it before."""
        if self._left and self._left[0] is event:
            self._left.popleft()
