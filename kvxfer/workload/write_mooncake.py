"""A workload as Mooncake JSONL, as Mooncake's traces and aiperf's and Dynamo's dialect of them are.

Decides the rows: ``timestamp`` and ``delay`` in milliseconds, ``session_id``, and either lengths with ``hash_ids`` or
the complete body as ``payload``, which aiperf sends as it is. Knows nothing of files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest


def _ms(seconds: float) -> float | int:
    """To the nanosecond; a whole number as one."""
    value = round(seconds * 1e3, 6)
    return int(value) if value.is_integer() else value


def mooncake_lines(workload: Workload, body: Callable[[WorkloadRequest], bytes] | None = None) -> Iterator[str]:
    """A line for each request, without its end, in the workload's order.

    A session's turns have its ``session_id``; a turn without a due time has its think time as ``delay``, as have turns
    with both. With ``body`` (``BodyMaker.body``) a row has that body as ``payload`` in place of lengths and hash ids.
    A tool that reads ``session_id`` sends a turn never before the one before it has ended: rows with a payload in mode
    ``timestamp`` have none, so that each request is sent at its time.
    """
    is_alone = body is not None and workload.mode is DispatchMode.TIMESTAMP
    sessions = {request.session for request in workload.requests if request.turn}
    for request in workload.requests:
        row: dict[str, Any] = {}
        if request.due_s is not None:
            row["timestamp"] = _ms(request.due_s)
        if request.session in sessions and request.session is not None and not is_alone:
            row["session_id"] = str(request.session)
            if request.turn:
                row["delay"] = _ms(request.think_s)
        row["output_length"] = request.output_tokens
        if body is not None:
            begin = json.dumps(row, separators=(",", ":"))[:-1]
            yield f'{begin},"payload":{body(request).decode()}}}'
            continue
        if request.text is not None:
            row["text_input"] = request.text
        else:
            row["input_length"] = request.prompt_tokens
            if request.hash_ids:
                row["hash_ids"] = list(request.hash_ids)
        yield json.dumps(row, separators=(",", ":"))
