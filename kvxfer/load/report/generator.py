"""The figure of the generator itself: how late it sent, and whether it sent what was due."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvxfer.load.report.columns import RunColumns, fewest_of, percentile_of, width_for, windows
from kvxfer.load.report.figure import ReportFigure, axis, left_out, rounded
from kvxfer.load.verdicts import lateness_limit_s

WINDOW_S = 10.0
"""In which what was sent is compared with what was due; several of them where a run is long."""
WINDOWS_MAX = 1_000


def lateness(columns: RunColumns) -> ReportFigure:
    key, title = "lateness", "The generator"
    if not np.isfinite(columns.lateness).any():
        return left_out(key, title, "no time of sending is known")
    width = width_for(columns)
    parts = windows(columns, width)
    begin, end = columns.span_s
    block = WINDOW_S * max(1, math.ceil((end - begin) / WINDOW_S / WINDOWS_MAX))
    figure = ReportFigure(
        key,
        f"{title}: {columns.run.name}",
        f"How long after it was due each request was begun, and how much of what was due in each {block:g} s "
        "was sent in them. "
        "The fault is the generator's where the upper lines rise; the load was another than asked for where the lower "
        "one leaves 100 %.",
        height=460,
    )
    fewest = fewest_of(parts)
    middles = rounded(begin + width / 2 for begin, _ in parts)
    for name, colour, share in (("p50", "@blue", 0.5), ("p99", "@orange", 0.99), ("longest", "@red", 1.0)):
        line = [max(percentile_of(columns.lateness[where], share, fewest), 0.0) * 1e3 for _, where in parts]
        figure.traces.append(
            {
                **{"type": "scatter", "mode": "lines+markers", "name": name, "x": middles, "y": rounded(line)},
                **{"line": {"color": colour}, "marker": {"color": colour, "size": 5}},
                "hovertemplate": f"{name} %{{y}} ms at %{{x}} s",
            }
        )
    tens = windows(columns, block)
    edges = [begin for begin, _ in tens] + [tens[-1][0] + block]
    sent = np.histogram(columns.sent[np.isfinite(columns.sent)], bins=np.array(edges))[0]
    due = np.array([where.stop - where.start for _, where in tens])
    delivered = [100.0 * one / of if of else np.nan for one, of in zip(sent, due, strict=True)]
    figure.traces.append(
        {
            **{"type": "scatter", "mode": "lines+markers", "name": "sent of due", "yaxis": "y2"},
            **{"x": rounded(edge + block / 2 for edge in edges[:-1]), "y": rounded(delivered)},
            **{"customdata": [[int(one), int(of)] for one, of in zip(sent, due, strict=True)]},
            **{"line": {"color": "@green"}, "marker": {"color": "@green", "size": 5}},
            "hovertemplate": "%{customdata[0]} sent of %{customdata[1]} due",
        }
    )
    farthest = max((abs(one - 100.0) for one in delivered if np.isfinite(one)), default=0.0)
    reach = max(2.0, 1.2 * farthest)
    layout: dict[str, Any] = {
        "yaxis": axis("lateness, ms", domain=[0.45, 1.0], rangemode="tozero"),
        "yaxis2": axis("sent of due, %", domain=[0.0, 0.35], range=[max(0.0, 100.0 - reach), 100.0 + reach]),
        "xaxis": axis("due, seconds after the beginning", anchor="y2"),
        "shapes": [],
        "annotations": [],
    }
    most = lateness_limit_s(columns.records) * 1e3
    layout["shapes"].append(
        {
            **{"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": most, "y1": most},
            "line": {"color": "@grey", "dash": "dot"},
        }
    )
    layout["annotations"].append(
        {
            **{"text": f"p99 of the run may be {most:.3g} ms", "x": 1, "xref": "x domain", "y": most},
            **{"xanchor": "right", "yanchor": "bottom", "showarrow": False, "bgcolor": "@panel"},
        }
    )
    figure.layout = layout
    return figure
