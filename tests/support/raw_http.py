"""HTTP as bytes: what a client writes on a socket, and all that comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import ssl
from typing import Any

PATIENCE_S = 20.0


@dataclasses.dataclass(frozen=True)
class RawAnswer:
    """One answer; its status is 0 where nothing came."""

    data: bytes

    @property
    def head(self) -> str:
        return self.data.partition(b"\r\n\r\n")[0].decode("latin-1")

    @property
    def status(self) -> int:
        return int(self.head.split()[1]) if self.data else 0

    @property
    def headers(self) -> dict[str, str]:
        lines = [line.partition(":") for line in self.head.split("\r\n")[1:]]
        return {name.lower(): value.strip() for name, _, value in lines}

    @property
    def body(self) -> bytes:
        """As it came, with the frames of chunks."""
        return self.data.partition(b"\r\n\r\n")[2]

    def json(self) -> Any:
        return json.loads(self.body)


def request(
    method: str, target: str, *lines: str, host: str | None = "x", version: str = "1.1", body: bytes = b""
) -> bytes:
    """The bytes of a request, after which the connection closes. Without a ``host`` it has no such field."""
    fields = [*([] if host is None else [f"host: {host}"]), "connection: close", *lines]
    if body:
        fields.append(f"content-length: {len(body)}")
    return "\r\n".join([f"{method} {target} HTTP/{version}", *fields, "", ""]).encode("latin-1") + body


async def ask(port: int, data: bytes, *, context: ssl.SSLContext | None = None) -> RawAnswer:
    """All that a server sends until it closes."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            writer.write(data)
            parts = []
            with contextlib.suppress(ConnectionResetError):
                while part := await reader.read(1 << 16):
                    parts.append(part)
            return RawAnswer(b"".join(parts))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
