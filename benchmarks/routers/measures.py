"""What is measured of a router, and what figures mean: names, units, bars.

It decides the load of each measure, and the bars. It must never know how a process is started or a request is sent.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

TOKENS = 32
PACED_MS, SLOW_MS = 10.0, 1000.0
LONG_BYTES = 64 << 10
HELD_TOKENS = 4096
"""So many that no stream ends while it is held open."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is asked; ``CHECK`` only shows that all works."""

    clients: int = 64
    requests: int = 1024
    unpaced_requests: int = 3072
    unloaded_requests: int = 150
    streams: int = 1000

    @property
    def is_whole(self) -> bool:
        """Enough that every engine must get some requests."""
        return self.requests >= 8 * self.clients


CHECK = Sizes(clients=4, requests=20, unpaced_requests=20, unloaded_requests=20, streams=20)


class Loaded(Protocol):
    """A router that is running."""

    def load(self, job: dict[str, Any], expected_spread: bool) -> dict[str, Any]: ...

    def memory_mib(self) -> tuple[float, float]: ...


@dataclasses.dataclass(frozen=True)
class Measure:
    name: str
    itl_ms: float
    """The pace of the engines."""


MEASURES = (
    Measure("memory", SLOW_MS),
    Measure("streams", PACED_MS),
    Measure("long", PACED_MS),
    Measure("unloaded", PACED_MS),
    Measure("unpaced", 0.0),
)


def take(measure: str, router: Loaded, dialect: str, sizes: Sizes) -> dict[str, float]:
    """One turn's figures. Raises what ``router.load`` raises."""
    job: dict[str, Any] = {"mode": "closed", "dialect": dialect, "requests": sizes.requests, "clients": sizes.clients}
    job |= {"tokens": TOKENS, "spread_s": TOKENS * PACED_MS / 1e3}
    if measure == "unloaded":
        job = {"mode": "unloaded", "dialect": dialect, "requests": sizes.unloaded_requests, "tokens": 2}
        return router.load(job, False)
    if measure == "memory":
        rss, pss = router.memory_mib()
        job = {"mode": "hold", "dialect": dialect, "requests": sizes.streams, "tokens": HELD_TOKENS}
        return {"idle_rss_mib": rss, "idle_pss_mib": pss, **router.load(job, sizes.is_whole)}
    if measure == "long":
        job["prompt_bytes"] = LONG_BYTES
    if measure == "unpaced":
        job |= {"requests": sizes.unpaced_requests, "spread_s": 0.0}
    return router.load(job, sizes.is_whole)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A row of the table."""

    measure: str
    name: str
    title: str
    is_more_better: bool = False
    bar: float | None = None
    """What kvxfer's may be of the best peer's at most; at least, where more is better."""
    goal: float | None = None
    limit: float | None = None
    """What kvxfer's own value may be at most."""
    digits: int = 2


FIGURES = (
    Figure("streams", "cpu_s_per_1000", "CPU s per 1,000 streams", bar=1.0, goal=0.8),
    Figure("streams", "requests_per_s", "requests/s", is_more_better=True, digits=1),
    Figure("streams", "ttft_p50_ms", "TTFT p50, ms"),
    Figure("streams", "ttft_p99_ms", "TTFT p99, ms"),
    Figure("unpaced", "requests_per_s", "unpaced: requests/s", is_more_better=True, bar=1.0, goal=1.2, digits=0),
    Figure("unpaced", "cpu_s_per_1000", "unpaced: CPU s per 1,000"),
    Figure("unloaded", "added_ttft_ms", "added TTFT, one client, ms", limit=1.0),
    Figure("long", "cpu_s_per_1000", "64 KB prompts: CPU s per 1,000", bar=1.0),
    Figure("long", "ttft_p50_ms", "64 KB prompts: TTFT p50, ms"),
    Figure("memory", "idle_rss_mib", "idle RSS, MiB", bar=1.0, digits=1),
    Figure("memory", "idle_pss_mib", "idle PSS, MiB", digits=1),
    Figure("memory", "stream_kib", "an open stream, KiB", limit=60.0, digits=1),
)
