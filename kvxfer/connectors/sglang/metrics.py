"""One rank's Prometheus metrics, among SGLang's own. Decides names, labels and buckets; must never import SGLang.

Each rank of SGLang is a process. Its main process collects their figures from files (the multiprocess mode of
prometheus_client), so these are plain counters, gauges and histograms, and no collectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvxfer.connectors.sglang.core import CoreStatistics
from kvxfer.connectors.sglang.destination_room import RoomReport
from kvxfer.connectors.sglang.source_room import COMMITTED

PREFIX = "sglang:kvxfer_"
LOOK_S = 1.0
"""The interval between two updates of the gauges."""
LONG = (10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, *LONG)
"""A load's time includes its wait for the prefill engine."""
WAITED = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, *LONG)
SIDES = ("source", "destination")
STATES = ("unknown", "queued", "granted")


class RankMetrics:
    """From any thread. The names are those of the vLLM connector, as far as both have the same."""

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry | None = None) -> None:
        """``labels``: of every figure. ``registry``: where they are read in this process, which SGLang does not do."""
        self._labels = dict(labels)
        self._registry = registry
        self._loads = self._make(Counter, "loads", "Prompts that were to be received, by outcome", "outcome", "lane")
        self._bytes = self._make(Counter, "bytes", "Bytes of prompts that were received")
        self._early = self._make(Counter, "early_bytes", "Of those, what landed while the prompt was still computed")
        self._seconds = self._make(
            Histogram, "load_duration_seconds", "From the request for a prompt to its commit", buckets=SECONDS
        )
        self._wire = self._make(
            Histogram,
            "wire_duration_seconds",
            "Of that, while pages were read, and last byte to verdict",
            buckets=SECONDS,
        )
        self._waited = self._make(
            Histogram,
            "wait_duration_seconds",
            "Until a prompt's first pages were granted, or the wait was over",
            buckets=WAITED,
        )
        self._sends = self._make(Counter, "sends", "Prompts that were to be sent, by outcome", "outcome")
        self._rooms = self._make(Gauge, "rooms", "Prompts that are sent or received, and not over", "side")
        self._awaited = self._make(
            Gauge, "awaited_prompts", "Prompts that are waited for, by state at their prefill rank", "state"
        )
        self._unread = self._make(Gauge, "unread_blocks", "Pages kept for readers that have not begun")

    def loaded(self, load: RoomReport) -> None:
        """A prompt is received, or will not be."""
        self._of(self._loads, load.outcome, load.lane).inc()
        self._of(self._waited).observe(load.wait_seconds)
        if load.outcome == COMMITTED:
            self._of(self._bytes).inc(load.bytes)
            self._of(self._early).inc(load.early_bytes)
            self._of(self._seconds).observe(load.seconds)
            self._of(self._wire).observe(load.wire_seconds)

    def sent(self, room: int, outcome: str) -> None:
        """A prompt is sent, or will not be."""
        self._of(self._sends, outcome).inc()

    def look(self, now: CoreStatistics) -> None:
        """Set the gauges."""
        for side, count in zip(SIDES, (now.sources_open, now.destinations_open), strict=True):
            self._of(self._rooms, side).set(count)
        for state in STATES:
            self._of(self._awaited, state).set(getattr(now.agent.pulls, state))
        self._of(self._unread).set(now.agent.grants.blocks_unread)

    def _make(self, kind: Any, name: str, what: str, *labels: str, **more: Any) -> Any:
        if kind is Gauge:
            more["multiprocess_mode"] = "mostrecent"
        return kind(PREFIX + name, what, [*self._labels, *labels], registry=self._registry, **more)

    def _of(self, figure: Any, *labels: str) -> Any:
        return figure.labels(*self._labels.values(), *labels)
