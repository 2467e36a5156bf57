"""What the client is sent: one JSON body, or a stream of events that always ends well-formed.

Keeps the order of an HTTP answer (head, body, end) whatever happens above it; it must never know what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from kvxfer.openai.sse import CONTENT_TYPE, encode_event
from kvxfer.router import headers

RETRY_AFTER_STATUS = (429, 503)
SLOW_CLIENT_S = 1.0
"""How long an answer that is given up waits for a client that does not read."""


class Answer:
    """One HTTP answer over an ASGI ``send``. After ``end`` everything is ignored."""

    def __init__(self, send: Send, *, retry_after_s: int = 1) -> None:
        self._send = send
        self._retry_after_s = retry_after_s
        self.is_started = False
        self.is_ended = False
        self.status = 0

    async def json(self, status: int, body: dict[str, Any] | bytes, extra: Mapping[str, str] | None = None) -> None:
        """A whole JSON answer."""
        content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        head = {"content-type": "application/json", "content-length": str(len(content)), **(extra or {})}
        if status in RETRY_AFTER_STATUS:
            head.setdefault(headers.RETRY_AFTER, str(self._retry_after_s))
        await self._start(status, head)
        await self._body(content, more=False)

    async def start_stream(self, extra: Mapping[str, str]) -> None:
        """The head of a stream of events."""
        head = {
            "content-type": f"{CONTENT_TYPE}; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **extra,
        }
        await self._start(200, head)

    async def write(self, content: bytes) -> None:
        """Bytes of whole events."""
        await self._body(content, more=True)

    async def end(self) -> None:
        """The regular end of a stream."""
        await self._body(b"", more=False)

    async def fail(self, status: int, body: dict[str, Any], extra: Mapping[str, str] | None = None) -> None:
        """An error, whatever was sent so far: a JSON answer, or one error event and the end of the stream."""
        if not self.is_started:
            await self.json(status, body, extra)
        elif not self.is_ended:
            await self._body(encode_event(body), more=True)
            await self._body(b"", more=False)

    async def give_up(self, status: int, body: dict[str, Any]) -> None:
        """As :meth:`fail`, for SLOW_CLIENT_S at most: a client that does not read keeps nobody waiting. What it has
        not read by then it never will, so that its connection has to be closed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOW_CLIENT_S):
                await self.fail(status, body)

    async def _start(self, status: int, head: Mapping[str, str]) -> None:
        self.is_started = True
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, content: bytes, *, more: bool) -> None:
        if self.is_ended:
            return
        self.is_ended = not more
        await self._send({"type": "http.response.body", "body": content, "more_body": more})
