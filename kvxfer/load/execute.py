"""One run from its options: the workload is made, sent, and its records become a ``LoadRun``.

Decides the window of a run, and what becomes of records that cannot be written. What is good it must never know; nor
which command asks: `kvxfer load run`, a search and a sweep all come here.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.load.artefacts import DiskFullError
from kvxfer.load.drive.endpoint import first_model
from kvxfer.load.drive.start import DriveProgress, DriveResult, StopFlag, drive
from kvxfer.load.drive_aiperf import drive_aiperf
from kvxfer.load.offered import at_rate, body_maker, is_timed, with_warmup, workload_from
from kvxfer.load.options import ArrivalKind, DriveOptions, DriverKind, TargetOptions, WorkloadOptions
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.load.warmth import PREFIXES, prefixes_of
from kvxfer.workload.request import Workload

EDGE_S = 1e-6
"""The window ends so long after the last request was due; times are written to a tenth of it."""

OnRecord = Callable[[MeasuredRequest], None]
OnProgress = Callable[[DriveProgress], None]


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What one run sends where. Changed copies make the runs of a search or sweep."""

    target: TargetOptions
    workload: WorkloadOptions = dataclasses.field(default_factory=WorkloadOptions)
    drive: DriveOptions = dataclasses.field(default_factory=DriveOptions)

    def at_rate(self, rate: float, requests: int, *, warmup: int, seed: int, salt: str) -> LoadPlan:
        """The same at another rate, with so many requests and prompts of its own; ``duration_s`` is left out. A trace
        that keeps its own times becomes faster or slower. Raises ConfigError for a trace with fewer requests."""
        workload = dataclasses.replace(
            self.workload, requests=requests, duration_s=0.0, seed=seed, salt=f"{self.workload.salt}{salt}"
        )
        drive_options = dataclasses.replace(self.drive, warmup=warmup)
        return dataclasses.replace(self, workload=at_rate(workload, rate), drive=drive_options)

    def at(self, url: str, model: str) -> LoadPlan:
        """The same at another server; ``model`` empty: the one that was asked for before."""
        target = dataclasses.replace(self.target, url=url, model=self.target.model or model)
        return dataclasses.replace(self, target=target)

    @property
    def settings(self) -> dict[str, Any]:
        """What was told, for ``LoadRun.settings``."""
        return {name: plain_settings(getattr(self, name)) for name in ("target", "workload", "drive")}


def plain_settings(options: Any) -> dict[str, Any]:
    """The fields of an options dataclass, enums as their values."""
    values = dataclasses.asdict(options)
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}


def execute(
    plan: LoadPlan,
    *,
    name: str = "run",
    point: Mapping[str, Any] | None = None,
    on_record: OnRecord = lambda record: None,
    on_progress: OnProgress | None = None,
    stop: StopFlag | None = None,
) -> LoadRun:
    """Send the plan's workload and return all that came of it; ``on_record`` is told each record as it ends.

    Where ``on_record`` raises DiskFullError the run ends, and is returned as ``disk_full`` with every record. Raises
    what :func:`kvxfer.load.offered.workload_from` and :func:`kvxfer.load.drive.start.drive` raise: before a request is
    sent, and so without records.
    """
    offered = workload_from(plan.workload)
    rate = offered_rate(plan.workload)
    workload, begin_s = with_warmup(offered, plan.drive.warmup, rate or 0.0)
    target = plan.target
    if not target.model:
        target = dataclasses.replace(target, model=first_model(target))
    bodies = body_maker(target, plan.workload, workload, target.model)
    records: list[MeasuredRequest] = []
    stopping = _Stopping(stop)

    def keep(record: MeasuredRequest) -> None:
        record.is_length_asked = bodies.asks_length
        records.append(record)
        if not stopping.is_full:
            try:
                on_record(record)
            except DiskFullError:
                stopping.is_full = True

    send = drive_aiperf if plan.drive.driver is DriverKind.AIPERF else drive
    result = send(
        workload,
        bodies.body,
        target,
        plan.drive,
        run=name,
        warmup=plan.drive.warmup,
        on_record=keep,
        on_progress=on_progress,
        stop=stopping,
    )
    records.sort(key=lambda record: record.number)
    settings = dataclasses.replace(plan, target=target).settings
    run = LoadRun(
        name=name,
        driver=plan.drive.driver.value,
        began_unix_s=result.began_unix_s or time.time(),
        window_s=window_of(records, begin_s, plan.workload.duration_s, is_whole=result.ended == "complete"),
        workload=_named(workload),
        source=workload.source,
        offered_per_s=rate,
        point=dict(point or {}),
        settings={**settings, "generator": _generator(result)},
        ended="disk_full" if stopping.is_full else result.ended,
        records=records,
    )
    tokens_differ = plan.workload.token_high - plan.workload.token_low > 1
    run.settings[PREFIXES] = prefixes_of(run, workload, tokens_differ=tokens_differ)
    return run


def offered_rate(options: WorkloadOptions) -> float | None:
    """Requests per second that were asked for; None where the trace says when, or the rate changes. Raises ConfigError
    for a trace that cannot be read."""
    return None if options.arrival is ArrivalKind.RAMP or is_timed(options) else options.rate


def window_of(
    records: list[MeasuredRequest], begin_s: float, duration_s: float, *, is_whole: bool
) -> tuple[float, float]:
    """The window in which requests are counted by when they were due.

    It begins after the warm-up. It has ``duration_s``, where that was asked for; else it ends when the last request
    was due, one mean gap later where the first was due at its very beginning: so n gaps belong to n requests. A run
    that was cut ends when the last thing happened in it.
    """
    if not is_whole:
        happened = [time_s for record in records for time_s in (record.sent_s, record.end_s) if time_s is not None]
        return begin_s, max([begin_s + EDGE_S, *happened])
    if duration_s:
        return begin_s, begin_s + duration_s
    due = sorted(record.due_s for record in records if not record.is_warmup)
    if not due:
        return begin_s, begin_s + EDGE_S
    has_first_gap = due[0] > begin_s + EDGE_S
    mean_gap = 0.0 if has_first_gap or len(due) < 2 else (due[-1] - due[0]) / (len(due) - 1)
    return begin_s, max(due[-1], begin_s) + max(mean_gap, EDGE_S)


def _named(workload: Workload) -> str:
    return f"{workload.name} ({workload.mode.value})" if workload.has_sessions else workload.name


def _generator(result: DriveResult) -> dict[str, Any]:
    processes = [dataclasses.asdict(use) for use in result.processes]
    return {"cpu_s": round(result.cpu_s, 3), "message": result.message, "processes": processes}


class _Stopping:
    """Set where the caller's flag is, or the disk is full."""

    def __init__(self, stop: StopFlag | None) -> None:
        self._stop = stop
        self.is_full = False

    def is_set(self) -> bool:
        return self.is_full or (self._stop is not None and self._stop.is_set())
