"""The figure of requests on workers: which of them are drawn, and in which rows.

Decides how bars are packed, so that none covers another. What a phase is, and which worker had it, ``join`` says.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterator, Sequence

import numpy as np

from kvxfer.load.join import phases_of
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.report.columns import RunColumns
from kvxfer.load.report.figure import ReportFigure, axis, escaped, left_out, rounded
from kvxfer.load.report.phases import COLOUR_OF

SHOWN_REQUESTS = 160
NEAR_REQUESTS = 2_000
"""Around the slowest one: those of them that a shown worker had may be drawn."""
WORKERS_MAX = 12
ROWS_MIN = 2
"""Of a worker, so that its name has room."""
ROW_PX = 9
WITHOUT_ACCOUNT = {"first token": "@orange", "answer": "@green"}
"""What the client alone knows of the server."""
SERVER = "the server"


@dataclasses.dataclass(frozen=True)
class WorkerSpan:
    """A phase of one request on one worker; seconds."""

    worker: str
    begin_s: float
    length_s: float
    phase: str
    record: MeasuredRequest

    @property
    def end_s(self) -> float:
        return self.begin_s + self.length_s


@dataclasses.dataclass(frozen=True)
class WorkerRows:
    """The rows of one worker: from ``first`` on, ``count`` of them."""

    worker: str
    first: int
    count: int


def timeline(columns: RunColumns) -> ReportFigure:
    """The requests around the slowest first token, on the workers that had them."""
    key, title = "timeline", "Requests on workers"
    spans, requests, workers = chosen(around_the_slowest(columns))
    if not spans:
        return left_out(key, title, "no counted request was answered, or their times are not known")
    places, rows = packed(spans)
    is_joined = all(span.phase in COLOUR_OF for span in spans)
    height = sum(one.count for one in rows)
    figure = ReportFigure(
        key,
        f"{title}: {columns.run.name}",
        "Each bar is a phase of one request, in the rows of the worker that had it: the more rows at once, the more "
        "requests the worker had. "
        + (
            "Without a bar, it had none of those that are drawn."
            if is_joined
            else "No account of the phases came: only the client's view of the server is known."
        ),
        height=max(260, 130 + ROW_PX * height),
    )
    for phase, colour in {**COLOUR_OF, **WITHOUT_ACCOUNT}.items():
        where = [at for at, span in enumerate(spans) if span.phase == phase]
        if where:
            figure.traces.append(_bars(phase, colour, [spans[at] for at in where], [places[at] for at in where]))
    figure.layout = {
        "barmode": "overlay",
        "bargap": 0,
        "xaxis": axis("seconds after the beginning"),
        "yaxis": axis(
            "",
            tickvals=[one.first + (one.count - 1) / 2 for one in rows],
            ticktext=[escaped(one.worker, 40) for one in rows],
            **{"range": [height - 0.5, -0.5], "showgrid": False, "zeroline": False},
        ),
        "shapes": [
            {
                **{"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": one.first - 0.5, "y1": one.first - 0.5},
                "line": {"color": "@grey", "width": 1},
            }
            for one in rows[1:]
        ],
        "hovermode": "closest",
    }
    if requests < columns.count or len(rows) < workers:
        on = f", on {len(rows)} of {workers} workers" if len(rows) < workers else ""
        figure.notes.append(f"{requests} of {columns.count:,} requests are drawn{on}: those around the slowest one.")
    return figure


def chosen(
    near: Sequence[MeasuredRequest], most: int = SHOWN_REQUESTS, workers_max: int = WORKERS_MAX
) -> tuple[list[WorkerSpan], int, int]:
    """(spans to draw, of how many requests, how many workers there are) of requests from the most wanted one on.

    At most ``most`` on at most ``workers_max`` workers: those that had the most wanted requests. Requests without an
    account are left out where others have one.
    """
    of = [(record, list(spans_of(record))) for record in near]
    workers = dict.fromkeys(span.worker for _, spans in of for span in spans if span.worker != SERVER)
    shown = set(list(workers)[:workers_max]) or {SERVER}
    drawn: list[WorkerSpan] = []
    count = 0
    for _, spans in of:
        mine = [span for span in spans if span.worker in shown]
        if mine and count < most:
            drawn += mine
            count += 1
    return drawn, count, len(workers) or 1


def spans_of(record: MeasuredRequest) -> Iterator[WorkerSpan]:
    """What workers did of a request; without an account, the client's view of the server."""
    phases = phases_of(record)
    if phases is not None:
        for phase, begin, end, worker in phases.spans():
            if worker is not None:
                yield WorkerSpan(worker, begin, end - begin, phase, record)
    elif record.sent_s is not None and record.first_s is not None and record.last_s is not None:
        first, answer = WITHOUT_ACCOUNT
        yield WorkerSpan(SERVER, record.sent_s, record.first_s - record.sent_s, first, record)
        yield WorkerSpan(SERVER, record.first_s, record.last_s - record.first_s, answer, record)


def packed(spans: Sequence[WorkerSpan]) -> tuple[list[int], list[WorkerRows]]:
    """(row of each span, rows of each worker), so that no two of a row overlap. What a worker had of one request is in
    one row; workers that prefill stand first.
    """
    places = [0] * len(spans)
    rows: list[WorkerRows] = []
    of: dict[str, dict[int, list[int]]] = {}
    for at, span in enumerate(spans):
        of.setdefault(span.worker, {}).setdefault(id(span.record), []).append(at)
    early = {span.worker for span in spans if span.phase == "prefill"}
    first = 0
    for worker in sorted(of, key=lambda worker: (worker not in early, _by_number(worker))):
        busy: list[tuple[float, int]] = []
        free: list[int] = []
        used = 0
        for members in sorted(of[worker].values(), key=lambda members: min(spans[at].begin_s for at in members)):
            begin = min(spans[at].begin_s for at in members)
            while busy and busy[0][0] <= begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                row = heapq.heappop(free)
            else:
                row, used = used, used + 1
            heapq.heappush(busy, (max(spans[at].end_s for at in members), row))
            for at in members:
                places[at] = first + row
        rows.append(WorkerRows(worker, first, max(used, ROWS_MIN)))
        first += rows[-1].count
    return places, rows


def _bars(phase: str, colour: str, spans: Sequence[WorkerSpan], places: list[int]) -> dict[str, object]:
    return {
        **{"type": "bar", "orientation": "h", "name": phase, "marker": {"color": colour, "line": {"width": 0}}},
        "base": rounded((span.begin_s for span in spans), 8),
        "x": rounded(span.length_s for span in spans),
        **{"y": places, "width": 0.85},
        "customdata": [
            [span.record.number, span.record.prompt_tokens, float(f"{span.length_s * 1e3:.4g}")] for span in spans
        ],
        "hovertemplate": f"{phase} of request %{{customdata[0]}} (%{{customdata[1]}} prompt tokens): "
        "%{customdata[2]} ms<extra></extra>",
    }


def around_the_slowest(columns: RunColumns, most: int = NEAR_REQUESTS) -> list[MeasuredRequest]:
    """Answered requests, from the one with the slowest first token on outwards; about ``most``."""
    known = np.where(np.isfinite(columns.ttft), columns.ttft, -1.0)
    if not known.size or known.max() < 0:
        return []
    middle = int(known.argmax())
    begin, end = max(0, middle - most // 2), middle + most // 2
    order = sorted(range(begin, min(end, columns.count)), key=lambda at: abs(at - middle))
    return [columns.records[at] for at in order if columns.is_good[at]]


def _by_number(name: str) -> list[tuple[int, str]]:
    """So that 10 comes after 9."""
    return [(int(part), "") if part.isdecimal() and len(part) < 18 else (-1, part) for part in re.split(r"(\d+)", name)]
