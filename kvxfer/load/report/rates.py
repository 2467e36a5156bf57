"""The figures that compare the runs of a search or a sweep: by rate, by split of workers, by speed for one and for all.

Decides which runs are one line, and works on the summaries of ``run.json`` alone: it counts no request again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvxfer.load.report.figure import COLOURS, RUNS_MAX, ReportFigure, axis, escaped, left_out, line_at, rounded
from kvxfer.load.run import LoadRun


@dataclasses.dataclass(frozen=True)
class SummarizedRun:
    """A run's coordinates, and its summary as JSON has it."""

    run: LoadRun
    summary: Mapping[str, Any]

    @property
    def rate(self) -> float | None:
        return _number(self.run.offered_per_s) or _number(self.run.point.get("rate")) or self.number("offered_per_s")

    @property
    def split(self) -> tuple[int, int] | None:
        """(prefill workers, decode workers)."""
        p, d = _number(self.run.point.get("prefill")), _number(self.run.point.get("decode"))
        return None if p is None or d is None else (int(p), int(d))

    @property
    def label(self) -> str:
        """Its coordinates besides the rate: what it shares with the runs on its line."""
        parts = [f"{self.split[0]}P{self.split[1]}D"] if self.split else []
        parts += [str(value) for name in ("policy", "lane") if (value := self.run.point.get(name))]
        return escaped(" ".join(parts), 40)

    @property
    def is_attained(self) -> bool:
        return bool(self.summary.get("is_attained"))

    @property
    def worth(self) -> tuple[bool, float]:
        """The better of two runs has the larger one: it met its target, or its goodput is higher."""
        return self.is_attained, self.number("goodput_per_s") or 0.0

    def number(self, name: str) -> float | None:
        return _number(self.summary.get(name))

    def attainment(self, name: str) -> float:
        """``share``, ``low`` or ``high``, in percent; nan where it is not known."""
        values = self.summary.get("attainment")
        value = _number(values.get(name)) if isinstance(values, Mapping) else None
        return math.nan if value is None else 100.0 * value


def by_rate(runs: Sequence[SummarizedRun], crossing: Mapping[str, Any] | None = None) -> ReportFigure:
    """Attainment with its interval, and goodput, against the rate. ``crossing``: ``rate``, ``low`` and ``high`` where
    a search found them."""
    key, title = "rates", "What it holds, by rate"
    known = [run for run in runs if run.rate is not None and math.isfinite(run.attainment("share"))]
    if len({run.rate for run in known}) < 2:
        return left_out(key, title, "it takes runs at two rates or more: a search, or a sweep over rates")
    figure = ReportFigure(
        key,
        title,
        "Above: the share of the requests due that met all limits, with its 95 % interval; where it falls below the "
        "target, the deployment no longer holds the rate. Below: the requests that met all limits, per second, beside "
        "the dotted line of all that were due.",
        height=540,
    )
    lines = _lines(known)
    for colour, (label, members) in zip(COLOURS, list(lines.items())[:RUNS_MAX], strict=False):
        rates = [run.rate or 0.0 for run in members]
        shares = [run.attainment("share") for run in members]
        name = label or "runs"
        base = {"type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": name, "x": rounded(rates)}
        look = {"line": {"color": colour}, "marker": {"color": colour, "size": 8}}
        figure.traces.append(
            {
                **base,
                **look,
                "y": rounded(shares),
                "error_y": {
                    **{"type": "data", "symmetric": False, "color": colour, "thickness": 1.2},
                    "array": rounded(run.attainment("high") - run.attainment("share") for run in members),
                    "arrayminus": rounded(run.attainment("share") - run.attainment("low") for run in members),
                },
                "showlegend": len(lines) > 1,
                "hovertemplate": "%{y:.1f} % at %{x}/s",
            }
        )
        goodput = [math.nan if (value := run.number("goodput_per_s")) is None else value for run in members]
        figure.traces.append(
            {
                **base,
                **look,
                "y": rounded(goodput),
                "yaxis": "y2",
                "showlegend": False,
                "hovertemplate": "%{y} good/s at %{x}/s",
            }
        )
    most = max(run.rate or 0.0 for run in known)
    figure.traces.append(
        {
            **{"type": "scatter", "mode": "lines", "name": "due", "x": [0, most], "y": [0, most], "yaxis": "y2"},
            **{"line": {"color": "@grey", "dash": "dot"}, "hoverinfo": "skip", "showlegend": False},
        }
    )
    target = next((value for run in known if (value := run.number("attainment_target")) is not None), None)
    layout: dict[str, Any] = {
        "xaxis": axis("requests due per second", anchor="y2", rangemode="tozero"),
        "yaxis": axis("met all limits, %", domain=[0.54, 1.0], range=[-3, 106]),
        "yaxis2": axis("goodput, requests/s", domain=[0.0, 0.46], rangemode="tozero"),
        "shapes": [],
        "annotations": [],
    }
    if target is not None:
        layout["shapes"].append(
            {
                **{"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": 100 * target, "y1": 100 * target},
                "line": {"color": "@grey", "dash": "dot"},
            }
        )
        layout["annotations"].append(
            {
                **{"text": f"target {100 * target:g} %", "x": 0, "xref": "x domain", "xanchor": "left"},
                **{"y": 100 * target, "yanchor": "top", "showarrow": False, "bgcolor": "@panel"},
            }
        )
    rate = _number((crossing or {}).get("rate"))
    if crossing is not None and rate is not None:
        shape, words = line_at(rate, f"crosses at {rate:.4g}/s", yref="paper")
        layout["shapes"].append(shape)
        layout["annotations"].append(words)
        low, high = _number(crossing.get("low")), _number(crossing.get("high"))
        if low is not None and high is not None:
            layout["shapes"].append(
                {
                    **{"type": "rect", "x0": low, "x1": high, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"},
                    **{"fillcolor": "@red", "opacity": 0.12, "line": {"width": 0}},
                }
            )
    if len(lines) > RUNS_MAX:
        figure.notes.append(f"{RUNS_MAX} of {len(lines)} lines are drawn.")
    figure.layout = layout
    return figure


def split_map(runs: Sequence[SummarizedRun]) -> ReportFigure:
    """The best goodput of each split P:D, as a map."""
    key, title = "splits", "Goodput by split of workers"
    best: dict[tuple[int, int], SummarizedRun] = {}
    for run in runs:
        if run.split is not None and run.number("goodput_per_s") is not None:
            there = best.get(run.split)
            if there is None or run.worth > there.worth:
                best[run.split] = run
    if len(best) < 2:
        return left_out(key, title, "it takes runs with two splits or more: a sweep over P:D")
    ps, ds = sorted({p for p, _ in best}), sorted({d for _, d in best})
    figure = ReportFigure(
        key,
        title,
        "The requests per second that met all limits, at the best rate that each split held, and how many that is for "
        "each GPU or worker. In brackets: it held no rate that was tried. Along a diagonal the same number of workers "
        "is split differently.",
        height=130 + 70 * len(ps),
    )
    texts, values = [], []
    for p in ps:
        row = [best.get((p, d)) for d in ds]
        values.append(rounded((math.nan if run is None else run.worth[1] for run in row), 4))
        texts.append([_cell(run) for run in row])
    figure.traces.append(
        {
            **{"type": "heatmap", "x": [f"{d} decode" for d in ds], "y": [f"{p} prefill" for p in ps], "z": values},
            **{
                "text": texts,
                "texttemplate": "%{text}",
                "textfont": {"color": "@text", "size": 14},
                "colorscale": "@heat",
                "xgap": 3,
                "ygap": 3,
            },
            **{"colorbar": {"title": {"text": "good/s"}}, "hovertemplate": "%{y}, %{x}: %{z} good/s<extra></extra>"},
        }
    )
    figure.layout = {
        "xaxis": axis("", type="category", side="bottom", showgrid=False),
        "yaxis": axis("", type="category", showgrid=False),
    }
    return figure


def pareto(runs: Sequence[SummarizedRun]) -> ReportFigure:
    """Speed for one user against throughput of one GPU; the line joins what no other run beats in both."""
    key, title = "pareto", "Speed for one user against throughput of one GPU"
    found = []
    for run in runs:
        x, y = run.number("tokens_per_s_per_user"), run.number("output_tokens_per_s_per_device")
        if x is not None and y is not None:
            found.append((x, y, run))
    if len(found) < 2:
        why = "it takes two runs or more" if found else "no run says how many GPUs took part and how fast tokens came"
        return left_out(key, title, why)
    figure = ReportFigure(
        key,
        title,
        "Each point is a run: to the right, text comes faster for each user; upward, a GPU (or worker) makes more of "
        "it. Hollow: it did not meet its target. The line joins the runs that did, and that no other such run beats in "
        "both.",
        height=440,
    )
    edge = _frontier([(x, y) for x, y, run in found if run.is_attained])
    figure.traces.append(
        {
            **{"type": "scatter", "mode": "lines", "name": "unbeaten", "hoverinfo": "skip"},
            **{"x": rounded(x for x, _ in edge), "y": rounded(y for _, y in edge)},
            **{"line": {"color": "@grey", "dash": "dot"}},
        }
    )
    groups: dict[str, list[tuple[float, float, SummarizedRun]]] = {}
    for one in found:
        groups.setdefault(one[2].label or "runs", []).append(one)
    for at, (label, members) in enumerate(groups.items()):
        figure.traces.append(
            {
                **{"type": "scatter", "mode": "markers", "name": label},
                **{"x": rounded(x for x, _, _ in members), "y": rounded(y for _, y, _ in members)},
                "marker": {
                    **{"color": COLOURS[at % len(COLOURS)], "size": 11},
                    "symbol": [_symbol(at, run.is_attained) for _, _, run in members],
                },
                "text": [escaped(run.run.name, 40) for _, _, run in members],
                "hovertemplate": "%{text}: %{x} tokens/s a user, %{y} tokens/s a GPU",
            }
        )
    figure.layout = {
        "xaxis": axis("tokens/s for one user (1 / median TPOT)", rangemode="tozero"),
        "yaxis": axis("output tokens/s for each GPU", rangemode="tozero"),
    }
    return figure


def _lines(runs: Iterable[SummarizedRun]) -> dict[str, list[SummarizedRun]]:
    lines: dict[str, list[SummarizedRun]] = {}
    for run in sorted(runs, key=lambda run: run.rate or 0.0):
        lines.setdefault(run.label, []).append(run)
    return lines


def _cell(run: SummarizedRun | None) -> str:
    """Goodput, and beneath it that of one GPU or worker."""
    if run is None:
        return ""
    goodput = f"{run.worth[1]:.3g}"
    each = run.number("goodput_per_device_per_s")
    return (goodput if run.is_attained else f"({goodput})") + ("" if each is None else f"<br>{each:.3g} each")


def _symbol(at: int, is_attained: bool) -> str:
    """Another shape for every round of colours; hollow where the target was missed."""
    shapes = ("circle", "square", "diamond", "triangle-up")
    return shapes[at // len(COLOURS) % len(shapes)] + ("" if is_attained else "-open")


def _frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other is at least as far to the right and as high as, from the left."""
    edge: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not edge or y > edge[-1][1]:
            edge.append((x, y))
    return edge[::-1]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
