"""One ``/metrics`` of several processes: the counts of those that serve, added to what the leader knows of the workers.

Counters and histograms add up. What a process had counted when it ended stays in the sums, so that none ever goes down.
Gauges of what a process has now (``ADDED_UP_GAUGES``) add up over those that run. All others are the leader's alone:
they say something of the workers, and it sees all of them. Decides nothing else.

prometheus_client's own mode for several processes would need a directory of files, a variable that is set before its
first import, and other classes of counters on the hot path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvxfer.router.fleet.workers import Workers
from kvxfer.router.metrics import RouterMetrics

ADDED_UP = frozenset({"counter", "histogram", "summary"})
ADDED_UP_GAUGES = frozenset(
    ("kvxfer_router_key_inflight", "kvxfer_router_upstream_connections", "kvxfer_router_upstream_waiting")
)
CREATED = "_created"

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


def samples_of(registry: CollectorRegistry) -> list[Any]:
    """What one process counted, as a message carries it: ``[family, type, help, [[name, labels, value], ...]]``."""
    found = []
    for metric in registry.collect():
        if _adds_up(metric.name, metric.type):
            rows = [
                [sample.name, sorted(sample.labels.items()), sample.value]
                for sample in metric.samples
                if not sample.name.endswith(CREATED)
            ]
            if rows:
                found.append([metric.name, metric.type, metric.documentation, rows])
    return found


class Collected:
    """What the processes that serve have counted, those that ended too."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[str, str]] = {}
        self._living: dict[int, dict[str, dict[Key, float]]] = {}
        self._ended: dict[str, dict[Key, float]] = {}

    def take(self, row: int, samples: list[Any]) -> None:
        """All that the process of that row has counted until now."""
        counted: dict[str, dict[Key, float]] = {}
        for family, kind, text, rows in samples:
            self._families[family] = (kind, text)
            counted[family] = {
                (name, tuple((label, value) for label, value in labels)): float(count) for name, labels, count in rows
            }
        self._living[row] = counted

    def ended(self, row: int) -> None:
        """That process is gone: what it said last stays."""
        for family, counts in self._living.pop(row, {}).items():
            if family not in ADDED_UP_GAUGES:
                _add(self._ended.setdefault(family, {}), counts)

    def add_to(self, metrics: Iterable[Metric]) -> Iterable[Metric]:
        """``metrics`` of this process with what the others counted."""
        left = set(self._families)
        for metric in metrics:
            left.discard(metric.name)
            yield self.added_up(metric) if _adds_up(metric.name, metric.type) else metric
        for family in sorted(left):
            kind, text = self._families[family]
            yield self.added_up(Metric(family, text, kind))

    def added_up(self, metric: Metric) -> Metric:
        sums: dict[Key, float] = {}
        created = [sample for sample in metric.samples if sample.name.endswith(CREATED)]
        for sample in metric.samples:
            if not sample.name.endswith(CREATED):
                sums[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        for counted in (self._ended, *self._living.values()):
            _add(sums, counted.get(metric.name, {}))
        total = Metric(metric.name, metric.documentation, metric.type)
        total.samples = [Sample(name, dict(labels), value) for (name, labels), value in sums.items()] + created
        return total


def _adds_up(family: str, kind: str) -> bool:
    return kind in ADDED_UP or family in ADDED_UP_GAUGES


def _add(sums: dict[Key, float], counts: dict[Key, float]) -> None:
    for key, value in counts.items():
        sums[key] = sums.get(key, 0.0) + value


class _Merged(Collector):
    def __init__(self, registry: CollectorRegistry, collected: Collected) -> None:
        self._registry = registry
        self._collected = collected

    def collect(self) -> Iterable[Metric]:
        return self._collected.add_to(self._registry.collect())


class GroupMetrics(RouterMetrics):
    """The leader's: shows what all processes counted."""

    def __init__(self, workers: Workers, collected: Collected) -> None:
        super().__init__(workers)
        self._collected = collected
        self._merged = CollectorRegistry()
        self._merged.register(_Merged(self.registry, collected))

    def collected(self, counter: Counter) -> Iterable[Metric]:
        return map(self._collected.added_up, counter.collect())

    def render(self) -> bytes:
        return generate_latest(self._merged)
