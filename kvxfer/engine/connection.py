"""The client's end of a connection: its leaving, and a stream of events to it.

It decides what happens when a client leaves: whatever is done for it is cancelled at once. It must never know what the
client asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvxfer.openai.sse import CONTENT_TYPE

ResultT = TypeVar("ResultT")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run ``work`` unless the client leaves first: then cancel it, wait for its end, and raise ClientGone."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, leaving):
            if not other.done():
                other.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events; ``on_end`` is called when they end, break, or the client leaves."""

    media_type = CONTENT_TYPE

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, on_end: Callable[[], None], headers: dict[str, str]
    ) -> None:
        self._events = events
        self._on_end = on_end
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            return
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
