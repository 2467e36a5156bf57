"""Messages between two processes of one router, over one end of a socket pair: JSON lists, each after its length.

Decides how a message is framed, and how much may wait to be sent. It must never know what a message means. Only the
process at the other end can write here: the pair was made by the parent, and inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from typing import Any

log = logging.getLogger("kvxfer.router")

LENGTH_BYTES = 4
MESSAGE_BYTES_MAX = 64 << 20
WAITING_BYTES_MAX = 128 << 20
"""A process that reads so little that more waits for it is given up."""
FLUSH_S = 1.0

Message = list[Any]
"""Its kind, and what belongs to it."""


class Channel:
    """One end. ``send`` never waits; ``receive`` gives None once the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """Takes the socket."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, *message: Any) -> None:
        if self._writer.is_closing():
            return
        frame = json.dumps(message, separators=(",", ":")).encode()
        self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
        if self._writer.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            log.error("another process of this router does not read what it is told, and is given up")
            self._writer.transport.abort()

    async def receive(self) -> Message | None:
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length > MESSAGE_BYTES_MAX:
                log.error("another process of this router sent a message of %d bytes, and is given up", length)
                return None
            message = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return message if isinstance(message, list) and message else None

    def close(self) -> None:
        self._writer.close()

    async def close_flushed(self) -> None:
        """Close it once what was sent is out, if the other end reads it soon."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._writer.wait_closed()
