"""What a person sees of a load test: progress while it runs, tables and sentences at its end. Decides looks only."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer.cli.console import ProgressBar, duration, table
from kvxfer.load.sweep_points import SweepPoint

if TYPE_CHECKING:
    from kvxfer.load.compare import Comparison
    from kvxfer.load.conclude import JudgedRun, LoadResult
    from kvxfer.load.drive.start import DriveProgress
    from kvxfer.load.intervals import Percentiles
    from kvxfer.load.judge import RunSummary
    from kvxfer.load.search import SearchProbe
    from kvxfer.load.sweep import PointResult

TIMES = (
    ("TTFT", "ttft"),
    ("since sent", "ttft_since_sent"),
    ("TPOT", "tpot"),
    ("E2E", "e2e"),
    ("E2E/token", "normalized_e2e"),
    ("longest gap", "gap"),
    ("lateness", "lateness"),
)


def told(progress: ProgressBar, stage: str) -> Callable[[DriveProgress], None]:
    """Draws how far a run is."""

    def tell(now: DriveProgress) -> None:
        if now.elapsed_s > 0 or now.ended:
            note = f"{now.elapsed_s:.0f} s, {now.sent} of {now.planned} sent, {now.in_flight} in flight"
            progress(stage, now.ended, now.planned, note + (f", {now.failed} failed" if now.failed else ""))
        else:
            progress("making bodies", 0, 0)

    return tell


def time_of(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return duration(seconds) if math.isfinite(seconds) else "failed"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def of_times(percentiles: Percentiles) -> list[str]:
    return [time_of(percentiles.p50), time_of(percentiles.p90), time_of(percentiles.p99)]


def run_table(summary: RunSummary) -> str:
    """One run: counts, rates, percentiles of all requests due, attainment and goodput."""
    failed = sum(summary.failed.values())
    counts = [
        ["requests", f"{summary.due} due, {summary.sent} sent, {summary.good} good, {failed} failed"],
        ["rate", f"{summary.offered_per_s:.2f}/s due, {summary.answered_per_s:.2f}/s answered"],
        ["answers", f"{summary.output_tokens_per_s:.0f} tokens/s"],
    ]
    if not summary.due:
        return table(counts)
    rows = [["", "p50", "p90", "p99"]]
    rows += [[title, *of_times(summary.of_all[name])] for title, name in TIMES if summary.of_all[name].count]
    interval = summary.attainment
    limits = f"within {summary.limits} (ms)" if summary.limits else "answered whole"
    ends = [
        [
            "attainment",
            f"{share(interval.share)} ({share(interval.low)} to {share(interval.high)} with 95 %) {limits}; "
            f"asked for: {summary.attainment_target * 100:g}%",
        ],
        ["goodput", f"{summary.goodput_per_s:.2f} requests/s{_each(summary)}"],
    ]
    return "\n\n".join(table(one) for one in (counts, rows, _phases(summary), ends) if one)


def _phases(summary: RunSummary) -> list[list[str]]:
    """Where the time went, of the answers whose phases are known. Empty: there is no answer."""
    if not summary.joined.total:
        return []
    if not summary.phases:
        none = f"known of none of {summary.joined.total} whole answers: no router's or engine's account came with them"
        return [["phases", none]]
    known = f"of {summary.joined.good} of {summary.joined.total} whole answers"
    rows = [["phase", "mean", "p50", "p99", known]]
    return rows + [
        [name, *(time_of(value) for value in (one.mean, one.p50, one.p99)), ""] for name, one in summary.phases.items()
    ]


def _each(summary: RunSummary) -> str:
    each = summary.goodput_per_device_per_s
    return "" if each is None else f", {each:.3f} for each worker"


def runs_table(judged: Sequence[JudgedRun]) -> str:
    """Several runs, a row each; times are the 90th percentiles of all requests due."""
    rows = [["", "due/s", "good", "failed", "attainment", "TTFT p90", "TPOT p90", "E2E p90", "goodput/s", "per worker"]]
    for one in judged:
        summary, each = one.summary, one.summary.goodput_per_device_per_s
        times = [time_of(summary.of_all[name].p90) for name in ("ttft", "tpot", "e2e")]
        rows.append(
            [
                summary.name,
                f"{summary.offered_per_s:.2f}",
                f"{summary.good} of {summary.due}",
                str(sum(summary.failed.values())),
                share(summary.attainment.share) + (" +" if summary.is_attained else ""),
                *times,
                f"{summary.goodput_per_s:.2f}",
                "-" if each is None else f"{each:.3f}",
            ]
        )
    return table(rows)


def starts(number: int, total: int, point: SweepPoint) -> None:
    print(f"  {point.name} ({number + 1} of {total}): the service starts", file=sys.stderr, flush=True)


def probe(asked: SearchProbe, most: int) -> None:
    text = f"  probe {asked.number} of at most {most}: {asked.rate:.3g} requests/s, {asked.requests} requests"
    print(text, file=sys.stderr, flush=True)


def judged_run(progress: ProgressBar, judged: JudgedRun) -> None:
    """What came of one run, while others are still to come."""
    progress.close()
    summary = judged.summary
    text = f"attainment {share(summary.attainment.share)}, {summary.goodput_per_s:.2f} good requests/s"
    late = next((f"; {verdict.name}" for verdict in judged.verdicts if verdict.is_failure), "")
    print(f"  {judged.run.name}: {summary.offered_per_s:.2f}/s, {text}{late}", file=sys.stderr, flush=True)


def point(made: PointResult) -> None:
    """What went wrong at one point of a sweep, while the others are still to come."""
    if made.failure:
        print(f"  {made.point.name}: {made.failure}", file=sys.stderr, flush=True)


def comparison(found: Comparison) -> None:
    """The points of a sweep, a row each."""
    rows = [["", "workers", "good requests/s", "per worker", "holds (95 %)"]]
    for made in found.result.points:
        tested = found.tested[made.point.name]
        goodput = tested.goodput_per_s
        sought = tested.sought.result if tested.sought else None
        held = f"{sought.low:.3g} to {sought.high:.3g}/s" if sought and sought.rate is not None else "-"
        each = "-" if goodput is None else f"{goodput / made.point.devices:.3f}"
        rows.append(
            [made.point.name, str(made.point.devices), "-" if goodput is None else f"{goodput:.2f}", each, held]
        )
    print(table(rows) + "\n")
    best = found.best
    if best is not None and len(found.result.points) > 1:
        print(f"The best for each worker is {best.point.name}.\n")


def result(concluded: LoadResult) -> None:
    """The end of a load test, on stdout."""
    judged = concluded.judged
    if len(judged) == 1 and concluded.kind not in ("search", "sweep"):
        print(run_table(judged[0].summary))
    elif judged:
        print(runs_table(judged))
        print("\n  + met its target; times of a request that failed are infinite")
    sentences = [verdict.sentence for verdict in concluded.overall]
    for one in judged:
        said = one.verdicts if concluded.counts_runs else ()
        sentences += [
            f"{one.run.name}: {verdict.sentence}" if len(judged) > 1 else verdict.sentence for verdict in said
        ]
    if sentences or concluded.notes:
        print("\n" + "\n".join([*sentences, *concluded.notes]))
    where = f"the report: {concluded.report}" if concluded.report else "there is no report"
    print(f"\nrun.json, requests.jsonl and summary.csv lie in {concluded.directory}; {where}", flush=True)
