"""CSV with a header: Azure's LLM inference traces (2023, 2024, 2025) and BurstGPT's.

Decides which columns are read, by their names. Azure: ``TIMESTAMP`` (date and time), ``ContextTokens``,
``GeneratedTokens``. BurstGPT: ``Timestamp`` (s), ``Session ID`` and ``Elapsed time`` (s; both only in later releases),
``Request tokens``, ``Response tokens``, where 0 response tokens say that the request failed. Neither says what prompts
share, so none share anything.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping

from kvxfer.workload.readers.rows import TraceRead, TraceRow, TraceRowError, number, numbered, trace_of, whole
from kvxfer.workload.request import REQUESTS_MAX

_DATE_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:?[0-9]{2})?"
)


def read_azure(lines: Iterable[str], *, rows_max: int = REQUESTS_MAX) -> TraceRead:
    """Raises TraceRowError."""
    return trace_of(_azure_rows(lines), rows_max)


def read_burstgpt(lines: Iterable[str], *, rows_max: int = REQUESTS_MAX) -> TraceRead:
    """A think time is the distance of two turns less the first one's ``Elapsed time``. Raises TraceRowError."""
    return trace_of(_burstgpt_rows(lines), rows_max)


def csv_rows(lines: Iterable[str], needed: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """(line, values by column) of each row after the header. Raises TraceRowError."""
    header: list[str] = []
    for line, text in numbered(lines):
        try:
            values = next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise TraceRowError(line, "", f"a line must be CSV: {error}") from None
        if not header:
            header = [value.strip() for value in values]
            missing = [name for name in needed if name not in header]
            if missing:
                raise TraceRowError(line, "", f"the header must have {', '.join(needed)}", text)
            continue
        if len(values) != len(header):
            raise TraceRowError(line, "", f"a row must have {len(header)} values, as the header has", len(values))
        yield line, dict(zip(header, values, strict=True))


def nanoseconds_of(line: int, field: str, text: str) -> int:
    """Nanoseconds from 1970 on of a date and time such as ``2023-11-16 18:15:46.6805900`` or ``...+00:00``."""
    found = _DATE_TIME.fullmatch(text.strip())
    if found is None:
        raise TraceRowError(line, field, "a date and time like 2023-11-16 18:15:46.68", text)
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    is_date = year >= 1970 and 1 <= month <= 12 and 1 <= day <= _month_days(year, month)
    if not is_date or hour > 23 or minute > 59 or second > 60:
        raise TraceRowError(line, field, "a date and time that exists", text)
    seconds = _days(year, month, day) * 86400 + hour * 3600 + minute * 60 + second
    zone = found.group(8)
    if zone and zone != "Z":
        shift = int(zone[1:3]) * 3600 + int(zone[-2:]) * 60
        seconds += -shift if zone[0] == "+" else shift
    return seconds * 10**9 + int((found.group(7) or ".")[1:].ljust(9, "0"))


def _is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def _month_days(year: int, month: int) -> int:
    return 29 if month == 2 and _is_leap(year) else (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]


def _days(year: int, month: int, day: int) -> int:
    """From 1970-01-01 on."""
    before = year - 1
    leaps = before // 4 - before // 100 + before // 400 - 477
    return (year - 1970) * 365 + leaps + sum(_month_days(year, one) for one in range(1, month)) + day - 1


def _azure_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    for line, row in csv_rows(lines, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        yield TraceRow(
            line,
            whole(line, "ContextTokens", row["ContextTokens"]),
            whole(line, "GeneratedTokens", row["GeneratedTokens"]),
            nanoseconds_of(line, "TIMESTAMP", row["TIMESTAMP"]),
        )


def _burstgpt_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    for line, row in csv_rows(lines, ("Timestamp", "Request tokens", "Response tokens")):
        took = row.get("Elapsed time", "").strip()
        yield TraceRow(
            line,
            whole(line, "Request tokens", row["Request tokens"]),
            whole(line, "Response tokens", row["Response tokens"]),
            round(number(line, "Timestamp", row["Timestamp"]) * 1e9),
            session=row.get("Session ID", "").strip(),
            took_s=number(line, "Elapsed time", took) if took else None,
        )
