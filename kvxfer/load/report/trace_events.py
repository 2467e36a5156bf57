"""``timeline.json``: the requests of a run on their workers, as Chrome's and Perfetto's viewers of traces read them.

Decides which members an event has. Which requests are there, and in which rows, ``timeline`` decides.
"""

from __future__ import annotations

import json
from typing import Any

from kvxfer.load.report.columns import RunColumns
from kvxfer.load.report.timeline import around_the_slowest, chosen, packed

REQUESTS_MAX = 10_000
"""Of more, those around the slowest one."""


def trace_events(columns: RunColumns) -> str:
    """JSON of the trace event format: a worker is a process, one of its rows a thread; empty where nothing is known."""
    near = around_the_slowest(columns, 2 * REQUESTS_MAX)
    spans, _, workers = chosen(near, REQUESTS_MAX, len(columns.records))
    if not spans:
        return ""
    places, rows = packed(spans)
    numbers = {one.worker: at for at, one in enumerate(rows, 1)}
    first = {one.worker: one.first for one in rows}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": worker}} for worker, pid in numbers.items()
    ]
    events += [
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}} for pid in numbers.values()
    ]
    for span, place in zip(spans, places, strict=True):
        record = span.record
        events.append(
            {
                **{"ph": "X", "name": span.phase, "pid": numbers[span.worker], "tid": place - first[span.worker]},
                **{"ts": round(span.begin_s * 1e6, 1), "dur": round(span.length_s * 1e6, 1)},
                "args": {
                    **{"request": record.request_id, "number": record.number, "prompt_tokens": record.prompt_tokens},
                    "output_tokens": record.output_tokens,
                },
            }
        )
    about = {"run": columns.run.name, "requests": len({id(span.record) for span in spans}), "workers": workers}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)
