"""The counted requests of a run as arrays: what the figures compute with.

Decides how a failure enters a figure: as an infinite time. It must never know a limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from kvxfer.load.intervals import percentile
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.report.figure import Numbers
from kvxfer.load.run import LoadRun

NEVER = math.inf
UNKNOWN = math.nan


@dataclasses.dataclass(frozen=True)
class RunColumns:
    """In the order of due times; seconds. ``inf``: it never came; ``nan``: it says nothing."""

    run: LoadRun
    records: list[MeasuredRequest]
    due: Numbers
    sent: Numbers
    ttft: Numbers
    tpot: Numbers
    e2e: Numbers
    lateness: Numbers
    is_good: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @property
    def count(self) -> int:
        return len(self.records)

    @property
    def span_s(self) -> tuple[float, float]:
        """The window, as far as requests were due in it."""
        begin, end = self.run.window_s
        last = float(self.due[-1]) if self.count else begin
        return (begin if math.isfinite(begin) else 0.0), (end if math.isfinite(end) else last + 1e-9)


def columns_of(run: LoadRun) -> RunColumns:
    records = sorted(run.counted, key=lambda record: record.due_s)
    return RunColumns(
        run=run,
        records=records,
        due=_array(record.due_s for record in records),
        sent=_array(NEVER if record.sent_s is None else record.sent_s for record in records),
        ttft=_array(record.ttft_s if record.is_good else NEVER for record in records),
        tpot=_array(UNKNOWN if (value := record.tpot_s) is None else value for record in records),
        e2e=_array(record.e2e_s for record in records),
        lateness=_array(UNKNOWN if (value := record.lateness_s) is None else value for record in records),
        is_good=np.array([record.is_good for record in records], dtype=np.bool_),
    )


def windows(columns: RunColumns, width_s: float) -> list[tuple[float, slice]]:
    """(begin, which requests were due in it) of every window of that width; the last may be shorter."""
    begin, end = columns.span_s
    count = max(1, math.ceil((end - begin) / width_s - 1e-9))
    edges = begin + width_s * np.arange(count + 1)
    places = np.searchsorted(columns.due, edges)
    places[-1] = columns.count
    return [(float(edges[at]), slice(int(places[at]), int(places[at + 1]))) for at in range(count)]


def width_for(columns: RunColumns, most: int = 120, fewest_in: int = 30) -> float:
    """A width of windows with enough requests in each, from the round ones."""
    begin, end = columns.span_s
    span = max(end - begin, 1e-6)
    least = max(span / most, span * fewest_in / max(columns.count, 1))
    rounds = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)
    return float(next((one for one in rounds if one >= least), math.ceil(least / 3600) * 3600))


def fewest_of(parts: Sequence[tuple[float, slice]]) -> int:
    """How many requests a window needs for a percentile: a short last one says nothing beside the others."""
    return 10 if len(parts) > 1 else 1


def percentile_of(values: Numbers, share: float, fewest: int = 1) -> float:
    """As ``intervals.percentile`` has it, in any order; nan of fewer than ``fewest``. Infinite values count."""
    known = values[~np.isnan(values)]
    return percentile(np.sort(known).tolist(), share) if known.size >= max(1, fewest) else math.nan


def _array(values: Iterable[float]) -> Numbers:
    return np.fromiter(values, dtype=np.float64)
