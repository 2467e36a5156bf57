"""A connection's transport, closed so that the client sees the last answer.

A socket that is closed with unread bytes in it resets the connection, and the client loses an answer that was on its
way. Closing here stops sending, reads on for a while and throws away what comes, and only then closes. Decides how long
a client that does not read, or does not stop sending, may hold a descriptor; it must never know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

READ_ON_S = 30.0
"""The longest time for which a client's bytes are read and thrown away."""
READ_ON_IDLE_S = 2.0
"""As long as this nothing came: the client has stopped."""
READ_ON_BYTES_MAX = 256 << 20
WRITE_STALL_S = 30.0
"""A client that takes no byte for so long is hung up on."""


class LingeringTransport:
    """Stands before an asyncio transport. Whatever is not named here is the transport's own."""

    def __init__(
        self, inner: asyncio.Transport, *, may_still_send: Callable[[], bool], on_closing: Callable[[], None]
    ) -> None:
        """``may_still_send``: whether the client may be in the middle of a request, asked when we close."""
        self._inner = inner
        self._may_still_send = may_still_send
        self._on_closing = on_closing
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._read_bytes = 0
        self._end: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_closing(self) -> bool:
        return self._is_closing or self._inner.is_closing()

    def write(self, data: bytes) -> None:
        """As the transport's own; what is written after :meth:`close` goes nowhere."""
        if not (self._is_closing or self._inner.is_closing()):
            self._inner.write(data)

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._inner.resume_reading()

    def close(self) -> None:
        """Send what was written, then close; read on before that where the client may still be sending."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._inner.is_closing():
            return
        if self._may_still_send():
            self._end = self._loop.call_later(READ_ON_S, self._inner.abort)
            self._idle = self._loop.call_later(READ_ON_IDLE_S, self._give_up_if_written)
            self._inner.resume_reading()
            try:
                if self._inner.can_write_eof():  # TLS has no half-closed connection: its client goes by the length
                    self._inner.write_eof()
            except (OSError, RuntimeError):  # the client has reset it
                self._inner.abort()
        else:
            self._inner.close()
        if self._inner.get_write_buffer_size():
            self.watch_writes()
        self._on_closing()

    def abort(self) -> None:
        self._is_closing = True
        self._inner.abort()

    def discard(self, data: bytes) -> None:
        """Bytes that came after :meth:`close`."""
        self._read_bytes += len(data)
        if self._read_bytes > READ_ON_BYTES_MAX:
            self._inner.abort()
        elif self._idle is not None:
            self._idle.cancel()
            self._idle = self._loop.call_later(READ_ON_IDLE_S, self._give_up_if_written)

    def watch_writes(self) -> None:
        """The client takes bytes slower than they are written: see that it takes any."""
        if self._stall is None:
            size = self._inner.get_write_buffer_size()
            self._stall = self._loop.call_later(WRITE_STALL_S, self._check_stall, size)

    def writes_go_on(self) -> None:
        """The client has caught up."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def lost(self) -> None:
        """The connection has ended."""
        self._is_closing = True
        for timer in (self._end, self._idle, self._stall):
            if timer is not None:
                timer.cancel()

    def _give_up_if_written(self) -> None:
        if self._inner.get_write_buffer_size():  # the answer is still going out: it has a clock of its own
            self._idle = self._loop.call_later(READ_ON_IDLE_S, self._give_up_if_written)
        else:
            self._inner.abort()

    def _check_stall(self, size_before: int) -> None:
        self._stall = None
        size = self._inner.get_write_buffer_size()
        if size >= size_before and size:
            self._inner.abort()
        elif size:
            self.watch_writes()
