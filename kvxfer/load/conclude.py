"""Closes a load test: every run is judged, and the directory gets its files and its report.

Decides which verdicts stand where, and that a full disk costs files and not the result. It must never print.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.load.artefacts import REQUESTS_FILE, DiskFullError, RunDirectory, StoredLoadTest
from kvxfer.load.judge import NO_LIMITS, RunSummary, summarize, untold
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.options import GoalOptions, OutOptions
from kvxfer.load.run import LoadRun
from kvxfer.load.stationarity import stationarity
from kvxfer.load.verdicts import RunVerdict, has_failed, judge_run


@dataclasses.dataclass
class JudgedRun:
    """One run with what it says, and whether it can be believed."""

    run: LoadRun
    summary: RunSummary
    verdicts: list[RunVerdict]


@dataclasses.dataclass
class LoadResult:
    """A load test that has ended, with all its runs."""

    kind: str
    judged: list[JudgedRun]
    overall: list[RunVerdict]
    """Verdicts on the whole."""
    directory: pathlib.Path
    report: pathlib.Path | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    """What could not be written, in sentences."""
    stored: StoredLoadTest | None = None
    counts_runs: bool = True
    """A run's verdict can fail the whole. Not in a search: what its probes are worth is said by the search."""

    @property
    def is_failure(self) -> bool:
        """It did not measure what it claims to: for a command's exit code."""
        own = [verdict for one in self.judged for verdict in one.verdicts] if self.counts_runs else []
        return has_failed([*self.overall, *own]) or bool(self.notes)


def limits_of(goal: GoalOptions) -> LatencyLimits:
    """Raises ConfigError for limits that are none; an empty text has none."""
    return LatencyLimits.parse(goal.goodput) if goal.goodput else NO_LIMITS


def check_told(runs: Iterable[LoadRun], goal: GoalOptions) -> None:
    """Raises ConfigError for a limit of what the tool that sent does not tell: each answer would meet it."""
    limits = limits_of(goal)
    for run in runs:
        for name in untold(run):
            if getattr(limits, f"{name}_s") is not None:
                raise ConfigError(f"{run.driver} tells no {name} of its answers: a limit of it cannot be judged")


def judge(run: LoadRun, goal: GoalOptions) -> JudgedRun:
    """Raises ConfigError for limits that are none."""
    limits = limits_of(goal)
    summary = summarize(run, limits, goal.attainment)
    verdicts = judge_run(run, summary, stationarity(run, limits))
    if not summary.answered and run.ended == "complete":
        said = f"Nothing was answered: none of {summary.due} requests came back whole."
        verdicts.insert(0, RunVerdict("nothing_answered", said, True))
    return JudgedRun(run, summary, verdicts)


@contextlib.contextmanager
def opened(out: OutOptions) -> Iterator[RunDirectory]:
    """The directory that was named, or a new one here that is named by the time; closed after the block. A load test
    that fails before its first request leaves none. Raises what ``RunDirectory.create`` raises."""
    was_there = bool(out.out) and pathlib.Path(out.out).is_dir()
    directory = RunDirectory.create(out.out) if out.out else _named_by_time()
    try:
        yield directory
    except BaseException:
        directory.close()
        _forget(directory.path, is_whole=not was_there)
        raise
    finally:
        directory.close()


def _named_by_time() -> RunDirectory:
    name = time.strftime("kvxfer-load-%Y%m%d-%H%M%S")
    for number in range(1, 100):
        path = pathlib.Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return RunDirectory.create(path)
    raise ConfigError(f"there are too many directories called {name}; name one with out")


def _forget(path: pathlib.Path, *, is_whole: bool) -> None:
    """Remove what was made, where no request was noted."""
    with contextlib.suppress(OSError):
        requests = path / REQUESTS_FILE
        if requests.stat().st_size == 0 and [each.name for each in path.iterdir()] == [REQUESTS_FILE]:
            requests.unlink()
            if is_whole:
                path.rmdir()


def conclude(
    kind: str,
    judged: Sequence[JudgedRun],
    directory: RunDirectory,
    out: OutOptions,
    *,
    overall: Iterable[RunVerdict] = (),
    extra: dict[str, Any] | None = None,
    counts_runs: bool = True,
) -> LoadResult:
    """Write ``run.json``, ``summary.csv`` and, where it is asked for, ``report.html``. A disk that is full is said in
    ``notes``: what was written before stays."""
    result = LoadResult(kind, list(judged), list(overall), directory.path, counts_runs=counts_runs)
    verdicts: dict[str, Sequence[RunVerdict]] = {one.run.name: one.verdicts for one in judged}
    if result.overall:
        verdicts[""] = result.overall
    try:
        result.stored = directory.finish(
            kind, [one.run for one in judged], [one.summary for one in judged], verdicts, extra or {}
        )
        if out.report:
            from kvxfer.load.report.write import write_report  # it needs plotly, and the rest does not

            result.report = write_report(directory.path, result.stored)
    except DiskFullError as error:
        result.notes.append(f"{str(error)[:1].upper()}{str(error)[1:]}.")
    return result
