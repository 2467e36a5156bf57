"""aiperf 0.13: ``profile_export.jsonl``, one record a request.

Decides what aiperf's names mean here. ``due_s`` is when aiperf's scheduler issued the request to a worker
(``credit_issued_ns``): with a schedule or a rate that is when the request was to be sent, as late as the scheduler was.
``sent_s`` is the end of ``http_req_sending``. aiperf's own TTFT counts from the request's start, so it has the making
of the connection in it, which is lateness here. Its records say of a failed request when it began and ended, and
nothing of the chunks that came before.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.load.importers.fields import Members, read_lines
from kvxfer.load.importers.made import Numbers, failure, made_run, note_gaps
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

NAME = "aiperf"
RECORDS = "profile_export.jsonl"
SUMMARY = "profile_export_aiperf.json"
"""Beside the records: the settings. It is read where it is there."""
DUE_IS = "when aiperf's scheduler issued the request"
DUE_IS_START = "when aiperf began the request: the file does not say when it was to be sent"


def fits(values: dict[str, Any]) -> bool:
    """Whether this is a record of aiperf's."""
    metadata = values.get("metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and ("metrics" in values or "error" in values)


def read_aiperf(path: pathlib.Path) -> list[LoadRun]:
    """One run. Raises ConfigError with the line and the member."""
    lines = list(read_lines(path))
    if not lines:
        raise ConfigError(f"{path}: has no records")
    zero = min(due_ns(line) for line in lines)
    sessions = Numbers()
    many = any((line.object("metadata").count_or_none("turn_index") or 0) > 0 for line in lines)
    records = [read_record(line, zero) for line in lines]
    for line, record in zip(lines, records, strict=True):
        metadata = line.object("metadata")
        if many:
            name = metadata.text_or_none("x_correlation_id") or metadata.text_or_none("conversation_id")
            record.session = sessions.of(name)
    issued = all(line.object("metadata").values.get("credit_issued_ns") is not None for line in lines)
    settings: dict[str, Any] = {"imported_from": path.name, "due_is": DUE_IS if issued else DUE_IS_START}
    rate, ended = summary_of(path, settings)
    settings["tokens_from"] = sorted({record.tokens_from for record in records if record.tokens_from})
    is_open = settings.get("schedule") == "fixed_schedule"
    run = made_run(
        records,
        name=NAME,
        driver=NAME,
        began=zero / 1e9,
        rate=rate,
        is_open=is_open,
        is_due_told=issued,
        settings=settings,
        ended=ended,
    )
    return [run]


def read_record(line: Members, zero_ns: int) -> MeasuredRequest:
    """One record, its times in seconds after ``zero_ns``. Raises ConfigError."""
    metadata = line.object("metadata")
    start_ns = _start_ns(metadata)
    end_ns = metadata.count_or_none("request_end_ns")
    record = MeasuredRequest(
        run=NAME,
        number=metadata.count_or_none("session_num") or 0,
        request_id=metadata.text_or_none("x_request_id") or "",
        due_s=(due_ns(line) - zero_ns) / 1e9,
        prompt_tokens=0,
        output_tokens_asked=0,
        is_warmup=metadata.text_or_none("benchmark_phase") == "warmup",
        turn=metadata.count_or_none("turn_index") or 0,
        sent_s=(start_ns - zero_ns) / 1e9,
        end_s=None if end_ns is None else (end_ns - zero_ns) / 1e9,
    )
    error = line.object_or_none("error")
    metrics = line.object_or_none("metrics")
    if error is not None:
        record.status = error.count_or_none("code")
        kind, message = error.text_or_none("type") or "", error.text_or_none("message") or ""
        record.error, record.message = failure(kind, message, record.status)
    elif metadata.is_true("was_cancelled"):
        record.error, record.message = "cancelled", "aiperf cancelled it"
    if metrics is not None:
        _metrics(record, metrics)
    return record


def _metrics(record: MeasuredRequest, metrics: Members) -> None:
    start_s = record.sent_s or 0.0
    sending_ms = _value(metrics, "http_req_sending")
    latency_ms = _value(metrics, "request_latency")
    first_ms = _value(metrics, "time_to_first_token")
    if latency_ms is not None:
        record.last_s = start_s + latency_ms / 1e3
        record.first_s = record.last_s if first_ms is None else start_s + first_ms / 1e3
        record.status = record.status or (200 if not record.error else None)
        if sending_ms is not None:
            record.sent_s = start_s + min(max(sending_ms, 0.0), first_ms or latency_ms) / 1e3
    prompt = _count(metrics, "usage_prompt_tokens")
    record.prompt_tokens = (_count(metrics, "input_sequence_length") if prompt is None else prompt) or 0
    record.cached_tokens = _count(metrics, "usage_prompt_cache_read_tokens")
    record.output_tokens = _count(metrics, "usage_completion_tokens")
    record.tokens_from = "usage" if record.output_tokens is not None else ""
    if record.output_tokens is None:
        record.output_tokens = _count(metrics, "output_sequence_length")
        record.tokens_from = NAME if record.output_tokens is not None else ""
    gaps = metrics.object_or_none("inter_chunk_latency")
    if gaps is not None:
        note_gaps(record, [value / 1e3 for value in gaps.numbers("value")])
    elif record.first_s is not None:
        record.chunks = 1
    if first_ms is None and record.output_tokens:
        record.first_chunk_tokens = record.output_tokens


def _value(metrics: Members, name: str) -> float | None:
    found = metrics.object_or_none(name)
    return None if found is None else found.number_or_none("value")


def _count(metrics: Members, name: str) -> int | None:
    found = metrics.object_or_none(name)
    return None if found is None else found.count_or_none("value")


def _start_ns(metadata: Members) -> int:
    start_ns = metadata.count_or_none("request_start_ns")
    if start_ns is None:
        raise metadata.error("request_start_ns", "is missing")
    return start_ns


def due_ns(line: Members) -> int:
    """When the request of a record was to be sent, Unix ns. Raises ConfigError."""
    metadata = line.object("metadata")
    start_ns = _start_ns(metadata)
    issued_ns = metadata.count_or_none("credit_issued_ns")
    return start_ns if issued_ns is None else min(issued_ns, start_ns)


def summary_of(path: pathlib.Path, settings: dict[str, Any]) -> tuple[float | None, str]:
    """(asked rate, how it ended) of the summary beside the records, and into the settings what else it says. A summary
    that cannot be read says nothing: the records are whole without it."""
    try:
        values = json.loads((path.parent / SUMMARY).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            return None, "complete"
        summary = Members(SUMMARY, values)
        settings["version"] = summary.text_or_none("aiperf_version")
        ended = "interrupted" if summary.is_true("was_cancelled") else "complete"
        config = summary.object_or_none("input_config")
        rate = None
        for phase in config.objects("phases") if config is not None else ():
            if phase.text_or_none("kind") != "warmup":
                settings["schedule"] = phase.text_or_none("type")
                rate = phase.number_or_none("rate")
                concurrency = phase.count_or_none("concurrency")
                if concurrency is not None:
                    settings["concurrency"] = concurrency
        return (rate if rate and rate > 0 else None), ended
    except (OSError, ValueError, RecursionError, ConfigError):
        return None, "complete"
