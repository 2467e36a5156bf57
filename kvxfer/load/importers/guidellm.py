"""guidellm 0.8: the JSON of its report, with one run for each benchmark in it.

Decides what guidellm's names mean here. ``due_s`` is the time that its strategy set for the request
(``targeted_start``). Its own TTFT counts from ``request_start``, which is ``sent_s`` here.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.load.importers.fields import Members
from kvxfer.load.importers.made import Numbers, asked_of, failure, made_run, note_first
from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun

NAME = "guidellm"
DUE_IS = "the time that guidellm's strategy set for the request"
DUE_IS_START = "when guidellm began the request: the report does not say when it was to be sent"
_STATUS = re.compile(r"error '(\d{3}) ")


def fits(values: dict[str, Any]) -> bool:
    """Whether this is a report of guidellm's."""
    metadata = values.get("metadata")
    return isinstance(values.get("benchmarks"), list) and (
        (isinstance(metadata, dict) and "guidellm_version" in metadata) or "config" in values or "args" in values
    )


def read_guidellm(path: pathlib.Path, values: dict[str, Any]) -> list[LoadRun]:
    """The runs of a report. Raises ConfigError that names the member."""
    report = Members(str(path), values)
    metadata = report.object_or_none("metadata")
    version = metadata.text_or_none("guidellm_version") if metadata is not None else None
    runs = [_run(path, one, number, version) for number, one in enumerate(report.objects("benchmarks"))]
    if not runs:
        raise ConfigError(f"{path}: benchmarks is empty")
    return runs


def _run(path: pathlib.Path, benchmark: Members, number: int, version: str | None) -> LoadRun:
    groups = benchmark.object("requests")
    lists = {name: list(groups.objects(name)) for name in ("successful", "errored", "incomplete")}
    everything = [one for found in lists.values() for one in found]
    if not everything:
        raise benchmark.error("requests", "has no requests: the report was written without them")
    many = any((one.object("info").count_or_none("turn_index") or 0) > 0 for one in everything)
    sessions = Numbers()
    records, targeted = [], True
    for group, found in lists.items():
        for one in found:
            record, has_target = _record(one, group)
            targeted &= has_target
            if many:
                record.session = sessions.of(one.object("info").text_or_none("conversation_id"))
            records.append(record)
    config = benchmark.object_or_none("config")
    strategy = config.object_or_none("strategy") if config is not None else None
    settings: dict[str, Any] = {
        "imported_from": path.name,
        "due_is": DUE_IS if targeted else DUE_IS_START,
        "tokens_from": sorted({record.tokens_from for record in records if record.tokens_from}),
    }
    if version is not None:
        settings["version"] = version
    rate, name = None, NAME
    if strategy is not None:
        settings["schedule"] = strategy.text_or_none("type_")
        rate = strategy.number_or_none("rate")
        streams = strategy.count_or_none("streams")
        if streams is not None:
            settings["concurrency"] = streams
        size = rate if rate is not None else streams
        name = "-".join([NAME, settings["schedule"] or str(number), *([f"{size:g}"] if size is not None else [])])
    zero = min(record.due_s for record in records)
    common: dict[str, Any] = {"name": name, "driver": NAME, "began": zero, "is_due_told": targeted}
    run = made_run(records, **common, rate=rate or None, settings=settings)
    _measured(benchmark, run, zero)
    return run


def _measured(benchmark: Members, run: LoadRun, zero: float) -> None:
    """guidellm's own warm-up and cool-down, where it had them, bound the window."""
    begin, end = run.window_s
    warmup, cooldown = benchmark.number_or_none("warmup_duration"), benchmark.number_or_none("cooldown_duration")
    start_time, end_time = benchmark.number_or_none("start_time"), benchmark.number_or_none("end_time")
    if warmup is not None and warmup > 0 and start_time is not None:
        begin = max(begin, start_time - zero)
    if cooldown is not None and cooldown > 0 and end_time is not None and end_time - zero > begin:
        end = end_time - zero
        run.settings["window_ends"] = "the beginning of guidellm's cool-down"
    run.window_s = begin, end


def _record(one: Members, group: str) -> tuple[MeasuredRequest, bool]:
    """(the record with Unix times, whether it has a time at which it was to be sent)."""
    info = one.object("info")
    timings = info.object("timings")
    start = timings.number_or_none("request_start")
    target = timings.number_or_none("targeted_start")
    due = target if target is not None else start
    for name in ("resolve_start", "dequeued", "queued", "resolve_end"):
        due = due if due is not None else timings.number_or_none(name)
    if due is None:
        raise timings.error("targeted_start", "is missing, and so is every other time")
    first, last = timings.number_or_none("first_token_iteration"), timings.number_or_none("last_token_iteration")
    end = timings.number_or_none("request_end")
    end = end if end is not None else timings.number_or_none("resolve_end")
    chunks = timings.count_or_none("token_iterations") or 0
    asked, is_length_asked = asked_of(_body(one))
    record = MeasuredRequest(
        run=NAME,
        number=0,
        request_id=one.text_or_none("request_id") or "",
        due_s=due,
        prompt_tokens=_tokens(one, "input_metrics", "prompt_tokens") or 0,
        output_tokens_asked=asked,
        is_length_asked=is_length_asked,
        turn=info.count_or_none("turn_index") or 0,
        sent_s=start,
        first_s=first,
        last_s=last if last is not None else first,
        end_s=end,
        output_tokens=_tokens(one, "output_metrics", "output_tokens"),
        chunks=chunks,
        cached_tokens=_tokens(one, "input_metrics", "", "cached_tokens"),
    )
    if record.output_tokens is not None:
        counted = one.object_or_none("output_metrics")
        has_total = counted is not None and counted.values.get("total_tokens") is not None
        record.tokens_from = NAME if has_total else "chunks"
        note_first(record)
    if group == "successful":
        record.status = 200
        if first is None and end is not None and start is not None:
            record.first_s = record.last_s = end
            record.chunks, record.first_chunk_tokens = 1, record.output_tokens or 1
    elif group == "errored":
        text = info.text_or_none("error") or ""
        found = _STATUS.search(text)
        record.status = int(found[1]) if found else None
        record.error, record.message = failure(text, text, record.status)
    else:
        record.error, record.message = "cancelled", "the benchmark ended before the answer did"
    return record, target is not None


def _tokens(one: Members, group: str, name: str, part: str = "total_tokens") -> int | None:
    metrics = one.object_or_none(group)
    found = metrics.count_or_none(part) if metrics is not None else None
    return one.count_or_none(name) if found is None and name else found


def _body(one: Members) -> Any:
    """What was sent; None where the request's arguments do not say it."""
    try:
        arguments = json.loads(one.text_or_none("request_args") or "null")
    except (ValueError, RecursionError):
        return None
    return arguments.get("body") if isinstance(arguments, dict) else None
