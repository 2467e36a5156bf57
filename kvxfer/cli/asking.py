"""One GET at a server of this machine, cancelled at once where the caller is.

Decides how an answer is read, and nothing about what it means. It needs no HTTP library: `kvxfer serve --mock` runs
where none is installed.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
from typing import Any
from urllib.parse import urlsplit

from kvxfer.errors import TransportError

ANSWER_BYTES_MAX = 16 << 20


class _Answered:
    """What ``http.client.HTTPResponse`` takes for a socket: an answer that has come whole."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO(self._content)


async def get(url: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of ``path`` at ``url`` (``http://host:port``).

    Raises TransportError where no whole answer comes within ``timeout_s``.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                host = parts.netloc.rpartition("@")[2]
                writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
                content = await reader.read(ANSWER_BYTES_MAX)
                while more := await reader.read(ANSWER_BYTES_MAX):
                    content += more
                    if len(content) > ANSWER_BYTES_MAX:
                        raise TransportError(f"{url}{path} answers more than {ANSWER_BYTES_MAX} bytes")
            finally:
                writer.close()
        response = http.client.HTTPResponse(_Answered(content))  # type: ignore[arg-type]
        response.begin()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:  # a TimeoutError is an OSError
        raise TransportError(f"{url}{path} gives no answer: {type(error).__name__} {error}".rstrip()) from None


async def get_object(url: str, path: str, *, timeout_s: float) -> dict[str, Any]:
    """The JSON object at ``path``. Raises TransportError where another answer comes, or none."""
    status, content = await get(url, path, timeout_s=timeout_s)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if status != 200 or not isinstance(value, dict):
        raise TransportError(f"{url}{path} answers {status} and not what was asked for")
    return value
