"""The figures of how long requests took: shares of all requests by time, and percentiles while the run went on.

Decides how failures are drawn: a curve that ends below 100 %, a percentile that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer.load.report.columns import RunColumns, fewest_of, percentile_of, width_for, windows
from kvxfer.load.report.figure import (
    COLOURS,
    Numbers,
    ReportFigure,
    axis,
    escaped,
    left_out,
    line_at,
    log_axis,
    panels,
    rounded,
    thinned,
    unit_of,
)

CURVE_POINTS = 1_000
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
PERCENTILES = {0.5: "p50", 0.9: "p90", 0.99: "p99"}


def curves(runs: Sequence[RunColumns], all_runs: int, limits: Mapping[str, float]) -> ReportFigure:
    """CDFs of TTFT, TPOT and E2E of these runs, of ``all_runs``. ``limits``: seconds by metric."""
    key, title = "curves", "How long requests took"
    drawn = [run for run in runs if np.isfinite(run.ttft).any()]
    if not drawn:
        return left_out(key, title, "no counted request was answered")
    figure = ReportFigure(
        key,
        title,
        "How large a share of the requests due had its first token (TTFT), its tokens at that pace (TPOT) or its whole "
        "answer (E2E) within a time. A failed request never had: it lowers the end of its curve.",
        height=420,
    )
    layout: dict[str, Any] = {"shapes": [], "annotations": []}
    is_thinned = False
    for at, (metric, domain) in enumerate(zip(METRICS, panels(3, 0.06), strict=True)):
        number = "" if at == 0 else str(at + 1)
        every = np.concatenate([getattr(run, metric) for run in drawn])
        unit, scale = unit_of(every)
        for colour, run in zip(COLOURS, drawn, strict=False):
            values = getattr(run, metric)
            known = np.sort(values[~np.isnan(values)])
            finite = known[np.isfinite(known)]
            if not finite.size:
                continue
            kept = thinned(finite.size, CURVE_POINTS)
            is_thinned |= kept.size < finite.size
            name = escaped(run.run.name, 40)
            figure.traces.append(
                {
                    **{"type": "scatter", "mode": "lines", "name": name, "legendgroup": name, "showlegend": at == 0},
                    "x": rounded(finite[kept] * scale),
                    "y": rounded(100.0 * (kept + 1) / known.size),
                    **{"xaxis": f"x{number}", "yaxis": f"y{number}", "line": {"color": colour, "shape": "hv"}},
                    "hovertemplate": f"%{{y:.2f}} % within %{{x}} {unit}",
                }
            )
        reach = np.append(every, limits.get(metric, np.nan)) * scale
        layout[f"xaxis{number}"] = log_axis(f"{METRICS[metric]}, {unit}", reach, domain=domain, anchor=f"y{number}")
        layout[f"yaxis{number}"] = axis(
            "share of requests due, %" if at == 0 else "", range=[0, 103], anchor=f"x{number}"
        )
        if metric in limits:
            shape, words = line_at(
                limits[metric] * scale,
                f"limit {limits[metric] * scale:g} {unit}",
                xref=f"x{number}",
                yref=f"y{number} domain",
            )
            layout["shapes"].append(shape)
            layout["annotations"].append({**words, "x": float(np.log10(limits[metric] * scale))})
    if all_runs > len(drawn):
        figure.notes.append(f"{len(drawn)} of {all_runs} runs are drawn.")
    if is_thinned:
        figure.notes.append(f"Each curve has at most {CURVE_POINTS:,} points of its requests.")
    figure.layout = layout
    return figure


def over_time(columns: RunColumns) -> ReportFigure:
    """Percentiles of TTFT and TPOT, and what failed, in windows by due time."""
    key, title = "over-time", "While it ran"
    if not np.isfinite(columns.ttft).any():
        return left_out(key, title, "no counted request was answered")
    width = width_for(columns)
    parts = windows(columns, width)
    fewest = fewest_of(parts)
    middles = rounded(begin + width / 2 for begin, _ in parts)
    figure = ReportFigure(
        key,
        f"{title}: {columns.run.name}",
        f"Percentiles of the requests that were due in each {width:g} s. Flat lines: the load was held. Rising ones: a "
        "backlog grew. Where a line breaks off, so many requests failed that the percentile was never reached.",
        height=560,
    )
    layout: dict[str, Any] = {}
    heights = [[0.68, 1.0], [0.30, 0.62], [0.0, 0.22]]
    for at, metric in enumerate(("ttft", "tpot")):
        number = "" if at == 0 else str(at + 1)
        values: Numbers = getattr(columns, metric)
        unit, scale = unit_of(values)
        for colour, (share, name) in zip(("@blue", "@orange", "@red"), PERCENTILES.items(), strict=True):
            line = [percentile_of(values[where], share, fewest) * scale for _, where in parts]
            figure.traces.append(
                {
                    **{"type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": name},
                    **{"x": middles, "y": rounded(line), "showlegend": at == 0, "yaxis": f"y{number}"},
                    **{"line": {"color": colour}, "marker": {"color": colour, "size": 5}, "connectgaps": False},
                    "hovertemplate": f"{name} %{{y}} {unit} at %{{x}} s",
                }
            )
        layout[f"yaxis{number}"] = axis(f"{METRICS[metric]}, {unit}", domain=heights[at], rangemode="tozero")
    good = [int(columns.is_good[where].sum()) for _, where in parts]
    failed = [where.stop - where.start - one for (_, where), one in zip(parts, good, strict=True)]
    for name, colour, counts in (("answered", "@grey", good), ("failed", "@pink", failed)):
        figure.traces.append(
            {
                **{"type": "bar", "name": name, "x": middles, "y": counts, "yaxis": "y3", "width": width * 0.9},
                **{"marker": {"color": colour}, "hovertemplate": f"%{{y}} {name}"},
            }
        )
    layout["yaxis3"] = axis("requests", domain=heights[2], rangemode="tozero")
    layout["xaxis"] = axis("due, seconds after the beginning", anchor="y3")
    layout["barmode"] = "stack"
    figure.layout = layout
    return figure
