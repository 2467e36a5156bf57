"""The router's Prometheus metrics, in a registry of their own. Counts what it is told; decides nothing."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvxfer.router.workers import Workers

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


class Outcome(enum.StrEnum):
    """How a request ended, from the client's side."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    BROKEN_STREAM = "broken_stream"
    DISCONNECTED = "disconnected"
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"


class _WorkersCollector(Collector):
    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        inflight = GaugeMetricFamily(
            "kvxfer_router_inflight", "Requests in flight at a worker, by part", labels=("worker", "part")
        )
        for (agent_id, part), count in sorted(self._workers.inflight().items()):
            inflight.add_metric((agent_id, part), count)
        yield inflight
        known = self._workers.statistics()
        usable = GaugeMetricFamily(
            "kvxfer_router_workers_ready", "Workers that placement may give new work, by part", labels=("part",)
        )
        usable.add_metric(("prefill",), known.prefill_ready)
        usable.add_metric(("decode",), known.decode_ready)
        yield usable
        yield GaugeMetricFamily(
            "kvxfer_router_workers_aside", "Workers tried last because they could not be reached", value=known.aside
        )
        yield GaugeMetricFamily(
            "kvxfer_router_coordinator_connected", "1 while the coordinator is heard", value=float(known.is_connected)
        )


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self, workers: Workers) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvxfer_router_requests", "Requests by route and outcome", ("route", "outcome"), registry=self.registry
        )
        self.ttft = Histogram(
            "kvxfer_router_ttft_seconds",
            "Arrival of a streaming request to its first event with text",
            ("prefill",),
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.duration = Histogram(
            "kvxfer_router_request_seconds",
            "Arrival of a request to the last byte of its answer",
            ("route",),
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.placements = Counter(
            "kvxfer_router_placements", "Pairs chosen, by reason", ("reason",), registry=self.registry
        )
        self.retries = Counter("kvxfer_router_retries", "New attempts, by reason", ("reason",), registry=self.registry)
        self.leg_failures = Counter(
            "kvxfer_router_leg_failures", "Legs that failed, by part and kind", ("part", "kind"), registry=self.registry
        )
        self.ready = Gauge(
            "kvxfer_router_ready", "1 while a request would be placed: what GET /ready answers", registry=self.registry
        )
        self.registry.register(_WorkersCollector(workers))

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
