"""Which format a trace has, by its first line; and the readers by format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.readers.csv_rows import read_azure, read_burstgpt
from kvxfer.workload.readers.json_rows import read_json_prompts, read_mooncake
from kvxfer.workload.readers.rows import TraceRead, TraceRow, TraceRowError, numbered, tokens_of_text, trace_of
from kvxfer.workload.request import REQUESTS_MAX

FORMATS = ("mooncake", "azure", "burstgpt", "servegen", "prompts")
OF_MOONCAKE = frozenset({"output_length", "hash_ids", "session_id", "delay"})
"""Members beside ``messages`` that only Mooncake's dialects have. A ``timestamp`` can be of any format and unit."""
NAME_IT = f"say with --trace-format which of {', '.join(FORMATS)} it is"


def detected_format(first_line: str) -> str:
    """One of FORMATS, by the first line that is not blank: only where it can be no other. Text that is neither JSON nor
    a known CSV can be anything, so its format must be named.

    Raises TraceRowError for all else.
    """
    if first_line.startswith("{"):
        try:
            members = set(json.loads(first_line))
        except (ValueError, RecursionError) as error:
            raise TraceRowError(1, "", f"a line that begins with {{ must be a JSON object: {error}") from None
        if members & {"input_length", "text_input"} or ("messages" in members and members & OF_MOONCAKE):
            return "mooncake"
        if members & {"prompt", "messages"} and not members & {*OF_MOONCAKE, "timestamp"}:
            return "prompts"
        known = "input_length or text_input (mooncake), or prompt or messages without times or sessions (prompts)"
        raise TraceRowError(1, "", f"a row must have {known}; {NAME_IT}", sorted(members))
    columns = {column.strip().strip('"') for column in first_line.split(",")}
    if {"ContextTokens", "GeneratedTokens"} <= columns:
        return "azure"
    if {"Request tokens", "Response tokens"} <= columns:
        return "burstgpt"
    parts = [part.strip() for part in first_line.split(",")]
    if len(parts) == 6 and parts[3] in ("", "Gamma", "Weibull") and all(map(_is_number, parts[:3])):
        return "servegen"
    raise TraceRowError(1, "", f"no known format begins so: {NAME_IT}", first_line)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and text.isascii()


def read_prompts(lines: Iterable[str], *, rows_max: int = REQUESTS_MAX, output_tokens: int = 64) -> TraceRead:
    """JSON objects where the first line begins with ``{``, else one prompt a line. Raises TraceRowError."""
    first, every = peeked(lines)
    if first.startswith("{"):
        return read_json_prompts(every, rows_max=rows_max, output_tokens=output_tokens)
    rows = (TraceRow(line, tokens_of_text(text), output_tokens, None, text=text) for line, text in numbered(every))
    return trace_of(rows, rows_max)


def peeked(lines: Iterable[str]) -> tuple[str, Iterator[str]]:
    """The first line that is not blank (empty where there is none), and all lines."""
    rest = iter(lines)
    seen: list[str] = []
    first = ""
    for line in rest:
        seen.append(line)
        first = line.strip("\ufeff \t\r\n")
        if first:
            break
    return first, chain(seen, rest)


def read_trace(
    lines: Iterable[str], format_name: str = "auto", *, rows_max: int = REQUESTS_MAX, output_tokens: int = 64
) -> TraceRead:
    """A trace of any format but ServeGen, which has two files for each client. Raises TraceRowError, and
    InvalidArgumentError for a format that does not exist."""
    if format_name not in ("auto", *FORMATS):
        raise InvalidArgumentError(f"a trace has one of the formats {', '.join(FORMATS)}, not {format_name!r:.80}")
    first, every = peeked(lines)
    if not first:
        raise TraceRowError(1, "", "the trace is empty")
    name = detected_format(first) if format_name == "auto" else format_name
    if name == "mooncake":
        return read_mooncake(every, rows_max=rows_max, output_tokens=output_tokens)
    if name == "azure":
        return read_azure(every, rows_max=rows_max)
    if name == "burstgpt":
        return read_burstgpt(every, rows_max=rows_max)
    if name == "prompts":
        return read_prompts(every, rows_max=rows_max, output_tokens=output_tokens)
    raise TraceRowError(1, "", f"this is {name}: it is read from its directory of chunk-*-trace.csv files")
