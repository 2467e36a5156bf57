"""Writes ``report.html`` and ``timeline.json``: chooses which figures there are, and of which run those of one run are.

It must never know how a figure is drawn, nor judge anything: verdicts and summaries are those of ``run.json``.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.load.artefacts import REPORT_FILE, TIMELINE_FILE, StoredLoadTest, write_whole
from kvxfer.load.limits import LatencyLimits
from kvxfer.load.report import distributions, generator, phases, rates, timeline
from kvxfer.load.report.columns import RunColumns, columns_of
from kvxfer.load.report.figure import RUNS_MAX, ReportFigure, thinned
from kvxfer.load.report.page import page_of
from kvxfer.load.report.rates import SummarizedRun
from kvxfer.load.report.trace_events import trace_events


def write_report(path: str | os.PathLike[str], stored: StoredLoadTest) -> pathlib.Path:
    """Write the page of a load test into its directory, and ``timeline.json`` of the run that it shows, each whole or
    not at all; returns where the page is.

    ``stored``: what ``artefacts.read`` or ``RunDirectory.finish`` gave. Raises DiskFullError.
    """
    file = pathlib.Path(path) / REPORT_FILE
    summarized = [SummarizedRun(*pair) for pair in zip(stored.runs, stored.summaries, strict=True)]
    runs = [columns_of(run) for run in stored.runs]
    write_whole(file, page_of(stored, figures_of(summarized, runs, stored)))
    shown = shown_run(summarized, runs)
    if shown is not None and (events := trace_events(shown)):
        write_whole(file.with_name(TIMELINE_FILE), events)
    return file


def figures_of(
    summarized: Sequence[SummarizedRun], runs: Sequence[RunColumns], stored: StoredLoadTest
) -> list[ReportFigure]:
    """All figures in the order of the page; those without data say why."""
    crossing = stored.document.get("extra", {}).get("crossing")
    found = [rates.by_rate(summarized, crossing if isinstance(crossing, Mapping) else None)]
    found.append(rates.split_map(summarized))
    found.append(rates.pareto(summarized))
    found.append(distributions.curves(compared(summarized, runs), len(runs), limits_of(stored.summaries)))
    shown = shown_run(summarized, runs)
    if shown is not None:
        found.append(distributions.over_time(shown))
        found.append(phases.shares(shown))
        found.append(timeline.timeline(shown))
        found.append(generator.lateness(shown))
    return found


def limits_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by metric, of the first run that has limits."""
    texts = [text for summary in summaries if (text := summary.get("limits"))]
    if not texts:
        return {}
    limits = LatencyLimits.parse(texts[0])
    values = {"ttft": limits.ttft_s, "tpot": limits.tpot_s, "e2e": limits.e2e_s}
    return {name: value for name, value in values.items() if value is not None}


def shown_run(summarized: Sequence[SummarizedRun], runs: Sequence[RunColumns]) -> RunColumns | None:
    """The run that the figures of one run show: of those that met their target, that with the best goodput, of a
    device where it is known; else the last that has requests."""
    known = [at for at, run in enumerate(runs) if run.count]
    if not known:
        return runs[-1] if runs else None
    held = [at for at in known if summarized[at].is_attained]
    each = [summarized[at].number("goodput_per_device_per_s") for at in held]
    name = "goodput_per_s" if None in each else "goodput_per_device_per_s"
    best = max(held, key=lambda at: summarized[at].number(name) or 0.0) if held else known[-1]
    return runs[best]


def compared(summarized: Sequence[SummarizedRun], runs: Sequence[RunColumns]) -> list[RunColumns]:
    """The runs whose curves stand beside each other, by rate, at most RUNS_MAX: of more, the best of each split, policy
    and lane."""
    order = sorted(range(len(runs)), key=lambda at: summarized[at].rate or 0.0)
    if len(runs) > RUNS_MAX:
        best: dict[str, int] = {}
        for at in order:
            there = best.get(summarized[at].label)
            if there is None or summarized[at].worth > summarized[there].worth:
                best[summarized[at].label] = at
        one_of_each = set(best.values())
        if len(one_of_each) > 1:
            order = [at for at in order if at in one_of_each]
        order = [order[at] for at in thinned(len(order), RUNS_MAX)]
    return [runs[at] for at in order]
