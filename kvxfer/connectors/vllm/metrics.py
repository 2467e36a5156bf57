"""The connector's figures in vLLM's own metrics: log lines and ``vllm:kvxfer_*`` at ``/metrics``. Decides names and
buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvxfer.connectors.vllm.steps import Report

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclasses.dataclass
class KvxferStats(KVConnectorStats):  # type: ignore[misc]
    """Loads that ended (a row each: outcome, lane, bytes, seconds, wire seconds, early bytes), and prompts that nobody
    fetched."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, reports: Iterable[Report], expired: int) -> KvxferStats:
        rows = [
            [r.code or "committed", r.lane or "none", r.bytes, r.seconds, r.wire_seconds, r.early_bytes]
            for r in reports
        ]
        return cls(data={"loads": rows, "expired": expired})

    def reset(self) -> None:
        self.data: dict[str, Any] = {"loads": [], "expired": 0}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["loads"].extend(other.data["loads"])
        self.data["expired"] += other.data["expired"]
        return self

    def is_empty(self) -> bool:
        return not self.data["loads"] and not self.data["expired"]

    def reduce(self) -> dict[str, int | float]:
        """One line of the engine's log."""
        committed = [row for row in self.data["loads"] if row[0] == "committed"]
        seconds = sorted(row[3] for row in committed) or [0.0]
        return {
            "kvxfer loads": len(committed),
            "failed": len(self.data["loads"]) - len(committed),
            "expired": self.data["expired"],
            "MB": round(sum(row[2] for row in committed) / 1e6, 3),
            "median (ms)": round(seconds[len(seconds) // 2] * 1e3, 3),
            "slowest (ms)": round(seconds[-1] * 1e3, 3),
        }


class KvxferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvxfer_loads_total{outcome,lane}``, ``_bytes_total``, ``_early_bytes_total``, ``_load_seconds``,
    ``_wire_seconds``, ``_expired_prompts_total``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._labelvalues = labelvalues
        self._loads = self._counter_cls(
            name="vllm:kvxfer_loads", documentation="Loads that ended.", labelnames=[*labelnames, "outcome", "lane"]
        )
        self._bytes = self._counter("bytes", "Bytes of committed loads.")
        self._early = self._counter("early_bytes", "Bytes that landed while the source still computed.")
        self._expired = self._counter("expired_prompts", "Computed prompts that nobody fetched in time.")
        self._seconds = self._histogram("load", "From the order to the commit of a load.")
        self._wire_seconds = self._histogram("wire", "Of a load, while blocks were read, and last byte to verdict.")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for outcome, lane, nbytes, seconds, wire_seconds, early in transfer_stats_data["loads"]:
            self._loads.labels(*self._labelvalues[engine_idx], outcome, lane).inc()
            if outcome == "committed":
                self._bytes[engine_idx].inc(nbytes)
                self._early[engine_idx].inc(early)
                self._seconds[engine_idx].observe(seconds)
                self._wire_seconds[engine_idx].observe(wire_seconds)
        self._expired[engine_idx].inc(transfer_stats_data["expired"])

    def _counter(self, name: str, documentation: str) -> Any:
        counter = self._counter_cls(
            name=f"vllm:kvxfer_{name}", documentation=documentation, labelnames=self._labelnames
        )
        return create_metric_per_engine(counter, self._labelvalues)

    def _histogram(self, name: str, documentation: str) -> Any:
        histogram = self._histogram_cls(
            name=f"vllm:kvxfer_{name}_seconds",
            documentation=documentation,
            buckets=SECONDS,
            labelnames=self._labelnames,
        )
        return create_metric_per_engine(histogram, self._labelvalues)
