"""Clients of a router of several processes, each of which knows the process that has its connection."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.support.routers import MODEL, RouterProcess, Site

COUNT = 3
SEVERAL = (f"--workers={COUNT}",)


class Caller:
    """A client with one connection, which one process of the router has."""

    def __init__(self, url: str, **more: Any) -> None:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=60.0)
        self.client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0, limits=limits, **more)
        self.pid = 0

    async def health(self) -> dict[str, Any]:
        body: dict[str, Any] = (await self.client.get("/health")).json()
        self.pid = body["pid"]
        return body

    async def complete(self, tokens: int = 8) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Say something long.", "max_tokens": tokens, "stream": True}
        return await self.client.post("/v1/completions", json=body)


@contextlib.asynccontextmanager
async def callers(
    router: Site | str, at_each: int = 1, count: int = COUNT, **more: Any
) -> AsyncIterator[dict[int, list[Caller]]]:
    """Connections by the process that has them, at least ``at_each`` for each of ``count`` processes. A process that
    was just replaced has 30 s to serve again."""
    found: dict[int, list[Caller]] = {}
    async with contextlib.AsyncExitStack() as stack:
        for number in range(64 + 300):
            await asyncio.sleep(0 if number < 64 else 0.1)
            caller = Caller(router if isinstance(router, str) else router.router.url, **more)
            await stack.enter_async_context(caller.client)
            await caller.health()
            found.setdefault(caller.pid, []).append(caller)
            if len(found) == count and min(map(len, found.values())) >= at_each:
                break
        assert len(found) == count, {pid: len(those) for pid, those in found.items()}
        yield found


def children(router: RouterProcess) -> set[int]:
    pid = router.process.pid
    return {int(word) for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_gone(pid: int) -> bool:
    """Ended, whether or not its new parent has taken note."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
