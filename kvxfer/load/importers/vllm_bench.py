"""``vllm bench serve --save-result --save-detailed``: one JSON object of lists, one value a request.

Decides what its names mean here. Its times are those of a clock that begins anywhere, so when the run began is not
told. A vLLM that notes ``queue_times`` tells how long a request waited for ``--max-concurrency``: ``due_s`` is then the
time before that wait, and the time at which it was sent otherwise; how late its scheduler was is told by neither.
"""

from __future__ import annotations

import pathlib
from typing import Any

from kvxfer.load.importers.fields import Members
from kvxfer.load.importers.made import failure, made_run, note_gaps
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

NAME = "vllm-bench"
DUE_IS = "when vllm bench gave the request to its queue"
DUE_IS_START = "when vllm bench sent the request: the file does not say when it was to be sent"


def fits(values: dict[str, Any]) -> bool:
    """Whether this is a result of vllm bench serve."""
    return "request_throughput" in values and ("completed" in values or "ttfts" in values)


def read_vllm_bench(path: pathlib.Path, values: dict[str, Any]) -> list[LoadRun]:
    """One run. Raises ConfigError that names the member."""
    result = Members(str(path), values)
    if "ttfts" not in values or "start_times" not in values:
        raise result.error("start_times" if "ttfts" in values else "ttfts", "is missing: use --save-detailed")
    starts = result.numbers("start_times")
    count = len(starts)
    if not count:
        raise result.error("start_times", "is empty")
    firsts = result.lengths("ttfts", count)
    prompts = result.lengths("input_lens", count)
    outputs = result.lengths("output_lens", count)
    latencies = result.lengths("latencies", count) if "latencies" in values else None
    queued = result.numbers("queue_times", count) if "queue_times" in values else None
    errors = result.list_or_none("errors") or [""] * count
    gaps = result.list_or_none("itls")
    for name, found in (("errors", errors), ("itls", gaps)):
        if found is None or len(found) != count:
            raise result.error(name, f"must have {count} values, one for each request")
    records = []
    for number in range(count):
        between = Members(str(path), {"itls": (gaps or [])[number]}, path=f"request {number}").lengths("itls")
        start = starts[number]
        record = MeasuredRequest(
            run=NAME,
            number=number,
            request_id="",
            due_s=start - max(0.0, queued[number]) if queued is not None else start,
            prompt_tokens=int(prompts[number]),
            output_tokens_asked=0,
            sent_s=start,
        )
        words = errors[number] if isinstance(errors[number], str) else str(errors[number] or "")
        if firsts[number] > 0:
            record.first_s = start + firsts[number]
            record.last_s = record.first_s + sum(between)
        if words or firsts[number] <= 0:
            last = words.strip().rpartition("\n")[2]
            record.error, record.message = failure(last or "failed", last or "vllm bench gives no reason")
            record.end_s = record.last_s
        else:
            record.status = 200
            record.end_s = record.last_s if latencies is None else max(record.last_s or 0.0, start + latencies[number])
            record.output_tokens, record.tokens_from = int(outputs[number]) or None, NAME
        if firsts[number] > 0:
            note_gaps(record, between)
        records.append(record)
    settings: dict[str, Any] = {
        "imported_from": path.name,
        "due_is": DUE_IS if queued is not None else DUE_IS_START,
        "tokens_from": [NAME],
    }
    for name in ("model_id", "backend", "burstiness", "max_concurrency"):
        if isinstance(values.get(name), (str, int, float)):
            settings[name] = values[name]
    rate = values.get("request_rate")
    asked = float(rate) if isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < 1e9 else None
    common: dict[str, Any] = {"name": NAME, "driver": NAME, "began": None, "is_due_told": queued is not None}
    return [made_run(records, **common, rate=asked, settings=settings)]
