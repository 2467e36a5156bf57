"""A sweep whose points are tested and compared: by a run at one rate, or by a search of the rate that each holds.

Decides what a point is worth, and which is best. How services are started is for ``sweep`` to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvxfer.load.artefacts import RunDirectory
from kvxfer.load.conclude import JudgedRun, LoadResult, conclude, judge, limits_of
from kvxfer.load.drive.start import StopFlag
from kvxfer.load.execute import LoadPlan, OnProgress, execute, offered_rate
from kvxfer.load.offered import mean_rate, workload_from
from kvxfer.load.options import GoalOptions, OutOptions
from kvxfer.load.run import LoadRun
from kvxfer.load.search import SearchOptions
from kvxfer.load.seek import SoughtRate, check, seek, warm_up
from kvxfer.load.settle import WarmedUp
from kvxfer.load.sweep import PointResult, SweepResult, sweep
from kvxfer.load.sweep_points import PointKind, SweepOptions, SweepPoint
from kvxfer.load.verdicts import RunVerdict

ROUND_MAX = 100
"""Requests of a round of warm-up before a point's one run."""


@dataclasses.dataclass
class ComparedPoint:
    """What was found at one point."""

    judged: list[JudgedRun] = dataclasses.field(default_factory=list)
    sought: SoughtRate | None = None
    warmed: WarmedUp | None = None
    """Before its one run; a search has its own."""

    @property
    def goodput_per_s(self) -> float | None:
        """Good requests per second: of the rate that a search found, at the target; else of the best run."""
        if self.sought is not None:
            rate = self.sought.result.rate
            return None if rate is None else rate * self.judged[0].summary.attainment_target
        return max((one.summary.goodput_per_s for one in self.judged), default=None)

    @property
    def is_attained(self) -> bool:
        return any(one.summary.is_attained for one in self.judged)


@dataclasses.dataclass
class Comparison:
    """A sweep with what was found at each point, by the point's name."""

    result: SweepResult
    tested: dict[str, ComparedPoint]

    @property
    def best(self) -> PointResult | None:
        """The point with the highest goodput per device; of those that met the target, where one did."""
        has_attained = any(one.is_attained for one in self.tested.values())

        def goodput(made: PointResult) -> float | None:
            one = self.tested.get(made.point.name)
            return None if one is None or one.is_attained != has_attained else one.goodput_per_s

        return self.result.best(goodput)

    def verdicts(self) -> list[RunVerdict]:
        """A sentence for each point that failed, or found no rate."""
        found = []
        for made in self.result.points:
            one = self.tested.get(made.point.name)
            if made.failure:
                found.append(RunVerdict("point_failed", f"{made.point.name}: {made.failure.removesuffix('.')}.", True))
            if one is not None and one.sought is not None:
                found += _named(made, [one.sought.verdict, *one.sought.findings])
            elif one is not None and one.warmed is not None:
                found += _named(made, one.warmed.findings)
        if self.result.is_interrupted:
            found.append(RunVerdict("interrupted", "The sweep was interrupted: points are missing.", True))
        return found

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {"points": [self._point(made) for made in self.result.points], "best": best.point.name if best else None}

    def _point(self, made: PointResult) -> dict[str, Any]:
        one = self.tested.get(made.point.name, ComparedPoint())
        return {
            "name": made.point.name,
            **made.point.coordinates,
            "failure": made.failure,
            "start_s": made.start_s,
            "goodput_per_s": one.goodput_per_s,
            **(one.sought.to_json() if one.sought is not None else {}),
        }


def _named(made: PointResult, verdicts: list[RunVerdict]) -> list[RunVerdict]:
    return [dataclasses.replace(one, sentence=f"{made.point.name}: {one.sentence}") for one in verdicts]


def warmed_for_a_run(plan: LoadPlan, **more: Any) -> WarmedUp:
    """A service that was just started, at the rate of the run that comes; with no more requests than the run has."""
    workload = workload_from(plan.workload)
    rate = offered_rate(plan.workload) or mean_rate(workload) or 1.0
    return warm_up(plan, rate, min(ROUND_MAX, len(workload.requests)), **more)


def compare(
    options: SweepOptions,
    plan: LoadPlan,
    goal: GoalOptions,
    search: SearchOptions,
    *,
    directory: RunDirectory,
    progress: Callable[[str], OnProgress | None] = lambda name: None,
    on_point: Callable[[int, int, SweepPoint], None] = lambda number, total, point: None,
    on_judged: Callable[[JudgedRun], None] = lambda judged: None,
    on_result: Callable[[PointResult, ComparedPoint], None] = lambda made, tested: None,
    stop: StopFlag | None = None,
) -> Comparison:
    """Start, test and end the service of each point. ``progress`` gives what is told how far a run is, by the run's
    name. Raises ConfigError where a search has no limits."""
    limits_of(goal)
    if options.per_point is PointKind.SEARCH:
        check(goal, plan)
    tested: dict[str, ComparedPoint] = {}

    def run_point(url: str, model: str, point: SweepPoint) -> list[LoadRun]:
        there, one = plan.at(url, model), tested.setdefault(point.name, ComparedPoint())
        common: dict[str, Any] = {"on_record": directory.append, "stop": stop, "on_progress": progress(point.name)}
        if options.per_point is PointKind.SEARCH:
            one.sought = seek(
                there, goal, search, name=point.name, point=point.coordinates, on_judged=on_judged, **common
            )
            one.judged = one.sought.judged
        else:
            one.warmed = warmed_for_a_run(there, name=point.name, on_progress=progress(point.name), stop=stop)
            made = execute(there, name=point.name, point=point.coordinates, **common)
            one.judged = [judge(made, goal)]
            on_judged(one.judged[0])
        return [judged.run for judged in one.judged]

    result = sweep(
        options,
        run_point,
        on_point=on_point,
        on_result=lambda made: on_result(made, tested.setdefault(made.point.name, ComparedPoint())),
        is_stopped=lambda: stop is not None and stop.is_set(),
    )
    return Comparison(result, tested)


def conclude_sweep(found: Comparison, options: SweepOptions, directory: RunDirectory, out: OutOptions) -> LoadResult:
    """As :func:`kvxfer.load.conclude.conclude`, with the verdicts on the points."""
    judged = [one for made in found.result.points for one in found.tested[made.point.name].judged]
    counts_runs = options.per_point is PointKind.RUN
    extra = found.to_json()
    return conclude("sweep", judged, directory, out, overall=found.verdicts(), extra=extra, counts_runs=counts_runs)
