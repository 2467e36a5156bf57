"""Reads one answer: decides which of its chunks have content, what its usage says, and whether it is whole.

Pure: bytes and times go in, members of the record come out. It must never know a connection. The definitions are those
of ``kvxfer.load.record``; docs/load-test.md has them.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

from kvxfer.load.record import ARRIVAL_S, LUMP_TOKENS, MeasuredRequest

MESSAGE_MAX = 200
ERROR_MAX = 100
PLAIN_BYTES_MAX = 64 << 20
LINE_BYTES_MAX = PLAIN_BYTES_MAX
REFUSAL_BYTES_MAX = 64 << 10
"""What is kept of the body of a refusal."""
COUNT_MAX = 1 << 31
"""More tokens no answer has: what a server says beyond it is passed over."""
ACCOUNT = "kvxfer-account"
ACCOUNT_BYTES_MAX = 16 << 10
"""Of all accounts of one answer together; what is longer, deeper or no JSON is passed over."""
ACCOUNT_DEPTH_MAX = 8
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BROKEN_OFF = ("abort", "aborted", "error")
"""Finish reasons of an engine that gave the answer up: vLLM's and SGLang's."""

ABORTED = "aborted"

CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Members of a delta that are content."""
REASONING = ("reasoning_content", "reasoning")

BAD_ANSWER = "bad_answer"
BROKEN_STREAM = "broken_stream"
CONNECTION_LOST = "connection_lost"
DRIVER_LOST = "driver_lost"
EMPTY_ANSWER = "empty_answer"
NOT_FINISHED = "not_finished"
STOPPED = "the run was stopped"
TIMEOUT = "timeout"
UNREACHABLE = "unreachable"


def content_of(event: dict[str, Any]) -> tuple[int, bool]:
    """(bytes of text, reasoning text and tool calls in a chunk, whether reasoning is among them). A chunk with a role
    alone, or with usage, has none."""
    choices = event.get("choices")
    if not choices or not isinstance(choices, list):
        return 0, False
    size, has_reasoning = 0, False
    for choice in choices:
        if isinstance(choice, dict):
            if text := choice.get("text"):
                size += _size(text)
            part = choice.get("delta") or choice.get("message")
            if isinstance(part, dict):
                for name in CONTENT:
                    if text := part.get(name):
                        size += _size(text)
                        has_reasoning = has_reasoning or name in REASONING
    return size, has_reasoning


def _size(content: Any) -> int:
    """Bytes of text. Of a tool call those of its JSON: some more than what the model wrote."""
    text = content if isinstance(content, str) else json.dumps(content)
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def failure_of(value: Any, status: int | None) -> tuple[str, str]:
    """(name, message) of an error body or an error event: its ``code`` if that is a word, else its ``type``, else
    ``http_STATUS`` (``server_error`` in a stream)."""
    error = value.get("error", value) if isinstance(value, dict) else value
    name, message = "", cast(Any, "")
    if isinstance(error, dict):
        name = next((word for key in ("code", "type") if isinstance(word := error.get(key), str) and word), "")
        message = error.get("message") or error.get("detail") or ""
    elif error is not None:
        message = error
    if not isinstance(message, str):
        message = json.dumps(message)
    otherwise = f"http_{status}" if status and status != 200 else "server_error"
    return _printable(name[:ERROR_MAX]).strip() or otherwise, message[:MESSAGE_MAX]


def _printable(text: str) -> str:
    """What a terminal, a table or a file could not bear (control characters, halves of surrogates) becomes ``?``."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < COUNT_MAX


def _depth(value: Any) -> int:
    """Of objects and lists in one another; above ACCOUNT_DEPTH_MAX it looks no further."""
    depth, found = 0, [value]
    while depth <= ACCOUNT_DEPTH_MAX:
        inner = [one for one in found if isinstance(one, (dict, list))]
        if not inner:
            break
        depth += 1
        found = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return depth


class AnswerReader:
    """One answer with its head, chunk by chunk. ``data`` returns False where nothing more is worth reading."""

    __slots__ = (
        *("_arrived_s", "_data", "_data_bytes", "_first_bytes", "_first_chunks", "_first_counted", "_has_reasoning"),
        *("_is_error", "_rest", "_streamed", "_text_bytes", "account", "arrivals", "cached_tokens", "chunks"),
        *("completion_tokens", "error", "failed_s", "finish_reason", "first_s", "has_finished", "is_done", "last_s"),
        *("longest_gap_s", "message", "prompt_tokens", "reasoning_tokens", "status"),
    )

    def __init__(self) -> None:
        self.status: int | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.failed_s: float | None = None
        self.longest_gap_s: float | None = None
        self.chunks = 0
        self.arrivals = 0
        self.finish_reason = ""
        self.completion_tokens: int | None = None
        self.reasoning_tokens = 0
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.account: dict[str, Any] | None = None
        self.error = ""
        self.message = ""
        self.is_done = False
        self.has_finished = False
        self._streamed = False
        self._is_error = False
        """The event that comes is called ``error``."""
        self._rest = bytearray()
        """What came of a line that is not whole, or of a body that is no stream."""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._arrived_s = -math.inf
        """When the arrival began that the last content is of."""
        self._first_chunks = self._first_bytes = self._text_bytes = 0
        self._first_counted = 0
        """What the usage in the first arrival counts; 0: there is none."""
        self._has_reasoning = False

    def head(self, status: int, content_type: str) -> None:
        """The head is there. A body that is no event stream is read whole."""
        self.status = status
        self._streamed = status == 200 and content_type.partition(";")[0].strip().lower() == "text/event-stream"

    def data(self, part: bytes, now_s: float) -> bool:
        if not self._streamed:
            return self._plain(part, now_s)
        if self._rest:
            if b"\n" not in part:
                self._rest += part
                return len(self._rest) <= LINE_BYTES_MAX or self._bad(now_s, "a line of the stream is too long")
            part = bytes(self._rest) + part
            self._rest.clear()
        lines = part.split(b"\n")
        self._rest += lines.pop()
        for line in lines:
            if line[-1:] == b"\r":
                line = line[:-1]
            if line[:5] == b"data:":
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                if len(self._data) > 1:
                    self._data_bytes += len(line)
                    if self._data_bytes > LINE_BYTES_MAX:
                        return self._bad(now_s, "an event of the stream is too long")
            elif not line:
                if self._data and not self._dispatch(now_s):
                    return False
            elif line[:1] == b":":
                self._comment(line[1:].strip())
            elif line[:6] == b"event:":
                self._is_error = line[6:].strip() == b"error"
            elif line[:8] == BYTE_ORDER_MARK + b"data:":
                self._data.append(line[8:])
        return len(self._rest) <= LINE_BYTES_MAX or self._bad(now_s, "a line of the stream is too long")

    def _plain(self, part: bytes, now_s: float) -> bool:
        if self.status != 200:  # the beginning says what is wrong
            self._rest += part[: max(0, REFUSAL_BYTES_MAX - len(self._rest))]
            return True
        self._rest += part
        return len(self._rest) <= PLAIN_BYTES_MAX or self._bad(now_s, "the answer is too long")

    def end(self, now_s: float) -> None:
        """The body is whole as far as HTTP goes: says whether the answer is."""
        if self._streamed:
            if self._rest:
                self.data(b"\n", now_s)
            if self._data:
                self._dispatch(now_s)
            if not self.error and not self.is_done and not self.has_finished:
                self.fail(BROKEN_STREAM, "the stream ended before its last event", now_s)
        else:
            self._whole(now_s)
        if not self.error and not self.chunks and not self.completion_tokens:
            self.is_done = False
            self.fail(EMPTY_ANSWER, "the answer is whole, and has neither content nor tokens", now_s)

    def fail(self, error: str, message: str, now_s: float) -> None:
        """The first failure is kept; after ``[DONE]`` nothing can fail any more."""
        if not self.error and not self.is_done:
            self.error, self.message, self.failed_s = error, message[:MESSAGE_MAX], now_s

    def came_before_its_request(self, now_s: float) -> None:
        """It was whole before the request had been sent: unless it is a refusal, it is the answer to something else."""
        if self.error in ("", EMPTY_ANSWER):
            self.error, self.is_done = "", False
            self.fail(BAD_ANSWER, "the answer came before the request was sent", now_s)

    def fill(self, record: MeasuredRequest, end_s: float) -> None:
        """What was read, into the record."""
        record.status, record.error, record.message = self.status, self.error, self.message
        record.first_s, record.last_s, record.longest_gap_s = self.first_s, self.last_s, self.longest_gap_s
        record.end_s = end_s if self.failed_s is None else self.failed_s
        record.chunks, record.arrivals, record.finish_reason = self.chunks, self.arrivals, self.finish_reason
        record.cached_tokens, record.account = self.cached_tokens, self.account
        if self.prompt_tokens is not None:
            record.prompt_tokens = self.prompt_tokens
        if self.completion_tokens is not None and (self.completion_tokens or not self.chunks):
            record.output_tokens, record.tokens_from = self.completion_tokens, "usage"
        elif self.chunks:
            record.output_tokens, record.tokens_from = self.chunks, "chunks"
        record.hidden_tokens = self._hidden_of(record.output_tokens or 0)
        record.first_chunk_tokens = self._first_of((record.output_tokens or 0) - record.hidden_tokens)

    def _hidden_of(self, tokens: int) -> int:
        """Tokens that were counted and never shown: reasoning, by the usage, where no reasoning came; at least as many
        as there are beyond a token for each byte of text, which no text has."""
        told = 0 if self._has_reasoning else self.reasoning_tokens
        return max(0, min(tokens - self.chunks, max(told, tokens - self._text_bytes)))

    def _first_of(self, shown: int) -> int:
        """Of ``shown`` tokens those of the first arrival."""
        if self._first_counted:
            hidden = 0 if self._has_reasoning else self.reasoning_tokens
            first = self._first_counted - hidden
        elif shown <= LUMP_TOKENS * self.chunks:
            first = self._first_chunks
        else:
            first = round(shown * self._first_bytes / max(1, self._text_bytes))
        return max(1, min(first, shown))

    def _dispatch(self, now_s: float) -> bool:
        """One event is whole."""
        text = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        self._data_bytes = 0
        is_error, self._is_error = self._is_error, False
        if self.is_done:
            return True
        if text.strip() == b"[DONE]":
            self.is_done = True
            return True
        try:
            event = json.loads(text)
        except (ValueError, RecursionError) as error:
            return self._bad(now_s, f"an event is no JSON: {error}")
        if not isinstance(event, dict):
            return self._bad(now_s, "an event is no JSON object")
        if is_error or event.get("error") or event.get("object") == "error":
            self.fail(*failure_of(event, self.status), now_s)
            return True
        size, has_reasoning = content_of(event)
        if size:
            self._content(event, size, now_s)
            self._has_reasoning = self._has_reasoning or has_reasoning
        self._members(event, now_s)
        return True

    def _content(self, event: dict[str, Any], size: int, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        elif self.last_s is not None and now_s - self.last_s > (self.longest_gap_s or -1.0):
            self.longest_gap_s = now_s - self.last_s
        if now_s - self._arrived_s >= ARRIVAL_S:
            self._arrived_s = now_s
            self.arrivals += 1
        if self.arrivals == 1:
            self._first_chunks += 1
            self._first_bytes += size
            usage = event.get("usage")
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
            self._first_counted = tokens if _is_count(tokens) and tokens else 0
        self._text_bytes += size
        self.last_s = now_s
        self.chunks += 1

    def _members(self, event: dict[str, Any], now_s: float) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            details, counted = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            reasoning = counted.get("reasoning_tokens") if isinstance(counted, dict) else None
            for name, value in (
                ("completion_tokens", usage.get("completion_tokens")),
                ("prompt_tokens", usage.get("prompt_tokens")),
                ("cached_tokens", cached),
                ("reasoning_tokens", reasoning),
            ):
                if _is_count(value):
                    setattr(self, name, value)
        account = event.get("kvxfer")
        if isinstance(account, dict):
            self._take_account(account)
        choices = event.get("choices")
        if isinstance(choices, list):
            for choice in choices:
                if isinstance(choice, dict) and (reason := choice.get("finish_reason")):
                    self.has_finished = True
                    kind = reason.get("type") if isinstance(reason, dict) else reason
                    self.finish_reason = _printable(kind[:ERROR_MAX]) if isinstance(kind, str) else ""
                    if self.finish_reason in BROKEN_OFF:
                        self.fail(ABORTED, f"the server gave the answer up: finish_reason is {kind}", now_s)

    def _comment(self, text: bytes) -> None:
        name, _, value = text.partition(b" ")
        if name == ACCOUNT.encode():
            try:
                account = json.loads(value)
            except (ValueError, RecursionError):
                return
            if isinstance(account, dict):
                self._take_account(account)

    def _take_account(self, account: dict[str, Any]) -> None:
        """Beside those before it, if a record can bear it."""
        taken = {**(self.account or {}), **account}
        if _depth(taken) > ACCOUNT_DEPTH_MAX:
            return
        try:
            size = len(json.dumps(taken, allow_nan=False))
        except ValueError:
            return
        if size <= ACCOUNT_BYTES_MAX:
            self.account = taken

    def _whole(self, now_s: float) -> None:
        """A body that is no stream."""
        try:
            value = json.loads(self._rest)
        except (ValueError, RecursionError):
            value = None
        if self.status != 200:
            name, message = failure_of(value, self.status)
            self.fail(name, message or self._rest[:MESSAGE_MAX].decode(errors="replace"), now_s)
        elif not isinstance(value, dict):
            self.fail(BAD_ANSWER, "the answer is neither an event stream nor a JSON object", now_s)
        elif value.get("error") or value.get("object") == "error":
            self.fail(*failure_of(value, self.status), now_s)
        else:
            self._members(value, now_s)
            if not isinstance(value.get("choices"), list):
                self.fail(BAD_ANSWER, "the answer has no choices", now_s)
            else:
                size, self._has_reasoning = content_of(value)
                if size:
                    self._content(value, size, now_s)

    def _bad(self, now_s: float, message: str) -> bool:
        self.fail(BAD_ANSWER, message, now_s)
        return False
