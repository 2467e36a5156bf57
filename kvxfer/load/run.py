"""One run of a load test: what was offered to what, and the records of it. Decides nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvxfer.load.record import MeasuredRequest

POINT_NAMES = ("rate", "prefill", "decode", "policy", "lane", "devices")
"""Coordinates of a run in a search or sweep; ``devices``: GPUs (or workers) that took part."""


@dataclasses.dataclass
class LoadRun:
    """All times are seconds after the beginning of the run."""

    name: str
    driver: str
    """``native``, ``aiperf``, or the tool whose results were imported."""
    began_unix_s: float
    window_s: tuple[float, float]
    """Requests due from the first time on and before the second are counted."""
    workload: str = ""
    """Its name, and the dispatch mode where it has sessions."""
    source: str = ""
    """Of the workload, with its licence."""
    offered_per_s: float | None = None
    """The asked rate, where one was asked for."""
    point: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Coordinates, by POINT_NAMES."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the command was told; no secrets."""
    ended: str = "complete"
    """``complete``, or why it stopped before: ``interrupted``, ``disk_full``, ``unreachable``."""
    records: list[MeasuredRequest] = dataclasses.field(default_factory=list)

    @property
    def counted(self) -> list[MeasuredRequest]:
        """Those that count: due in the window, no warm-up."""
        begin, end = self.window_s
        return [record for record in self.records if not record.is_warmup and begin <= record.due_s < end]
