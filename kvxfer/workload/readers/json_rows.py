"""JSONL: Mooncake's traces with their session dialect, and prompts as JSON.

Decides which members a row has. Mooncake, as published: ``timestamp`` (ms), ``input_length``, ``output_length``,
``hash_ids`` (one for each 512 tokens; equal ids are equal tokens). aiperf and Dynamo add ``session_id``, ``delay`` (ms
after the end of the turn before), and ``text_input`` or ``messages`` in place of ``input_length``. A row with a
complete ``payload`` is for aiperf to send, and is refused here: nothing says what its prompt shares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from kvxfer.workload.readers.rows import (
    TIME_MAX_S,
    TraceRead,
    TraceRow,
    TraceRowError,
    number,
    numbered,
    tokens_of_text,
    trace_of,
    whole,
)
from kvxfer.workload.request import REQUESTS_MAX
from kvxfer.workload.sessions import HASH_TOKENS

HASH_ID_MAX = (1 << 64) - 1


def read_mooncake(lines: Iterable[str], *, rows_max: int = REQUESTS_MAX, output_tokens: int = 64) -> TraceRead:
    """``output_tokens`` is for rows that have text and no ``output_length``. Raises TraceRowError."""
    return trace_of(_mooncake_rows(lines, output_tokens), rows_max)


def read_json_prompts(lines: Iterable[str], *, rows_max: int = REQUESTS_MAX, output_tokens: int = 64) -> TraceRead:
    """Objects with ``prompt`` (text) or ``messages``, and ``output_tokens`` or ``max_tokens`` where a row says it.
    Raises TraceRowError."""
    return trace_of(_prompt_rows(lines, output_tokens), rows_max)


def json_objects(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line that is not blank. Raises TraceRowError for one that is no JSON object."""
    for line, text in numbered(lines):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceRowError(line, "", f"a line must be a JSON object: {error}") from None
        if not isinstance(value, dict):
            raise TraceRowError(line, "", "a line must be a JSON object", text)
        yield line, value


def _milliseconds(line: int, row: dict[str, Any], field: str) -> float | None:
    value = row.get(field)
    return None if value is None else number(line, field, value, maximum=TIME_MAX_S * 1e3)


def _mooncake_rows(lines: Iterable[str], output_tokens: int) -> Iterator[TraceRow]:
    for line, row in json_objects(lines):
        given = [name for name in ("input_length", "text_input", "messages") if row.get(name) is not None]
        if len(given) != 1:
            raise TraceRowError(line, "", "a row must have one of input_length, text_input and messages", sorted(row))
        text: str | None = None
        if given == ["input_length"]:
            prompt = whole(line, "input_length", row["input_length"])
            answer = whole(line, "output_length", row.get("output_length"))
        else:
            text = _text(line, given[0], row[given[0]])
            prompt = tokens_of_text(text)
            asked = row.get("output_length")
            answer = output_tokens if asked is None else whole(line, "output_length", asked)
        session = row.get("session_id")
        if session is not None and not isinstance(session, str | int):
            raise TraceRowError(line, "session_id", "text or a whole number", session)
        timestamp, delay = _milliseconds(line, row, "timestamp"), _milliseconds(line, row, "delay")
        ids = _hash_ids(line, row.get("hash_ids"), prompt) if text is None else ()
        yield TraceRow(
            line,
            prompt,
            answer,
            None if timestamp is None else round(timestamp * 1e6),
            session="" if session is None else str(session),
            delay_s=None if delay is None else delay / 1e3,
            hash_ids=ids,
            text=text,
        )


def _hash_ids(line: int, value: object, prompt_tokens: int) -> tuple[int, ...]:
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise TraceRowError(line, "hash_ids", "a list of whole numbers", value)
    needed = -(-prompt_tokens // HASH_TOKENS)
    if len(value) < needed:
        raise TraceRowError(
            line, "hash_ids", f"{needed} numbers, one for each {HASH_TOKENS} tokens of input_length", len(value)
        )
    return tuple([whole(line, "hash_ids", one, maximum=HASH_ID_MAX) for one in value[:needed]])


def _prompt_rows(lines: Iterable[str], output_tokens: int) -> Iterator[TraceRow]:
    for line, row in json_objects(lines):
        given = [name for name in ("prompt", "messages") if row.get(name) is not None]
        if len(given) != 1:
            raise TraceRowError(line, "", "a row must have either prompt or messages", sorted(row))
        text = _text(line, given[0], row[given[0]])
        answer = output_tokens
        for field in ("output_tokens", "max_tokens"):
            if row.get(field) is not None:
                answer = whole(line, field, row[field])
                break
        yield TraceRow(line, tokens_of_text(text), answer, None, text=text)


def _text(line: int, field: str, value: object) -> str:
    """Of ``messages`` the texts of all, a line each: who said them is lost, for one prompt is sent."""
    if field != "messages":
        if not isinstance(value, str) or not value:
            raise TraceRowError(line, field, "text that is not empty", value)
        return value
    if not isinstance(value, list) or not value:
        raise TraceRowError(line, field, "a list of messages that is not empty", value)
    texts = []
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or not content:
            raise TraceRowError(line, field, "messages whose content is text", message)
        texts.append(content)
    return "\n".join(texts)
