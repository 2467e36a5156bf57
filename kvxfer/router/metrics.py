"""The router's Prometheus metrics, in a registry of their own. Counts what it is told; decides nothing."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvxfer.openai.transfer_params import Part
from kvxfer.router.fleet.workers import Workers

ERROR_BUCKETS = (-0.8, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 4.0)
TTFT_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 320.0, 640.0),
)
"""To the longest that a request may wait for its answer by default."""
DURATION_BUCKETS_S = (*TTFT_BUCKETS_S, 1280.0, 2560.0, 5120.0)
"""An answer that makes progress has no bound by default."""
BODY_BUCKETS = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


class RequestOutcome(enum.StrEnum):
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
        self._parts: set[Part] = set()
        """Of all workers that were ever known: of a part that has lost all of them 0 is said, of one that never had any
        nothing."""

    def collect(self) -> Iterable[Metric]:
        inflight = GaugeMetricFamily(
            "kvxfer_router_inflight", "Requests in flight at a worker, by part", labels=("worker", "part")
        )
        for (agent_id, part), count in sorted(self._workers.inflight().items()):
            inflight.add_metric((agent_id, part), count)
        yield inflight
        known = self._workers.statistics()
        usable = GaugeMetricFamily(
            "kvxfer_router_workers_ready",
            "Workers that get as many new requests as others of their part, by part",
            labels=("part",),
        )
        self._parts |= self._workers.parts()
        for part, count in ((Part.PREFILL, known.prefill_ready), (Part.DECODE, known.decode_ready)):
            if part in self._parts:
                usable.add_metric((part.value,), count)
        yield usable
        yield GaugeMetricFamily(
            "kvxfer_router_workers_ejected",
            "Workers that get a request only where no other is left",
            value=known.ejected,
        )
        states = GaugeMetricFamily(
            "kvxfer_router_workers", "Known workers, by the state of their health", labels=("state",)
        )
        for state, count in sorted(known.states.items()):
            states.add_metric((state,), count)
        yield states
        yield GaugeMetricFamily(
            "kvxfer_router_workers_drained", "Workers that an admin gave no new work", value=known.drained
        )
        yield GaugeMetricFamily(
            "kvxfer_router_pairs_ejected", "Pairs that get no request now", value=known.pairs_ejected
        )
        if known.is_connected is not None:
            yield GaugeMetricFamily(
                "kvxfer_router_coordinator_connected",
                "1 while the coordinator is heard",
                value=float(known.is_connected),
            )
        yield from self._upstream()
        counters = self._workers.counters
        yield _counted("kvxfer_router_ejections", "Ejections of workers", ("worker", "reason"), counters.ejections)
        yield _counted(
            "kvxfer_router_probes", "Probes of workers, by how they ended", ("worker", "result"), counters.probes
        )
        yield _counted(
            "kvxfer_router_pair_ejections", "Ejections of pairs", ("prefill", "decode"), counters.pair_ejections
        )

    def _upstream(self) -> Iterable[Metric]:
        pools = sorted(self._workers.connections().items())
        connections = GaugeMetricFamily(
            "kvxfer_router_upstream_connections", "Open connections to an address", labels=("address", "state")
        )
        waiting = GaugeMetricFamily(
            "kvxfer_router_upstream_waiting", "Legs that wait for a connection to an address", labels=("address",)
        )
        opened = CounterMetricFamily(
            "kvxfer_router_upstream_connects", "Connections that were opened to an address", labels=("address",)
        )
        requests = CounterMetricFamily(
            "kvxfer_router_upstream_requests", "Requests to an address, without probes", labels=("address",)
        )
        for address, now in pools:
            connections.add_metric((address, "idle"), now.idle)
            connections.add_metric((address, "in_use"), now.open - now.idle)
            waiting.add_metric((address,), now.waiting)
            opened.add_metric((address,), now.connected)
            requests.add_metric((address,), now.requests)
        return (connections, waiting, opened, requests)


def _counted(name: str, text: str, labels: tuple[str, str], counts: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in sorted(counts.items()):
        family.add_metric(key, count)
    return family


class RouterMetrics:
    """All metrics of one router. Labelled children are looked up once: a request counts with plain calls."""

    def __init__(self, workers: Workers) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "kvxfer_router_requests", "Requests by route and outcome", ("route", "outcome"), registry=registry
        )
        self.ttft = Histogram(
            "kvxfer_router_ttft_seconds",
            "Arrival of a streaming request to its first event with text",
            ("prefill",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "kvxfer_router_request_seconds",
            "Arrival of a request to the last byte of its answer",
            ("route",),
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.request_bytes = Histogram(
            "kvxfer_router_request_bytes", "Bodies of requests", ("route",), buckets=BODY_BUCKETS, registry=registry
        )
        self.answer_bytes = Counter(
            "kvxfer_router_answer_bytes", "Bytes of answers that were sent to clients", ("route",), registry=registry
        )
        self.traces = Counter(
            "kvxfer_router_traces", "Requests whose spans were to be exported", ("result",), registry=registry
        )
        self.placements = Counter("kvxfer_router_placements", "Pairs chosen, by reason", ("reason",), registry=registry)
        self.prompt_tokens = Counter(
            "kvxfer_router_prompt_tokens",
            "Tokens of prompts whose worker told of its cache: all of them, those presumed there, those that were",
            ("which",),
            registry=registry,
        )
        self.ttft_error = Histogram(
            "kvxfer_router_ttft_error_ratio",
            "Estimated time to the first token, less the measured one, as a part of the measured one",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self.retries = Counter("kvxfer_router_retries", "New attempts, by reason", ("reason",), registry=registry)
        self.retries_refused = Counter(
            "kvxfer_router_retries_refused", "New attempts that the budget of retries did not allow", registry=registry
        )
        self.leg_failures = Counter(
            "kvxfer_router_leg_failures", "Legs that failed, by part and kind", ("part", "kind"), registry=registry
        )
        self.recomputes = Counter(
            "kvxfer_router_recomputes",
            "Prompts that a decode worker was to compute itself because P was lost, by verdict of the budget",
            ("worker", "verdict"),
            registry=registry,
        )
        self.prefills_forgone = Counter(
            "kvxfer_router_prefills_forgone",
            "Finished prefills whose client had left, and whose blocks a decode worker was told to give back",
            registry=registry,
        )
        self.key_requests = Counter(
            "kvxfer_router_key_requests",
            "Requests by the name of their API key, and outcome",
            ("key", "outcome"),
            registry=registry,
        )
        self.key_tokens = Counter(
            "kvxfer_router_key_tokens",
            "Tokens of prompts and answers by the name of the API key",
            ("key",),
            registry=registry,
        )
        self.key_refused = Counter(
            "kvxfer_router_key_refused",
            "Requests that a limit of their API key refused, by limit",
            ("key", "limit"),
            registry=registry,
        )
        self.key_inflight = Gauge(
            "kvxfer_router_key_inflight",
            "Requests being served by the name of their API key",
            ("key",),
            registry=registry,
        )
        self.ready = Gauge(
            "kvxfer_router_ready", "1 while a request would be placed: what GET /ready answers", registry=registry
        )
        self.registry.register(_WorkersCollector(workers))
        self._ended = functools.cache(lambda route, outcome: self.requests.labels(route, outcome))
        self._duration = functools.cache(self.duration.labels)
        self._ttft = functools.cache(self.ttft.labels)
        self._request_bytes = functools.cache(self.request_bytes.labels)
        self._answer_bytes = functools.cache(self.answer_bytes.labels)
        self._prompt_tokens = functools.cache(self.prompt_tokens.labels)
        self._placed = functools.cache(self.placements.labels)
        self._key_ended = functools.cache(lambda key, outcome: self.key_requests.labels(key, outcome))
        self._key_inflight = functools.cache(self.key_inflight.labels)

    def ended(self, route: str, outcome: RequestOutcome, seconds: float) -> None:
        self._ended(route, outcome.value).inc()
        self._duration(route).observe(seconds)

    def carried(self, route: str, request_bytes: int, answer_bytes: int) -> None:
        """A request is over, of so many bytes. A body that did not arrive has none."""
        if request_bytes:
            self._request_bytes(route).observe(request_bytes)
        self._answer_bytes(route).inc(answer_bytes)

    def traced(self, result: str, count: int) -> None:
        """What became of the spans of some requests. From any thread."""
        self.traces.labels(result).inc(count)

    def first_byte(self, prefill: str, seconds: float) -> None:
        """The first event with some of the answer went out."""
        self._ttft(prefill).observe(seconds)

    def estimated(self, estimate_s: float, measured_s: float) -> None:
        """A first token came after ``measured_s`` since the choice, at which ``estimate_s`` were estimated."""
        if measured_s > 0:
            self.ttft_error.observe((estimate_s - measured_s) / measured_s)

    def cached(self, prompt: float, presumed: float, cached: float) -> None:
        """A worker said how many tokens of a prompt it had cached."""
        for which, tokens in (("all", prompt), ("presumed", presumed), ("cached", cached)):
            self._prompt_tokens(which).inc(tokens)

    def placed(self, reason: str) -> None:
        self._placed(reason).inc()

    def retried(self, reason: str) -> None:
        self.retries.labels(reason).inc()

    def retry_refused(self) -> None:
        self.retries_refused.inc()

    def leg_failed(self, part: str, kind: str) -> None:
        self.leg_failures.labels(part, kind).inc()

    def recomputed(self, worker: str) -> None:
        self.recomputes.labels(worker, "allowed").inc()

    def recompute_refused(self, worker: str) -> None:
        self.recomputes.labels(worker, "refused").inc()

    def forgone(self) -> None:
        self.prefills_forgone.inc()

    def key_began(self, key: str) -> None:
        """A request of the holder of that name was let in."""
        self._key_inflight(key).inc()

    def key_ended(self, key: str, outcome: RequestOutcome, tokens: float) -> None:
        """One that was let in is over, and cost so many tokens."""
        self._key_inflight(key).dec()
        self._key_ended(key, outcome.value).inc()
        if tokens:
            self.key_tokens.labels(key).inc(tokens)

    def key_limited(self, key: str, limit: str) -> None:
        """A limit of its key refused a request."""
        self.key_refused.labels(key, limit).inc()

    def collected(self, counter: Counter) -> Iterable[Metric]:
        """What a counter has counted, by its labels."""
        return counter.collect()

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
