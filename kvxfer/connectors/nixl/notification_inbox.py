"""Notifications, as NIXL hands them out: by the sender's name, in the order they came. Decides what a payload on the
wire means; must never poll.

A payload is one byte and the message: 1, the sender's agent id is its name; 2, its name comes first (2 bytes of length,
little endian) because it could not be an agent id; 0, nothing is said, the peer only wanted a connection. A name that
is not that of the session it came over is refused: in NIXL, any peer may sign with any name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvxfer._native import _core
from kvxfer.connectors.nixl.errors import nixlInvalidParamError
from kvxfer.connectors.nixl.metadata import wire_id
from kvxfer.connectors.nixl.settings import MESSAGE_BYTES_MAX
from kvxfer.transport.base import Event

HELLO = b"\0"
log = logging.getLogger("nixl.kvxfer")


EACH_BYTES = 64
"""Bytes that a message counts for beside its own."""


class NotificationInbox:
    """Messages that were received and not fetched yet. Thread-safe; holds no reference to the agent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, bytes]] = []
        self._nbytes = 0
        self.on_held: Callable[[int], None] = lambda nbytes: None
        """Called with the waiting bytes whenever they change."""

    def take_event(self, event: Event) -> None:
        """One event of the transport that belongs to no post."""
        if isinstance(event, _core.NotifReceived):
            opened = open_envelope(event.sender.agent_id, event.payload)
            if opened is not None:
                self.put(*opened)
        elif isinstance(event, _core.NotifFailed):
            log.error("notification %d to agent %s was not delivered: %s", event.seq, event.receiver, event.code.name)
        elif isinstance(event, _core.SessionRefused):
            log.debug("a session with %s was refused: %s %s", event.peer, event.code.name, event.text)
        elif isinstance(event, _core.CoreFailed):
            log.critical("the native core failed: %s", event.text)

    def put(self, sender: str, message: bytes) -> None:
        with self._lock:
            self._waiting.append((sender, message))
            self._nbytes += len(message) + EACH_BYTES
            self.on_held(self._nbytes)

    def take(self, into: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        """Move all waiting messages to the end of the lists of ``into``, which is returned."""
        if self._waiting:
            with self._lock:
                waiting, self._waiting, self._nbytes = self._waiting, [], 0
                self.on_held(0)
            for sender, message in waiting:
                into.setdefault(sender, []).append(message)
        return into


def envelope_for(name: str) -> Callable[[bytes], bytes]:
    """How the agent ``name`` wraps its messages. The function raises nixlInvalidParamError for one that is too long."""
    text = name.encode()
    head = b"\1" if wire_id(name) == name else b"\2" + len(text).to_bytes(2, "little") + text

    def wrap(message: bytes) -> bytes:
        if len(message) > MESSAGE_BYTES_MAX:
            raise nixlInvalidParamError(f"a notification of {len(message)} bytes is longer than {MESSAGE_BYTES_MAX}")
        return head + message

    return wrap


def open_envelope(agent_id: str, payload: bytes) -> tuple[str, bytes] | None:
    """(sender's name, message) of a payload from the session of ``agent_id``; None where nothing is to be told."""
    kind = payload[:1]
    if kind == HELLO:
        return None
    end = 3 + int.from_bytes(payload[1:3], "little") if kind == b"\2" else 1
    name = agent_id if kind == b"\1" else payload[3:end].decode(errors="replace")
    if kind not in (b"\1", b"\2") or wire_id(name) != agent_id:
        log.warning("agent %s sent a notification that is none, or under a name that is not its own", agent_id)
        return None
    return name, payload[end:]
