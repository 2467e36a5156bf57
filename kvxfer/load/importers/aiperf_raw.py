"""aiperf 0.13 with ``--export-level raw``: ``profile_export_raw.jsonl``, each request with its body and every chunk.

Decides how its chunks are read: as the native driver reads those of its own connections, so first content, gaps, usage
and the router's account mean the same, and an answer that was cut keeps what came of it. The end of sending is not in
this file: ``sent_s`` is when aiperf began the request.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.load.drive.answer import AnswerReader
from kvxfer.load.importers import aiperf
from kvxfer.load.importers.fields import Members, read_lines
from kvxfer.load.importers.made import Numbers, asked_of, made_run
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

RECORDS = "profile_export_raw.jsonl"


def fits(values: dict[str, Any]) -> bool:
    """Whether this is a raw record of aiperf's."""
    metadata = values.get("metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and "responses" in values


def read_aiperf_raw(path: pathlib.Path) -> list[LoadRun]:
    """One run. Raises ConfigError with the line and the member."""
    records: list[tuple[MeasuredRequest, int, str | None, bool]] = []
    for line in read_lines(path):
        metadata = line.object("metadata")
        issued_ns = aiperf.due_ns(line)
        name = metadata.text_or_none("x_correlation_id") or metadata.text_or_none("conversation_id")
        records.append(
            (read_raw(line, issued_ns), issued_ns, name, metadata.values.get("credit_issued_ns") is not None)
        )
    if not records:
        raise ConfigError(f"{path}: has no records")
    zero = min(issued_ns for _, issued_ns, _, _ in records)
    many = any(record.turn for record, _, _, _ in records)
    sessions = Numbers()
    for record, issued_ns, name, _ in records:
        record.session = sessions.of(name) if many else None
        shift_s = (issued_ns - zero) / 1e9
        for field in ("due_s", "sent_s", "first_s", "last_s", "end_s"):
            value = getattr(record, field)
            setattr(record, field, None if value is None else value + shift_s)
    issued = all(is_issued for _, _, _, is_issued in records)
    settings: dict[str, Any] = {
        "imported_from": path.name,
        "due_is": aiperf.DUE_IS if issued else aiperf.DUE_IS_START,
        "tokens_from": sorted({record.tokens_from for record, _, _, _ in records if record.tokens_from}),
    }
    rate, ended = aiperf.summary_of(path, settings)
    run = made_run(
        [record for record, _, _, _ in records],
        name=aiperf.NAME,
        driver=aiperf.NAME,
        began=zero / 1e9,
        rate=rate,
        is_open=settings.get("schedule") == "fixed_schedule",
        is_due_told=issued,
        settings=settings,
        ended=ended,
    )
    return [run]


def read_raw(line: Members, zero_ns: int) -> MeasuredRequest:
    """One record, its times in seconds after ``zero_ns``. Raises ConfigError."""
    record = aiperf.read_record(line, zero_ns)
    reader = answer_of(line, record)
    error, message = record.error, record.message
    if error:
        reader.fail(error, message, record.end_s or 0.0)
    elif reader.status is not None:
        reader.end(record.end_s or 0.0)
    status = record.status
    reader.fill(record, record.end_s or 0.0)
    record.status = status if status is not None else reader.status
    if error:
        record.error, record.message = error, message
    payload = line.object_or_none("payload")
    if payload is not None:
        record.output_tokens_asked, record.is_length_asked = asked_of(payload.values)
        prompt = payload.values.get("prompt")
        if not record.prompt_tokens and isinstance(prompt, list):
            record.prompt_tokens = len(prompt)
    return record


def answer_of(line: Members, record: MeasuredRequest) -> AnswerReader:
    """What came, by the native driver's own reader; the times are on the record's clock."""
    reader = AnswerReader()
    status = line.count_or_none("status")
    responses = list(line.objects("responses"))
    if status is None and not responses:
        return reader
    start = line.count_or_none("start_perf_ns") or 0
    is_stream = any("packets" in response.values for response in responses)
    reader.head(200 if status is None else status, "text/event-stream" if is_stream or not responses else "")
    for response in responses:
        now_s = (record.sent_s or 0.0) + ((response.count_or_none("perf_ns") or start) - start) / 1e9
        for part in _bytes(response):
            if not reader.data(part, now_s):
                return reader
    return reader


def _bytes(response: Members) -> Iterator[bytes]:
    """The bytes of a chunk, as they must have come."""
    text = response.values.get("text")
    if isinstance(text, str):
        yield text.encode(errors="replace")
    fields = list(response.objects("packets"))
    for field in fields:
        name, value = field.text_or_none("name") or "", field.text_or_none("value") or ""
        start = ":" if name == "comment" else f"{name}:"
        for one in value.split("\n"):
            yield f"{start} {one}\n".encode(errors="replace")
    if fields:
        yield b"\n"


def accounts(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The router's or engine's account of each request, by request id; none where the file is not there, or ends before
    its time. Raises ConfigError for a file that aiperf did not write."""
    found: dict[str, dict[str, Any]] = {}
    if not path.is_file():
        return found
    for line in read_lines(path):
        name = line.object("metadata").text_or_none("x_request_id")
        if not name:
            continue
        reader = AnswerReader()
        reader.head(200, "text/event-stream")
        for response in line.objects("responses"):
            if "kvxfer" in str(response.values.get("packets")):
                for part in _bytes(response):
                    reader.data(part, 0.0)
        if reader.account is not None:
            found[name] = reader.account
    return found
