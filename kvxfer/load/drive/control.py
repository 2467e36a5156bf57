"""What the command's process and a sending process say to each other: lines over a socket pair.

To the sender: ``g SECONDS`` (begin then, by the monotonic clock) and ``s`` (stop). From it: ``y`` (ready),
``r RECORD``, ``p SENT`` (how many were sent so far), ``f TEXT`` (it cannot go on), ``u COUNT`` (so many of its requests
were never sent, and have no record: it was told to stop) and ``e {..}`` (it is done; its ProcessUse). Decides nothing.
A sender never waits for the command's process: what the socket does not take stays in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

BEGIN, STOP, READY, RECORD, PROGRESS, FAILED, UNSENT, ENDED = b"g", b"s", b"y", b"r", b"p", b"f", b"u", b"e"
READ_BYTES = 1 << 18


@dataclasses.dataclass
class ProcessUse:
    """What one sending process took."""

    process: int
    pid: int
    cpu_s: float
    """User and system time between the beginning of the run and its end."""
    sent: int
    wakeups_late: int
    """How often its timer was more than 1 ms late: it was busy, or the machine had no processor for it."""
    worst_wakeup_s: float
    bodies_late: int
    """Requests whose bodies were not made before they were due."""
    stamps_late: int
    """Arrivals that came while a body was made, and were noted after it."""
    worst_stamp_s: float
    """The most that one of them can have been noted too late."""
    priority: str = ""
    """``realtime``, or ``ordinary`` where the system allowed no more."""


class ControlLine:
    """One end of the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = b""
        self._out = bytearray()
        self.is_open = True
        """False once all was heard that the other side said before it went."""

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._out) and self.is_open

    def say(self, kind: bytes, text: bytes = b"") -> None:
        """``flush`` sends it."""
        self._out += kind + b" " + text + b"\n"

    def flush(self) -> None:
        """As much as the socket takes now."""
        try:
            while self._out and self.is_open:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # nothing is heard there any more; what it said before may still be unread
            self._out.clear()

    def heard(self) -> Iterator[tuple[bytes, bytes]]:
        """(kind, text) of what has come; ``is_open`` is False once the other side is gone."""
        while self.is_open:
            try:
                part = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                self.is_open = False
            *lines, self._in = (self._in + part).split(b"\n")
            for line in lines:
                yield line[:1], line[2:]

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._sock.close()
