"""The coordinator's counters and gauges, in a registry of their own. Must never decide anything."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

import prometheus_client

from kvxfer.errors import ConfigError
from kvxfer.protocol.directory import DirectoryStatistics


class CoordinatorMetrics:
    """Registers nothing globally: two coordinators in one process have two of these."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._members = prometheus_client.Gauge(
            "kvxfer_coordinator_members",
            "Members by state; draining ones are counted again.",
            ["state"],
            registry=self.registry,
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
        self._registrations = prometheus_client.Counter(
            "kvxfer_coordinator_registrations",
            "Registrations by outcome: new, return, or an error code.",
            ["outcome"],
            registry=self.registry,
        )
        self._ended = prometheus_client.Counter(
            "kvxfer_coordinator_lives_ended", "Ended lives of agents by cause.", ["cause"], registry=self.registry
        )

    def observe(self, statistics: DirectoryStatistics, watchers: int) -> None:
        """Show the directory as it is now."""
        for state, count in statistics.members.items():
            self._members.labels(state).set(count)
        self._revision.set(statistics.revision)
        self._settled.set(statistics.is_settled)
        self._watchers.set(watchers)

    def registered(self, outcome: str) -> None:
        self._registrations.labels(outcome).inc()

    def ended(self, cause: str) -> None:
        self._ended.labels(cause).inc()

    def text(self) -> str:
        """The exposition, as ``/metrics`` serves it."""
        return prometheus_client.generate_latest(self.registry).decode()


class MetricsServer:
    """``/metrics`` over HTTP from a thread of its own, until :meth:`close`."""

    def __init__(self, metrics: CoordinatorMetrics, host: str, port: int) -> None:
        """Raises ConfigError if the port cannot be had."""
        try:
            self._server: WSGIServer
            self._thread: threading.Thread
            self._server, self._thread = prometheus_client.start_http_server(port, host.strip("[]"), metrics.registry)
        except OSError as error:
            raise ConfigError(f"metrics cannot listen on {host}:{port}: {error.strerror}") from None
        self.port = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
