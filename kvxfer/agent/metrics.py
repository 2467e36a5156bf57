"""An agent's Prometheus metrics, on a registry of its own or a given one. What the agent counts goes to counters of
Prometheus at once, because its multiprocess mode knows no others; the rest is read from the statistics at each scrape.
Must never decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvxfer.agent.statistics import AgentStatistics
from kvxfer.types import GrantState

PHASES = ("queue", "plan", "wire", "confirm")
SECONDS_BUCKETS = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)
"""A transfer's time includes its wait for the source."""


class AgentMetrics:
    """Registered once in its registry; :meth:`close` takes it out again."""

    def __init__(self, registry: CollectorRegistry, statistics: Callable[[], AgentStatistics]) -> None:
        self.registry = registry
        self._transfers = Counter(
            "kvxfer_transfers",
            "Finished transfers by lane and outcome: committed, or the error's code",
            ["lane", "outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "kvxfer_transfer_bytes", "Bytes of committed transfers by lane", ["lane"], registry=registry
        )
        self._offers = Counter(
            "kvxfer_offers",
            "Finished writes of peers into registered memory by lane and outcome: committed, or the error's code",
            ["lane", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kvxfer_transfer_duration_seconds",
            "Duration of committed transfers by phase: queue (until the first block was ready), plan, wire, confirm",
            ["phase"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        for phase in PHASES:
            self._seconds.labels(phase)
        self._gauges = _StatisticsCollector(statistics)
        registry.register(self._gauges)

    def committed(self, lane: str, byte_count: int, seconds: Mapping[str, float]) -> None:
        self._transfers.labels(lane, "committed").inc()
        self._bytes.labels(lane).inc(byte_count)
        for phase in PHASES:
            self._seconds.labels(phase).observe(seconds[phase])

    def failed(self, lane: str, code: str) -> None:
        self._transfers.labels(lane, code).inc()

    def offer_ended(self, lane: str, outcome: str) -> None:
        self._offers.labels(lane, outcome).inc()

    def close(self) -> None:
        for collector in (self._transfers, self._bytes, self._offers, self._seconds, self._gauges):
            self.registry.unregister(collector)


class _StatisticsCollector(Collector):
    def __init__(self, statistics: Callable[[], AgentStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        now = self._statistics()
        yield GaugeMetricFamily("kvxfer_grants_alive", "Grants that are alive", value=now.grants.alive)
        ended = CounterMetricFamily("kvxfer_grants_ended", "Ended grants by final state", labels=("state",))
        for state, count in now.grants.by_state().items():
            if state is not GrantState.ALIVE:
                ended.add_metric((state.name.lower(),), count)
        yield ended
        what = "Grants whose readers have not begun to read"
        yield GaugeMetricFamily("kvxfer_grants_unread", what, value=now.grants.unread)
        what = "Blocks that are kept for readers that have not begun to read"
        yield GaugeMetricFamily("kvxfer_blocks_unread", what, value=now.grants.blocks_unread)
        what = "Prompts that the engine accepted and that have no grant yet"
        yield GaugeMetricFamily("kvxfer_grants_expected", what, value=now.grants.expected)
        pulls = GaugeMetricFamily("kvxfer_pulls_waiting", "Own pulls that have read nothing yet", labels=("state",))
        for name in ("unknown", "queued", "granted"):
            pulls.add_metric((name,), getattr(now.pulls, name))
        yield pulls
        blocks = GaugeMetricFamily("kvxfer_pool_blocks_in_use", "Blocks in use, by state", labels=("pool", "state"))
        total = GaugeMetricFamily("kvxfer_pool_blocks", "Blocks of a pool", labels=("pool",))
        for pool in now.pools:
            for name in ("reserved", "granted", "quarantined"):
                blocks.add_metric((str(pool.pool_id), name), getattr(pool, name))
            total.add_metric((str(pool.pool_id),), pool.blocks)
        yield blocks
        yield total
        transfers = GaugeMetricFamily("kvxfer_transfers_active", "Transfers not over yet, by state", labels=("state",))
        transfers.add_metric(("live",), now.transfers_live)
        transfers.add_metric(("draining",), now.transfers_draining)
        yield transfers
        sessions = GaugeMetricFamily("kvxfer_sessions", "Sessions with peers, by state", labels=("state",))
        sessions.add_metric(("up",), now.sessions.up)
        sessions.add_metric(("opening",), now.sessions.opening)
        yield sessions
        yield CounterMetricFamily("kvxfer_sessions_refused", "Sessions that never came up", value=now.sessions.refused)
        tcp = GaugeMetricFamily("kvxfer_sessions_tcp", "Sessions over TCP that are up", labels=("encrypted",))
        tcp.add_metric(("yes",), now.wire.sessions_encrypted)
        tcp.add_metric(("no",), now.wire.sessions_tcp - now.wire.sessions_encrypted)
        yield tcp
        what = "Encrypted sessions that ended because a record was not the peer's"
        yield CounterMetricFamily("kvxfer_tls_failures", what, value=now.wire.tls_failures)
        what = "Reads that were thrown away because their bytes did not match the source's checksums"
        yield CounterMetricFamily("kvxfer_checksum_failures", what, value=now.wire.checksum_failures)
        verdicts = CounterMetricFamily("kvxfer_verdicts", "Verdicts given as a source, by outcome", labels=("outcome",))
        verdicts.add_metric(("ok",), now.grants.verdicts_ok)
        verdicts.add_metric(("refused",), now.grants.verdicts_refused)
        yield verdicts
        what = "Reads and writes that peers requested and that were refused: not granted, or out of range"
        yield CounterMetricFamily("kvxfer_peer_requests_refused", what, value=now.grants.requests_refused)
        notifications = CounterMetricFamily("kvxfer_notifications", "Notifications by event", labels=("event",))
        for event in ("sent", "delivered", "failed", "received", "dropped"):
            notifications.add_metric((event,), getattr(now.notifications, event))
        yield notifications
        yield GaugeMetricFamily("kvxfer_peers", "Incarnations of other agents that are known", value=now.peers)
        if now.is_coordinator_connected is not None:
            yield GaugeMetricFamily(
                "kvxfer_coordinator_connected",
                "1 while the agent is connected to its coordinator",
                value=float(now.is_coordinator_connected),
            )
