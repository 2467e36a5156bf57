"""A pool over a scripted engine that must leave nothing behind, and answers to script."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from kvxfer.router.upstream import UpstreamLimits, UpstreamPool
from tests.support.scripted_engine import Script, ScriptedEngine, scripted_engine

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
HELLO = OK + b"content-length: 5\r\n\r\nhello"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def pool_over(
    make: Callable[[ScriptedEngine], Script], limits: UpstreamLimits | None = None
) -> AsyncIterator[tuple[ScriptedEngine, UpstreamPool]]:
    before = asyncio.all_tasks()
    async with scripted_engine(make) as engine:
        pool = UpstreamPool(engine.address, limits or UpstreamLimits(tick_s=0.01))
        try:
            yield engine, pool
        finally:
            await pool.close()
        counters = pool.counters
        assert (counters.open, counters.idle, counters.in_flight, counters.waiting) == (0, 0, 0, 0)
        await until(lambda: engine.open == 0)
    await until(lambda: asyncio.all_tasks() <= before)
