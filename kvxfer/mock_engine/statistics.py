"""What an engine counts, and the histograms of its times. Decides nothing."""

from __future__ import annotations

import bisect
import dataclasses

BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)


@dataclasses.dataclass
class EngineCounts:
    """Totals since the engine began."""

    requests: int = 0
    """Requests that an engine would compute something for, refused ones included."""
    refused: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    """Answers by their reason to end."""
    failed: int = 0
    clients_left: int = 0
    """Connections that ended before their answer did."""
    load_failures: int = 0
    recomputes: int = 0
    """Prompts that a decode engine computed because their KV could not be loaded."""
    silent_recomputes: int = 0
    """Prompts that a decode engine computed because the parameters named no blocks."""

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1


class SecondsHistogram:
    """Counts in Prometheus's buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.sum += seconds


class EngineTimes:
    """Times of an engine's answers."""

    def __init__(self) -> None:
        self.ttft = SecondsHistogram()
        self.e2e = SecondsHistogram()

    def first_token(self, seconds: float) -> None:
        self.ttft.observe(seconds)

    def whole(self, seconds: float) -> None:
        self.e2e.observe(seconds)
