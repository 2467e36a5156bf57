"""One pool of connections for each address of the fleet, closed when the last worker there is gone and nothing runs.

Decides when a pool is made and closed. It must never know which request uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from kvxfer.router.upstream import UpstreamCounters, UpstreamPool


class EnginePools:
    """``make`` gives the pool of an address; it is called in a running loop."""

    def __init__(self, make: Callable[[str], UpstreamPool]) -> None:
        self._make = make
        self._pools: dict[str, UpstreamPool] = {}
        self._retired: dict[str, UpstreamPool] = {}
        """Of addresses without workers, until what runs there is over."""
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._pools)

    def counters(self) -> dict[str, UpstreamCounters]:
        """Of every pool, by its address."""
        return {pool.address: pool.counters for pool in (*self._retired.values(), *self._pools.values())}

    @property
    def retired_count(self) -> int:
        return len(self._retired)

    def get(self, url: str, *, is_leaving: bool = False) -> UpstreamPool:
        """The pool of an address. ``is_leaving`` asks for a request that outlasts the last worker there, if it is."""
        pool = self._pools.get(url)
        if pool is None and is_leaving:
            pool = self._retired.get(url)
            if pool is None:
                pool = self._retired[url] = self._make(url)
            return pool
        if pool is None:
            pool = self._retired.pop(url, None) or self._make(url)
            self._pools[url] = pool
        return pool

    def retire(self, urls: Collection[str]) -> None:
        """No worker is left at ``urls``."""
        for url in urls:
            pool = self._pools.pop(url, None)
            if pool is not None:
                self._retired[url] = pool
        self.sweep()

    def sweep(self) -> None:
        """Close the retired pools that have nothing in flight."""
        for url, pool in tuple(self._retired.items()):
            if not pool.counters.in_flight and not pool.counters.waiting:
                del self._retired[url]
                self._close(pool)

    async def close(self) -> None:
        """Give up what runs, and return when every connection is closed."""
        pools = [*self._pools.values(), *self._retired.values()]
        self._pools.clear()
        self._retired.clear()
        for pool in pools:
            self._close(pool)
        while self._closing:
            await asyncio.wait(self._closing)

    def _close(self, pool: UpstreamPool) -> None:
        task = asyncio.get_running_loop().create_task(pool.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def __repr__(self) -> str:
        return f"EnginePools(pools={len(self._pools)}, retired={len(self._retired)})"
