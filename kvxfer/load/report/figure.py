"""One figure of the report: its traces and layout as plotly.js takes them, and the sentence that says what to read.

Decides how numbers and foreign texts become members of a figure. Colours are names (``@blue``) that the page resolves
for its light or dark scheme. It must never know what a figure is of.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

POINTS_MAX = 5_000
"""Of one trace."""
COLOURS = ("@blue", "@orange", "@green", "@purple", "@red", "@teal", "@pink", "@grey")
RUNS_MAX = 8
"""Drawn beside each other, one colour each."""

Numbers = npt.NDArray[np.float64]


@dataclasses.dataclass
class ReportFigure:
    """What ``Plotly.newPlot`` takes, and the words around it; or why it is left out."""

    key: str
    title: str
    sentence: str
    traces: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    height: int = 380
    notes: list[str] = dataclasses.field(default_factory=list)
    missing: str = ""
    """Why there is nothing to draw; empty: it is drawn."""

    def spec(self) -> dict[str, Any]:
        """What the page's script is given."""
        return {"key": self.key, "traces": self.traces, "layout": {"height": self.height, **self.layout}}


def left_out(key: str, title: str, why: str) -> ReportFigure:
    return ReportFigure(key, title, "", missing=why)


def escaped(text: object, most: int = 80) -> str:
    """A foreign text for a label: plotly.js reads some tags there, and this has none."""
    said = str(text)
    return html.escape(said if len(said) <= most else said[: most - 1] + "\u2026", quote=False)


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """With so many significant digits; what is not finite is a gap."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in map(float, values)]


def thinned(count: int, most: int = POINTS_MAX) -> npt.NDArray[np.int64]:
    """Which of ``count`` ordered points are drawn: evenly spread, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **more}


def log_axis(title: str, values: Numbers, **more: Any) -> dict[str, Any]:
    """A logarithmic axis over these values, with round ticks: the more, the fewer decades it has."""
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.1, 1.0)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 2, 5) if decades < 3 else (1, 5) if decades < 5 else (1,)
    ticks = [step * 10.0**power for power in range(first - 1, last + 1) for step in steps]
    near = [math.log10(low) - 0.05, math.log10(high) + 0.05]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{tick:,.4g}" for tick in ticks], range=near, **more)


def unit_of(seconds: Numbers) -> tuple[str, float]:
    """(unit, how many in a second) in which these times are easy to read."""
    finite = seconds[np.isfinite(seconds)]
    middle = float(np.median(finite)) if finite.size else 1.0
    return ("ms", 1e3) if middle < 1.0 else ("s", 1.0)


def panels(count: int, gap: float = 0.09) -> list[list[float]]:
    """Domains of so many panels beside or above each other, of which the first is the left or the upper one."""
    width = (1.0 - gap * (count - 1)) / count
    return [[at * (width + gap), min(1.0, at * (width + gap) + width)] for at in range(count)]


def line_at(
    value: float, text: str, *, xref: str = "x", yref: str = "y domain"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A dotted vertical line with its words: a shape and an annotation."""
    shape = {
        "type": "line",
        **{"x0": value, "x1": value, "xref": xref, "y0": 0, "y1": 1, "yref": yref},
        "line": {"color": "@red", "dash": "dot", "width": 1.5},
    }
    return shape, {
        "text": text,
        "x": value,
        "xref": xref,
        "y": 1,
        "yref": yref,
        "yanchor": "bottom",
        "showarrow": False,
    }
