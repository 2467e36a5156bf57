"""The head of an answer. Decides which of its fields are the server's own: those that say where the answer ends."""

from __future__ import annotations

import http
from typing import Any

from kvxfer.errors import InvalidArgumentError
from kvxfer.openai.sse import encode_object
from kvxfer.serving.exchange import Headers

JSON = (b"content-type", b"application/json")
BODYLESS = frozenset({204, 304})
"""Statuses of answers that have no body, and no field that says how long it is."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
LEADING_ZERO = b"0"
"""Of the next chunk's size, sent ahead: the number is the same."""
CLOSE = (b"connection", b"close")

_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(200, 600)}


def split_fields(status: int, headers: Headers) -> tuple[list[tuple[bytes, bytes]], bool]:
    """A handler's own fields, and whether it asks that the connection ends with the answer.

    Fields about the length are left out. Raises InvalidArgumentError for a head that would be read as something else.
    """
    if status not in _STATUS_LINES:
        raise InvalidArgumentError(f"an answer cannot have the status {status}")
    fields, closes = [], False
    for name, value in headers:
        if b"\n" in value or b"\r" in value or b"\0" in value or b"\n" in name:
            raise InvalidArgumentError(f"the answer's field {name!r} has a line break or NUL")
        if name not in _FRAMING:
            fields.append((name, value))
        elif name == CLOSE[0]:
            closes = closes or CLOSE[1] in value.lower()
    return fields, closes


def encode_head(status: int, fields: Headers, more: bytes) -> bytes:
    """The bytes of a head; ``more`` are whole lines that are added."""
    lines = [_STATUS_LINES[status]]
    for name, value in fields:
        lines += (name, b": ", value, b"\r\n")
    lines += (more, b"\r\n")
    return b"".join(lines)


def whole_error(status: int, body: dict[str, Any]) -> bytes:
    """An answer with an error, after which the connection closes."""
    content = encode_object(body)
    return encode_head(status, [JSON, CLOSE], b"content-length: %d\r\n" % len(content)) + content
