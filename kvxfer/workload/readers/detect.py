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


def detected_format(first_line: str) -> str:
    """One of FORMATS, by the first line that is not blank. Text that is neither JSON nor a known CSV is a prompt.

    Raises TraceRowError for JSON whose members no format has.
    """
    if first_line.startswith("{"):
        try:
            members = set(json.loads(first_line))
        except (ValueError, RecursionError) as error:
            raise TraceRowError(1, "", f"a line that begins with {{ must be a JSON object: {error}") from None
        if members & {"input_length", "text_input", "timestamp", "hash_ids", "session_id"}:
            return "mooncake"
        if members & {"prompt", "messages"}:
            return "prompts"
        raise TraceRowError(1, "", "a row must have input_length, text_input, prompt or messages", sorted(members))
    columns = {column.strip().strip('"') for column in first_line.split(",")}
    if {"ContextTokens", "GeneratedTokens"} <= columns:
        return "azure"
    if {"Request tokens", "Response tokens"} <= columns:
        return "burstgpt"
    parts = first_line.split(",")
    if len(parts) == 6 and parts[3].strip() in ("", "Gamma", "Weibull") and parts[0].strip().isdigit():
        return "servegen"
    return "prompts"


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
