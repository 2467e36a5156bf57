"""The figures of where the time went: shares of the phases by prompt length, and the requests on the workers.

Decides how phases are grouped and packed. What a phase is, and whether it is known, ``join`` says.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from kvxfer.load.join import PHASES, RequestPhases, phases_of
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.report.columns import RunColumns
from kvxfer.load.report.figure import ReportFigure, axis, escaped, left_out, panels, rounded

COLOUR_OF = {
    "late": "@pink",
    "queue": "@orange",
    "prefill": "@blue",
    "transfer": "@purple",
    "gap": "@red",
    "decode": "@green",
    "unexplained": "@grey",
}
WITHOUT_ACCOUNT = {"first token": "@orange", "answer": "@green"}
"""What the client alone knows of the server."""
SHOWN_REQUESTS = 160
"""In the timeline."""
BINS_MAX = 8
SAMPLE_MAX = 20_000
"""Requests whose phases are looked at."""


Joined = tuple[MeasuredRequest, RequestPhases]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A phase of one request on one worker."""

    worker: str
    begin_s: float
    length_s: float
    phase: str
    record: MeasuredRequest


def shares(columns: RunColumns) -> ReportFigure:
    key, title = "phases", "Where the time went"
    every = max(1, columns.count // SAMPLE_MAX)
    found = [
        (one, phases) for one in columns.records[::every] if one.is_good and (phases := phases_of(one)) is not None
    ]
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
    if every > 1:
        figure.notes.append(f"Means of one request in {every}.")
    figure.layout = {
        "barmode": "stack",
        "xaxis": axis("share of the time to the first token, %", range=[0, 100], domain=left),
        "xaxis2": axis("share of the time to the last token, %", range=[0, 100], domain=right, anchor="y2"),
        "yaxis": axis("prompt tokens", type="category", autorange="reversed"),
        "yaxis2": axis("", type="category", autorange="reversed", anchor="x2", showticklabels=False),
    }
    return figure


def timeline(columns: RunColumns) -> ReportFigure:
    """The requests around the slowest first token, on the workers that had them."""
    key, title = "timeline", "Requests on workers"
    shown = _around_the_slowest(columns)
    if not shown:
        return left_out(key, title, "no counted request was answered")
    pieces = [piece for record in shown for piece in _pieces(record)]
    is_joined = any(piece.phase in COLOUR_OF for piece in pieces)
    places, ticks, height = _packed(pieces)
    figure = ReportFigure(
        key,
        f"{title}: {columns.run.name}",
        "Each bar is a phase of one request, in the rows of the worker that had it; many rows at once: it worked on "
        "many requests. "
        + (
            "White between two bars of a row: the worker had nothing of it."
            if is_joined
            else "No account of the phases came: only the client's view of the server is known."
        ),
        height=max(260, min(1100, 120 + 9 * height)),
    )
    for phase, colour in {**COLOUR_OF, **WITHOUT_ACCOUNT}.items():
        where = [at for at, piece in enumerate(pieces) if piece.phase == phase]
        if not where:
            continue
        figure.traces.append(
            {
                **{"type": "bar", "orientation": "h", "name": phase, "marker": {"color": colour, "line": {"width": 0}}},
                "base": rounded((pieces[at].begin_s for at in where), 8),
                "x": rounded(pieces[at].length_s for at in where),
                **{"y": [places[at] for at in where], "width": 0.85},
                "customdata": [
                    [
                        pieces[at].record.number,
                        pieces[at].record.prompt_tokens,
                        float(f"{pieces[at].length_s * 1e3:.4g}"),
                    ]
                    for at in where
                ],
                "hovertemplate": f"{phase} of request %{{customdata[0]}} (%{{customdata[1]}} tokens): "
                "%{customdata[2]} ms<extra></extra>",
            }
        )
    edges = [edge for _, _, edge in ticks[:-1]]
    figure.layout = {
        "barmode": "overlay",
        "bargap": 0,
        "xaxis": axis("seconds after the beginning"),
        "yaxis": axis(
            "",
            **{"tickvals": [middle for _, middle, _ in ticks], "ticktext": [name for name, _, _ in ticks]},
            **{"autorange": "reversed", "showgrid": False, "zeroline": False},
        ),
        "shapes": [
            {
                **{"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": edge, "y1": edge},
                "line": {"color": "@grey", "width": 1},
            }
            for edge in edges
        ],
        "hovermode": "closest",
    }
    if len(shown) < columns.count:
        figure.notes.append(f"{len(shown)} of {columns.count:,} requests are drawn: those due around the slowest one.")
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


def _around_the_slowest(columns: RunColumns) -> list[MeasuredRequest]:
    known = np.where(np.isfinite(columns.ttft), columns.ttft, -1.0)
    if not known.size or known.max() < 0:
        return []
    middle = int(known.argmax())
    begin = max(0, min(middle - SHOWN_REQUESTS // 2, columns.count - SHOWN_REQUESTS))
    return [record for record in columns.records[begin : begin + SHOWN_REQUESTS] if record.first_s is not None]


def _pieces(record: MeasuredRequest) -> Iterator[_Piece]:
    phases = phases_of(record)
    if phases is not None:
        for phase, begin, end, worker in phases.spans():
            if worker is not None:
                yield _Piece(worker, begin, end - begin, phase, record)
    elif record.sent_s is not None and record.first_s is not None and record.last_s is not None:
        first, answer = WITHOUT_ACCOUNT
        yield _Piece("the server", record.sent_s, record.first_s - record.sent_s, first, record)
        yield _Piece("the server", record.first_s, record.last_s - record.first_s, answer, record)


def _packed(pieces: Sequence[_Piece]) -> tuple[list[int], list[tuple[str, float, float]], int]:
    """Rows of the pieces, so that no two of a row overlap; (worker, middle of its rows, their lower edge); all rows.

    The pieces of one request on one worker have one row. Workers that prefill stand first.
    """
    places = [0] * len(pieces)
    ticks: list[tuple[str, float, float]] = []
    row = 0
    early = {piece.worker for piece in pieces if piece.phase == "prefill"}
    for worker in sorted({piece.worker for piece in pieces}, key=lambda worker: (worker not in early, worker)):
        spans: dict[int, list[int]] = {}
        for at, piece in enumerate(pieces):
            if piece.worker == worker:
                spans.setdefault(id(piece.record), []).append(at)
        order = sorted(spans.values(), key=lambda members: min(pieces[at].begin_s for at in members))
        busy: list[tuple[float, int]] = []
        free: list[int] = []
        used = 0
        for members in order:
            begin = min(pieces[at].begin_s for at in members)
            while busy and busy[0][0] <= begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                mine = heapq.heappop(free)
            else:
                mine, used = used, used + 1
            heapq.heappush(busy, (max(pieces[at].begin_s + pieces[at].length_s for at in members), mine))
            for at in members:
                places[at] = row + mine
        ticks.append((escaped(worker, 40), row + (used - 1) / 2, row + used - 0.5))
        row += used
    return places, ticks, row
