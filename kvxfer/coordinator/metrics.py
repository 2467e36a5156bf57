"""The coordinator's counters and gauges, in a registry of their own. Must never decide anything."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client

from kvxfer.errors import ConfigError
from kvxfer.one_host import OneHostHandler
from kvxfer.protocol.directory import DirectoryStatistics

log = logging.getLogger("kvxfer.coordinator")

SCRAPES_MAX = 16
SCRAPE_S = 5.0
"""How long a connection may last, from when it was accepted to the last byte of its answer."""


class CoordinatorMetrics:
    """Registers nothing globally: two coordinators in one process have two of these."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.store_failure = ""
        self._members = prometheus_client.Gauge(
            "kvxfer_coordinator_members",
            "Members by state.",
            ["state"],
            registry=self.registry,
        )
        self._draining = prometheus_client.Gauge(
            "kvxfer_coordinator_members_draining", "Members that take no new work.", registry=self.registry
        )
        self._revision = prometheus_client.Gauge(
            "kvxfer_coordinator_revision", "Revision of the membership.", registry=self.registry
        )
        self._settled = prometheus_client.Gauge(
            "kvxfer_coordinator_settled", "1 once absence means that an agent is gone.", registry=self.registry
        )
        self._watchers = prometheus_client.Gauge(
            "kvxfer_coordinator_watchers", "Open membership watches.", registry=self.registry
        )
        self._store_available = prometheus_client.Gauge(
            "kvxfer_coordinator_store_available",
            "1 while the store can be read and written; 0: no new incarnations, running work goes on.",
            registry=self.registry,
        )
        self._store_unwritten = prometheus_client.Gauge(
            "kvxfer_coordinator_store_unwritten", "Members whose record the store lacks.", registry=self.registry
        )
        self._interval = prometheus_client.Gauge(
            "kvxfer_coordinator_heartbeat_interval_seconds",
            "How often agents are told to give a heartbeat.",
            registry=self.registry,
        )
        self._heartbeats = prometheus_client.Counter(
            "kvxfer_coordinator_heartbeats", "Heartbeats of agents.", registry=self.registry
        )
        self._heartbeats_shown = 0
        self._registrations = prometheus_client.Counter(
            "kvxfer_coordinator_registrations",
            "Registrations by outcome: new, return, or an error code.",
            ["outcome"],
            registry=self.registry,
        )
        self._ended = prometheus_client.Counter(
            "kvxfer_coordinator_incarnations_ended",
            "Ended incarnations of agents by cause.",
            ["cause"],
            registry=self.registry,
        )

        self._calls = prometheus_client.Counter(
            "kvxfer_coordinator_calls",
            "Control calls by outcome: ok, or an error code.",
            ["call", "outcome"],
            registry=self.registry,
        )
        self._certificate_ends = prometheus_client.Gauge(
            "kvxfer_coordinator_certificate_ends_timestamp_seconds",
            "When the coordinator's certificate ends, in Unix seconds; absent without TLS.",
            registry=None,
        )
        self._has_certificate = False

    def called(self, call: str, outcome: str) -> None:
        """Count one control call."""
        self._calls.labels(call, outcome).inc()

    def certificate_ends(self, unix_s: float) -> None:
        self._certificate_ends.set(unix_s)
        if not self._has_certificate:
            self._has_certificate = True
            self.registry.register(self._certificate_ends)

    def observe(self, statistics: DirectoryStatistics, watchers: int) -> None:
        """Show the directory as it is now."""
        for state, count in statistics.members.items():
            if state == "draining":
                self._draining.set(count)
            else:
                self._members.labels(state).set(count)
        self._revision.set(statistics.revision)
        self._settled.set(statistics.is_settled)
        self._watchers.set(watchers)

    def observe_heartbeats(self, count: int, interval_s: float) -> None:
        """Show how many heartbeats came since the start, and what agents are told of their interval."""
        self._heartbeats.inc(count - self._heartbeats_shown)
        self._heartbeats_shown = count
        self._interval.set(interval_s)

    def observe_store(self, failure: str, unwritten: int) -> None:
        """Show the store as it is now: why it cannot be had, or empty."""
        self.store_failure = failure
        self._store_available.set(not failure)
        self._store_unwritten.set(unwritten)

    def registered(self, outcome: str) -> None:
        """Count one registration."""
        self._registrations.labels(outcome).inc()

    def ended(self, cause: str) -> None:
        """Count one incarnation that ended."""
        self._ended.labels(cause).inc()

    def text(self) -> str:
        """The exposition, as ``/metrics`` serves it."""
        return prometheus_client.generate_latest(self.registry).decode()


class _Handler(OneHostHandler, WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each scrape on a thread of its own, at most SCRAPES_MAX at once.

    The server closes a connection beyond them. The accepting thread shuts down a connection that is older than
    SCRAPE_S, even one whose client still sends or reads a few bytes now and then.
    """

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._free_scrapes = threading.BoundedSemaphore(SCRAPES_MAX)
        self._lock = threading.Lock()
        self._ends_s: dict[socket.socket, float] = {}
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free_scrapes.acquire(blocking=False):
            with self._lock:
                self._ends_s[request] = time.monotonic() + SCRAPE_S
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second, and after each connection."""
        self._shut_down_expired(time.monotonic())

    def server_close(self) -> None:
        super().server_close()
        self._shut_down_expired(math.inf)

    def _shut_down_expired(self, now_s: float) -> None:
        # The lock keeps the scrape threads from closing these sockets meanwhile: the descriptor number of a closed
        # socket may belong to another connection already.
        with self._lock:
            for request in [request for request, end_s in self._ends_s.items() if now_s >= end_s]:
                del self._ends_s[request]
                with contextlib.suppress(OSError):  # the client left
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._ends_s.pop(request, None)
        super().shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_scrapes.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left, or said nothing in time, is no traceback."""
        log.debug("a metrics connection from %s failed", client_address, exc_info=True)


def _routes(metrics: CoordinatorMetrics) -> Any:
    """``/live`` and ``/ready``; every other path has the metrics."""
    exposition = prometheus_client.make_wsgi_app(metrics.registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == "HEAD":
            heads: list[tuple[str, list[tuple[str, str]]]] = []
            answered = b"".join(answer({**environ, "REQUEST_METHOD": "GET"}, lambda *head: heads.append(head)))
            start_response(heads[0][0], [*heads[0][1], ("Content-Length", str(len(answered)))])
            return []
        if environ.get("PATH_INFO") not in ("/live", "/ready"):
            return exposition(environ, start_response)
        failure = metrics.store_failure if environ["PATH_INFO"] == "/ready" else ""
        body = {"status": "no new incarnations", "reason": failure} if failure else {"status": "ok"}
        start_response("503 Service Unavailable" if failure else "200 OK", [("content-type", "application/json")])
        return [json.dumps(body).encode()]

    return answer


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """``/metrics``, ``/live`` and ``/ready`` over HTTP from a thread of its own, until :meth:`close`."""

    def __init__(self, metrics: CoordinatorMetrics, host: str, port: int) -> None:
        """Raises ConfigError if the port cannot be had."""
        host = host.strip("[]")
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = kind((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"metrics cannot listen on {host}:{port}: {error.strerror}") from None
        self._server.set_app(_routes(metrics))
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvxfer-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
