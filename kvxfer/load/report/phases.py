"""The figure of where the time went: shares of the phases by prompt length.

Decides how requests are grouped. What a phase is, and whether it is known, ``join`` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvxfer.load.intervals import Percentiles
from kvxfer.load.join import PHASES, RequestPhases, phases_of
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.report.columns import RunColumns
from kvxfer.load.report.figure import ReportFigure, axis, left_out, panels, rounded

COLOUR_OF = {
    "late": "@pink",
    "queue": "@orange",
    "prefill": "@blue",
    "transfer": "@purple",
    "gap": "@red",
    "decode": "@green",
    "unexplained": "@grey",
}
BINS_MAX = 8
SAMPLE_MAX = 20_000
"""Requests whose phases are looked at."""


Joined = tuple[MeasuredRequest, RequestPhases]


def shares(columns: RunColumns) -> ReportFigure:
    key, title = "phases", "Where the time went"
    every = max(1, columns.count // SAMPLE_MAX)
    whole = [one for one in columns.records[::every] if one.is_good]
    found = [(one, phases) for one in whole if (phases := phases_of(one)) is not None]
    if not found:
        return left_out(key, title, "no answer carried a router's or an engine's account of its phases")
    figure = ReportFigure(
        key,
        f"{title}: {columns.run.name}",
        "The share of each phase by length of the prompt: left of the time to the first token, right of the time to "
        "the last. Late: the generator's own; queue: before prefill began; transfer: what of it prefill does not hide; "
        "gap: from there to the first token; unexplained: what no account tells.",
        height=440,
    )
    groups = _by_length(found)
    labels = [f"{label}<br>{len(members):,} requests" for label, members in groups]
    for at, is_first in enumerate((True, False)):
        number = "" if at == 0 else "2"
        means = {
            phase: [float(np.mean([_length(one, phase, is_first) for _, one in members])) for _, members in groups]
            for phase in PHASES
        }
        totals = [sum(column) or 1.0 for column in zip(*means.values(), strict=True)]
        for phase in PHASES:
            figure.traces.append(
                {
                    **{"type": "bar", "name": phase, "legendgroup": phase, "showlegend": not is_first},
                    **{"y": labels, "orientation": "h", "xaxis": f"x{number}", "yaxis": f"y{number}"},
                    "x": rounded(100.0 * mean / total for mean, total in zip(means[phase], totals, strict=True)),
                    "customdata": rounded(mean * 1e3 for mean in means[phase]),
                    "marker": {"color": COLOUR_OF[phase]},
                    "hovertemplate": f"{phase}: %{{x:.1f}} %, %{{customdata:.4g}} ms on average",
                }
            )
    left, right = panels(2, 0.04)
    unexplained = Percentiles.of(phases.unexplained_s for _, phases in found)
    figure.notes.append(
        f"Phases are known of {len(found):,} of {len(whole):,} whole answers. Unexplained: "
        f"{(unexplained.mean or 0.0) * 1e3:.2f} ms on average, p99 {(unexplained.p99 or 0.0) * 1e3:.2f} ms."
    )
    if every > 1:
        figure.notes.append(f"Means of one request in {every}.")
    figure.layout = {
        "barmode": "stack",
        "xaxis": axis("% of the time to the first token", range=[0, 100], domain=left),
        "xaxis2": axis("% of the time to the last token", range=[0, 100], domain=right, anchor="y2"),
        "yaxis": axis("prompt tokens", type="category", autorange="reversed"),
        "yaxis2": axis("", type="category", autorange="reversed", anchor="x2", showticklabels=False),
    }
    return figure


def _length(phases: RequestPhases, phase: str, is_first: bool) -> float:
    """Of a phase, in seconds; ``is_first``: only what of it lies before the first token."""
    if is_first and phase == "decode":
        return 0.0
    if is_first and phase == "unexplained":
        return phases.first_unexplained_s
    return float(getattr(phases, f"{phase}_s"))


def _by_length(found: Sequence[Joined]) -> list[tuple[str, list[Joined]]]:
    """Groups of about equal numbers by prompt length, with the lengths in their labels."""
    lengths = np.array([record.prompt_tokens for record, _ in found])
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, BINS_MAX + 1)).astype(np.int64))
    places = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, max(len(edges) - 2, 0))
    groups = []
    for at in np.unique(places):
        members = [one for one, place in zip(found, places, strict=True) if place == at]
        low, high = min(one.prompt_tokens for one, _ in members), max(one.prompt_tokens for one, _ in members)
        groups.append((f"{low:,}" if low == high else f"{low:,} to {high:,}", members))
    return groups
