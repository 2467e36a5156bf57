"""inference-perf 0.7: ``per_request_lifecycle_metrics.json``, a list with one object a request.

Decides what its names mean here. The file has neither the time at which a request was to be sent nor its id nor its
session, and its clock begins anywhere.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.load.drive.answer import EMPTY_ANSWER
from kvxfer.load.importers.fields import Members
from kvxfer.load.importers.made import asked_of, failure, made_run, note_gaps
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

NAME = "inference-perf"
RECORDS = "per_request_lifecycle_metrics.json"
DUE_IS_START = "when inference-perf began the request: the file does not say when it was to be sent"
_STATUS = re.compile(r"HTTP Error (\d{3})")


def fits(values: dict[str, Any]) -> bool:
    """Whether this is an object of inference-perf's list."""
    return "start_time" in values and "end_time" in values and "info" in values


def read_inference_perf(path: pathlib.Path, values: list[Any]) -> list[LoadRun]:
    """One run. Raises ConfigError that names the request and the member."""
    records = []
    for number, one in enumerate(values):
        if not isinstance(one, dict):
            raise ConfigError(f"{path}: [{number}] must be an object")
        records.append(_record(Members(str(path), one, path=f"[{number}]")))
    if not records:
        raise ConfigError(f"{path}: has no requests")
    settings: dict[str, Any] = {
        "imported_from": path.name,
        "due_is": DUE_IS_START,
        "tokens_from": sorted({record.tokens_from for record in records if record.tokens_from}),
    }
    return [made_run(records, name=NAME, driver=NAME, began=None, is_due_told=False, settings=settings)]


def _record(one: Members) -> MeasuredRequest:
    start, end = one.number("start_time"), one.number("end_time")
    asked, is_length_asked = asked_of(_body(one))
    record = MeasuredRequest(
        run=NAME,
        number=0,
        request_id="",
        due_s=start,
        prompt_tokens=0,
        output_tokens_asked=asked,
        is_length_asked=is_length_asked,
        sent_s=start,
        end_s=end,
    )
    info = one.object_or_none("info")
    if info is not None:
        record.prompt_tokens = _prompt_tokens(info)
        response = info.object_or_none("response_metrics")
        if response is not None:
            _answer(record, response, end)
    error = one.object_or_none("error")
    if error is None:
        record.status = 200
        if record.first_s is None:
            record.error, record.message = EMPTY_ANSWER, "the answer had no content"
    else:
        kind, message = error.text_or_none("error_type") or "", error.text_or_none("error_msg") or ""
        found = _STATUS.search(kind)
        record.status = int(found[1]) if found else None
        record.error, record.message = failure(kind, message, record.status)
    return record


def _answer(record: MeasuredRequest, response: Members, end: float) -> None:
    """What came: the times of the chunks with content, or, of an answer that was no stream, its end."""
    name = next((one for one in ("chunk_times", "output_token_times") if response.values.get(one)), None)
    usage = response.object_or_none("server_usage")
    if usage is not None:
        record.output_tokens = usage.count_or_none("completion_tokens")
        details = usage.object_or_none("prompt_tokens_details")
        record.cached_tokens = details.count_or_none("cached_tokens") if details is not None else None
        record.prompt_tokens = usage.count_or_none("prompt_tokens") or record.prompt_tokens
    record.tokens_from = "usage" if record.output_tokens is not None else ""
    if record.output_tokens is None:
        record.output_tokens = response.count_or_none("output_tokens")
        record.tokens_from = NAME if record.output_tokens is not None else ""
    if name is not None:
        times = response.numbers(name)
        record.first_s, record.last_s = times[0], times[-1]
        note_gaps(record, [later - earlier for earlier, later in itertools.pairwise(times)])
    elif "chunk_times" not in response.values and record.output_tokens:
        record.first_s = record.last_s = end
        record.chunks, record.first_chunk_tokens = 1, record.output_tokens


def _prompt_tokens(info: Members) -> int:
    request = info.object_or_none("request_metrics")
    text = request.object_or_none("text") if request is not None else None
    found = text.count_or_none("input_tokens") if text is not None else None
    return (found if found is not None else info.count_or_none("input_tokens")) or 0


def _body(one: Members) -> Any:
    """What was sent; None where the file does not say it."""
    try:
        return json.loads(one.text_or_none("request") or "null")
    except (ValueError, RecursionError):
        return None
