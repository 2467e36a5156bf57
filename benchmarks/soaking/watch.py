"""Looks at every process once a second: memory, descriptors, threads; and at the blocks of every worker.

Decides nothing; what the numbers mean is the judge's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import time
from typing import Any

from soaking.cluster import WORKERS, SoakedCluster
from soaking.records import Samples
from tests.support.e2e.cluster import what_is_held

EVERY_S = 1.0
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
QUIET_S = 30.0
TICK_S = 0.1


class Watch:
    """``blocks``: (seconds, worker, used and held blocks), as far as the worker answered. ``late``: (seconds, how late
    a timer of this program was)."""

    def __init__(self, cluster: SoakedCluster, began_s: float) -> None:
        self.processes: dict[tuple[str, int], Samples] = {}
        self.blocks: list[tuple[float, str, int]] = []
        self.late: list[tuple[float, float]] = []
        self._cluster, self._began_s = cluster, began_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._tick())]

    async def stop(self) -> None:
        """Raises what made it end before."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _tick(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - before_s - TICK_S
            if late_s > TICK_S:
                self.late.append((round(before_s - self._began_s, 2), round(late_s, 2)))

    async def _look(self) -> None:
        while True:
            at_s = round(time.monotonic() - self._began_s, 2)
            for part in self._cluster.parts.values():
                if (pid := part.pid) is not None and (found := _look_at(pid)) is not None:
                    samples = self.processes.setdefault((part.name, pid), Samples(part.name, part.role, pid))
                    samples.at_s.append(at_s)
                    samples.memory_mb.append(found[0])
                    samples.descriptors.append(found[1])
                    samples.threads.append(found[2])
                    samples.shared_mb.append(found[3])
            for name, known in zip(WORKERS, await asyncio.gather(*map(self._cluster.statistics, WORKERS)), strict=True):
                if known is not None:
                    pool = known["pool"]
                    self.blocks.append((at_s, name, pool["used"] + pool["quarantined"]))
            await asyncio.sleep(max(0.0, self._began_s + at_s + EVERY_S - time.monotonic()))

    async def held_when_quiet(self) -> dict[str, Any]:
        """What is held although nothing is asked for any more, by worker; waits at most QUIET_S for it to end."""
        end_s = time.monotonic() + QUIET_S
        while True:
            held: dict[str, Any] = {}
            for name in WORKERS:
                known = await self._cluster.statistics(name)
                still = {"statistics": "no answer"} if known is None else what_is_held(known)
                if still:
                    held[name] = still
            if not held or time.monotonic() > end_s:
                return held
            await asyncio.sleep(0.2)


def _look_at(pid: int) -> tuple[float, int, int, float] | None:
    process = pathlib.Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in (process / "status").read_text().splitlines())
        status = {words[0]: words[1] for words in lines if len(words) > 1}
        own_mb, shared_mb = (round(int(status[name]) / 1024, 2) for name in ("RssAnon:", "RssShmem:"))
        return own_mb, len(os.listdir(process / "fd")), int(status["Threads:"]), shared_mb
    return None
