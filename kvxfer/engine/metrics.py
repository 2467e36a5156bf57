"""The worker's Prometheus registry with the engine's metrics; the agent adds its own. Counts, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvxfer.engine.executor import Executor
from kvxfer.engine.readiness import Readiness

TTFT_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 320.0, 640.0),
)
"""To the longest that a router lets a request wait by default, as its own."""


class _EngineCollector(Collector):
    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def collect(self) -> Iterable[Metric]:
        pool, queue = self._executor.pool.statistics(), self._executor.scheduler.statistics()
        counters = self._executor.counters
        blocks = GaugeMetricFamily(
            "kvxfer_engine_blocks", "KV blocks by state, as the engine sees them", labels=("state",)
        )
        for state in ("free", "cached", "used"):
            blocks.add_metric((state,), getattr(pool, state))
        yield blocks
        sequences = GaugeMetricFamily("kvxfer_engine_sequences", "Requests in the engine, by phase", labels=("phase",))
        for phase in ("waiting", "asking", "granted", "pulling", "computing", "holding"):
            sequences.add_metric((phase,), getattr(queue, phase))
        yield sequences
        what = "Prompt tokens of the requests that wait for their first step"
        yield GaugeMetricFamily("kvxfer_engine_waiting_tokens", what, value=queue.waiting_tokens)
        yield CounterMetricFamily("kvxfer_engine_steps", "Forward passes", value=counters.steps)
        tokens = CounterMetricFamily("kvxfer_engine_tokens", "Tokens computed, by kind", labels=("kind",))
        tokens.add_metric(("prefill",), counters.prefill_tokens)
        tokens.add_metric(("decode",), counters.decode_tokens)
        yield tokens
        yield CounterMetricFamily(
            "kvxfer_engine_preemptions", "Requests that lost their blocks", value=queue.preemptions
        )
        yield CounterMetricFamily(
            "kvxfer_engine_cache_hit_blocks", "Blocks found in the prefix cache", value=pool.hit_blocks
        )
        yield CounterMetricFamily(
            "kvxfer_engine_evicted_blocks", "Cached blocks that were evicted", value=pool.evicted_blocks
        )
        requests = CounterMetricFamily(
            "kvxfer_engine_requests", "Requests that ended, by leg and error code", labels=("leg", "code")
        )
        for labels, count in sorted(counters.requests.copy().items()):
            requests.add_metric(labels, count)
        yield requests
        what = "How long the oldest waiting decode leg has waited for its grant or for blocks"
        yield GaugeMetricFamily("kvxfer_engine_longest_wait_seconds", what, value=self._executor.waited_s())
        what = "Prompts that were kept for other workers and revoked, because their blocks were needed here"
        yield CounterMetricFamily("kvxfer_engine_revoked_prompts", what, value=counters.revoked_prompts)
        what = "Times that a decode leg's early blocks went to another request"
        yield CounterMetricFamily("kvxfer_engine_block_reclaims", what, value=queue.taken_back)
        failures = CounterMetricFamily(
            "kvxfer_engine_transfer_failures", "Pulls that failed, by error code", labels=("code",)
        )
        for code, count in sorted(counters.remote_failures.copy().items()):
            failures.add_metric((code,), count)
        yield failures


class EngineMetrics:
    """All metrics of one worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = Histogram(
            "kvxfer_engine_time_to_first_token_seconds",
            "Arrival of a request at this worker to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._refused = Counter(
            "kvxfer_engine_http_refused",
            "HTTP requests of callers that may not ask, by error code",
            ["code"],
            registry=self.registry,
        )

    def refused(self, code: str) -> None:
        """Count a request that was not let in."""
        self._refused.labels(code).inc()

    def watch(self, executor: Executor) -> None:
        """Read ``executor`` at every scrape."""
        self.registry.register(_EngineCollector(executor))

    def watch_readiness(self, readiness: Readiness) -> None:
        """Read ``readiness`` at every scrape."""
        ready = Gauge(
            "kvxfer_engine_ready", "1 while requests are taken: what GET /ready answers", registry=self.registry
        )
        ready.set_function(lambda: float(readiness.reason is None))

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
