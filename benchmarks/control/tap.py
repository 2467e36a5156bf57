"""A TCP hop that counts bytes both ways: what a connection puts on the wire, frames of HTTP/2 and acknowledgements of
gRPC included, without the headers of TCP and IP. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib


class Tap:
    """Forwards each connection to ``target``. ``up``: bytes to the target so far; ``down``: bytes from it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self.address = ""
        self.up = 0
        self.down = 0

    async def start(self) -> Tap:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(
                self._copy(reader, there_writer, is_up=True), self._copy(there_reader, writer, is_up=False)
            )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while block := await reader.read(1 << 16):
                if is_up:
                    self.up += len(block)
                else:
                    self.down += len(block)
                writer.write(block)
                await writer.drain()
        writer.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
