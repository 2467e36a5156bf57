"""What the importers share: a run of requests whose times are of the tool's own clock, and names of what went wrong.

Decides the beginning, the window and the order of an imported run. It must never know a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from typing import Any

from kvxfer.load.record import ARRIVAL_S, LUMP_TOKENS, MeasuredRequest
from kvxfer.load.run import LoadRun
from kvxfer.workload.bodies import asks_length

MESSAGE_MAX = 200
_NAMES = (
    ("timeout", ("timeout", "timed out")),
    ("cancelled", ("cancelled", "canceled")),
    ("unreachable", ("clientconnector", "connecterror", "connection refused", "connectionrefused", "cannot connect")),
    (
        "connection_lost",
        (
            *("clientpayload", "serverdisconnected", "connectionreset", "connection reset", "remoteprotocol"),
            *("readerror", "incompleteread", "clientoserror", "disconnected", "broken pipe", "not completed"),
        ),
    ),
)
"""The native driver's names, and what in the words of Python's HTTP clients means them."""


def failure(words: str, message: str = "", status: int | None = None) -> tuple[str, str]:
    """(name, message) of what another tool calls ``words``: with a status, the code or type of an OpenAI error body, or
    ``http_STATUS``; else what the words of the HTTP client mean; else ``failed``."""
    message = message or words
    if status is not None and status != 200:
        name = ""
        try:
            body = json.loads(message)
        except (ValueError, RecursionError):
            body = None
        error = body.get("error", body) if isinstance(body, dict) else None
        if isinstance(error, dict):
            name = next((word for key in ("code", "type") if isinstance(word := error.get(key), str) and word), "")
            said = error.get("message")
            message = said if isinstance(said, str) and said else message
        return name[:100] or f"http_{status}", message[:MESSAGE_MAX]
    for text in (words.lower(), message.lower()):
        for name, parts in _NAMES:
            if any(part in text for part in parts):
                return name, message[:MESSAGE_MAX]
    return "failed", message[:MESSAGE_MAX]


def asked_of(body: Any) -> tuple[int, bool]:
    """(asked tokens of the answer, whether exactly so many) by the body of a request; 0 where it does not say it."""
    members = body if isinstance(body, dict) else {}
    for name in ("max_completion_tokens", "max_tokens"):
        value = members.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, asks_length(members)
    return 0, False


def note_gaps(record: MeasuredRequest, gaps_s: Sequence[float]) -> None:
    """The times between the chunks with content, one after the other, into a record whose tokens are known."""
    since_s, chunks_of_first = 0.0, len(gaps_s) + 1
    record.chunks, record.arrivals = len(gaps_s) + 1, 1
    record.longest_gap_s = max(gaps_s, default=None)
    for place, gap_s in enumerate(gaps_s, 1):
        since_s += gap_s
        if since_s >= ARRIVAL_S:
            chunks_of_first = min(chunks_of_first, place)
            record.arrivals, since_s = record.arrivals + 1, 0.0
    note_first(record, chunks_of_first)


def note_first(record: MeasuredRequest, chunks_of_first: int = 1) -> None:
    """How many tokens came first. Where chunks do not stand for tokens, each counts as as many as any other: the tools
    do not tell what was in them."""
    tokens, chunks = record.output_tokens or 0, max(1, record.chunks)
    each = tokens / chunks if tokens > LUMP_TOKENS * chunks else 1.0
    record.first_chunk_tokens = max(1, min(tokens, round(each * chunks_of_first)))


class Numbers:
    """A number for each different name, from 0 on, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, name: Hashable) -> int:
        return self._numbers.setdefault(name, len(self._numbers))


def window_of(records: list[MeasuredRequest], rate: float | None, is_open: bool) -> tuple[float, float, str]:
    """(begin, end, how it was chosen) of requests in the order of their due times.

    ``is_open``: they were due at a schedule of their own, whatever became of the others. The window ends one mean gap
    after the last request was due, so that requests / window is the rate that was offered. Otherwise it ends with the
    last answer: requests that wait for each other are due at no rate of their own.
    """
    counted = [record for record in records if not record.is_warmup]
    if not counted:
        return 0.0, 0.0, "no request counts"
    begin, last = counted[0].due_s, counted[-1].due_s
    if is_open and (last > begin or rate):
        gap = (last - begin) / (len(counted) - 1) if last > begin else 1 / (rate or 1.0)
        return begin, last + gap, "one mean gap after the last request was due"
    ends = [record.end_s for record in counted if record.end_s is not None]
    return begin, math.nextafter(max([last, *ends]), math.inf), "the end of the last answer"


def made_run(
    records: list[MeasuredRequest],
    *,
    name: str,
    driver: str,
    began: float | None,
    rate: float | None = None,
    is_open: bool = False,
    is_due_told: bool,
    settings: dict[str, Any],
    ended: str = "complete",
) -> LoadRun:
    """A run whose clock begins when its first request was due.

    ``began``: that time as Unix seconds, None where the tool does not tell it (it is 0 then). ``is_open``: as of
    :func:`window_of`; a run with a rate is. ``is_due_told``: due times are not when the requests were sent. The
    records' times are shifted, and the records sorted and numbered, in place.
    """
    records.sort(key=lambda record: (record.due_s, record.sent_s if record.sent_s is not None else math.inf))
    zero = records[0].due_s if records else 0.0
    for number, record in enumerate(records):
        record.run, record.number = name, number
        record.due_s -= zero
        for field in ("begun_s", "sent_s", "first_s", "last_s", "end_s"):
            value = getattr(record, field)
            if value is not None:
                setattr(record, field, value - zero)
    begin, end, how = window_of(records, rate, is_open or rate is not None)
    untold = [*([] if began is not None else ["began_unix_s"]), *([] if is_due_told else ["due_s"])]
    for field in ("request_id", "prompt_tokens", "output_tokens_asked"):
        if records and not any(getattr(record, field) for record in records):
            untold.append(field)
    for field in ("sent_s", "first_s", "output_tokens", "longest_gap_s", "cached_tokens", "status"):
        if records and all(getattr(record, field) is None for record in records):
            untold.append(field)
    return LoadRun(
        name=name,
        driver=driver,
        began_unix_s=began or 0.0,
        window_s=(begin, end),
        offered_per_s=rate,
        settings={**settings, "window_ends": how, "not_told": untold},
        ended=ended,
        records=records,
    )


def name_apart(runs: list[LoadRun]) -> None:
    """Runs of the same name get their place behind it."""
    names = [run.name for run in runs]
    for number, run in enumerate(runs):
        if names.count(run.name) > 1:
            run.name = f"{run.name}-{number}"
            for record in run.records:
                record.run = run.name
