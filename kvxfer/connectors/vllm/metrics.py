"""The connector's metrics among vLLM's own: log lines, and ``vllm:kvxfer_*`` at ``/metrics``. Decides names and
buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvxfer.connectors.vllm.requests import Gauges
from kvxfer.connectors.vllm.steps import Report

LONG = (10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, *LONG)
"""A load's time includes its wait for the prefill engine."""
WAITED = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, *LONG)


@dataclasses.dataclass
class KvxferStats(KVConnectorStats):  # type: ignore[misc]
    """Loads that ended (a row each: outcome, lane, bytes, seconds, wire seconds, early bytes), prompts that no engine
    fetched, seconds of waits that ended, prompts that were taken back for their blocks, and how it stands with what
    waits."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(
        cls,
        reports: Iterable[Report],
        expired: int,
        waited: Iterable[float] = (),
        revoked: int = 0,
        gauges: Gauges | None = None,
    ) -> KvxferStats:
        rows = [
            [r.code or "committed", r.lane or "none", r.bytes, r.seconds, r.wire_seconds, r.early_bytes]
            for r in reports
        ]
        told = None if gauges is None else gauges._asdict()
        values = {"loads": rows, "expired": expired, "waited": list(waited), "revoked": revoked, "gauges": told}
        return cls(data=values)

    def reset(self) -> None:
        self.data: dict[str, Any] = {"loads": [], "expired": 0, "waited": [], "revoked": 0, "gauges": None}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["loads"].extend(other.data["loads"])
        self.data["expired"] += other.data["expired"]
        self.data["waited"].extend(other.data["waited"])
        self.data["revoked"] += other.data["revoked"]
        if other.data["gauges"] is not None:
            self.data["gauges"] = other.data["gauges"]
        return self

    def is_empty(self) -> bool:
        return not any(self.data[name] for name in ("loads", "expired", "waited", "revoked", "gauges"))

    def reduce(self) -> dict[str, int | float]:
        """One line of the engine's log."""
        committed = [row for row in self.data["loads"] if row[0] == "committed"]
        seconds = sorted(row[3] for row in committed) or [0.0]
        return {
            "kvxfer loads": len(committed),
            "failed": len(self.data["loads"]) - len(committed),
            "expired": self.data["expired"],
            "revoked": self.data["revoked"],
            "longest wait (s)": round(max(self.data["waited"], default=0.0), 3),
            "MB": round(sum(row[2] for row in committed) / 1e6, 3),
            "median (ms)": round(seconds[len(seconds) // 2] * 1e3, 3),
            "slowest (ms)": round(seconds[-1] * 1e3, 3),
        }


class KvxferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvxfer_loads_total{outcome,lane}``, ``_bytes_total``, ``_early_bytes_total``, ``_load_duration_seconds``,
    ``_wire_duration_seconds``, ``_expired_prompts_total``, ``_wait_duration_seconds``, ``_revoked_prompts_total``,
    ``_awaited_prompts{state}``, ``_unread_blocks``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._labelvalues = labelvalues
        self._loads = self._counter_cls(
            name="vllm:kvxfer_loads", documentation="Loads that ended.", labelnames=[*labelnames, "outcome", "lane"]
        )
        self._bytes = self._counter("bytes", "Bytes of committed loads.")
        self._early = self._counter("early_bytes", "Bytes that landed while the source still computed.")
        self._expired = self._counter("expired_prompts", "Computed prompts that no engine fetched in time.")
        self._revoked = self._counter("revoked_prompts", "Computed prompts that were taken back for their blocks.")
        self._seconds = self._histogram("load", "From the order to the commit of a load.", SECONDS)
        self._wire_seconds = self._histogram(
            "wire", "Of a load, while blocks were read, and last byte to verdict.", SECONDS
        )
        self._waited = self._histogram("wait", "Until a prompt began at its source, or the wait was over.", WAITED)
        self._awaited = self._gauge_cls(
            name="vllm:kvxfer_awaited_prompts",
            documentation="Prompts computed elsewhere that requests wait for, without blocks.",
            labelnames=[*labelnames, "state"],
        )
        unread = self._gauge_cls(
            name="vllm:kvxfer_unread_blocks",
            documentation="Blocks kept for readers that have not begun.",
            labelnames=labelnames,
        )
        self._unread = create_metric_per_engine(unread, labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for outcome, lane, nbytes, seconds, wire_seconds, early in transfer_stats_data["loads"]:
            self._loads.labels(*self._labelvalues[engine_idx], outcome, lane).inc()
            if outcome == "committed":
                self._bytes[engine_idx].inc(nbytes)
                self._early[engine_idx].inc(early)
                self._seconds[engine_idx].observe(seconds)
                self._wire_seconds[engine_idx].observe(wire_seconds)
        self._expired[engine_idx].inc(transfer_stats_data["expired"])
        self._revoked[engine_idx].inc(transfer_stats_data["revoked"])
        for seconds in transfer_stats_data["waited"]:
            self._waited[engine_idx].observe(seconds)
        gauges = transfer_stats_data["gauges"]
        if gauges is not None:
            for state in ("unknown", "queued", "granted"):
                self._awaited.labels(*self._labelvalues[engine_idx], state).set(gauges[state])
            self._unread[engine_idx].set(gauges["blocks_unread"])

    def _counter(self, name: str, documentation: str) -> Any:
        counter = self._counter_cls(
            name=f"vllm:kvxfer_{name}", documentation=documentation, labelnames=self._labelnames
        )
        return create_metric_per_engine(counter, self._labelvalues)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Any:
        histogram = self._histogram_cls(
            name=f"vllm:kvxfer_{name}_duration_seconds",
            documentation=documentation,
            buckets=buckets,
            labelnames=self._labelnames,
        )
        return create_metric_per_engine(histogram, self._labelvalues)
