"""Events of ``/v1/messages``, Anthropic's: named, with pings between, ended by ``message_stop``.

Decides which events have some of the answer and which are errors; see ``style``.
"""

from __future__ import annotations

import json
from typing import Any

from kvxfer.errors import OverloadedError
from kvxfer.openai import scanner
from kvxfer.openai.errors import INVALID_REQUEST
from kvxfer.openai.scanner import Kind
from kvxfer.openai.sse import Event, encode_object
from kvxfer.router import failure
from kvxfer.router.apis.style import is_comment, scanned, text_of
from kvxfer.router.failure import Failure

PING = "ping"
FRAMES = frozenset({"message_start", "content_block_start", PING})
END = "message_stop"
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_OVERLOADED = frozenset({"overloaded_error", "rate_limit_error"})
_KINDS = {
    INVALID_REQUEST: "invalid_request_error",
    "authentication_error": "authentication_error",
    "permission_error": "permission_error",
    "not_found_error": "not_found_error",
}
_KINDS_BY_STATUS = {
    "400": "invalid_request_error",
    "401": "authentication_error",
    "403": "permission_error",
    "404": "not_found_error",
    "413": "request_too_large",
    "422": "invalid_request_error",
    "429": "rate_limit_error",
}
"""Of engines' errors, whose ``code`` is the status."""


class MessagesStyle:
    LAST = b""
    END_MARKS: tuple[bytes, ...] = (b"message_stop", b'"error"')
    PING_MARKS: tuple[bytes, ...] = (b'"ping"',)

    def has_content(self, data: bytes) -> bool:
        """A block that starts with a tool's name is content: the name was generated."""
        if not data:
            return False
        scan = scanned(data)
        if scan is None:
            return True
        kind = text_of(scan, "type")
        return kind not in FRAMES or (kind == "content_block_start" and b'"tool_use"' in data)

    def is_keepalive(self, event: Event) -> bool:
        """Also a ping: Anthropic's clients take one at any time."""
        if not any(mark in event.data for mark in self.PING_MARKS):
            return is_comment(event)
        scan = scanned(event.data)
        return scan is not None and text_of(scan, "type") == PING

    def is_end(self, event: Event) -> bool:
        if b"message_stop" not in event.data:
            return False
        scan = scanned(event.data)
        return scan is not None and text_of(scan, "type") == END

    def failure(self, what: str, event: Event) -> Failure | None:
        """An ``error`` event, or an error object as other routes have it."""
        if b'"error"' not in event.data:
            return None
        scan = scanned(event.data)
        if scan is None or scan.kind("error") is not Kind.OBJECT:
            return None
        if text_of(scan, "type") != "error":
            return failure.from_event(what, event.data)
        try:
            error = json.loads(bytes(scanner.raw(scan, "error") or b""))
        except (ValueError, RecursionError):
            return None
        if error.get("type") in _OVERLOADED:
            error |= {"code": error.get("code") or OverloadedError.code, "retryable": True}
        return failure.from_event(what, _encoded({"error": error}, event.data))

    def end_with_error(self, body: dict[str, Any]) -> bytes:
        """``message_stop`` follows, as SGLang writes it: clients that do not know the error wait for it."""
        return b"event: error\ndata: " + encode_object(self.error_answer(body)) + b"\n\n" + _STOP

    def error_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Anthropic's object. The members of OpenAI's that it lacks stay: ``code`` and ``retryable`` are stable."""
        error = body["error"]
        kind = _KINDS.get(error["type"]) or _KINDS_BY_STATUS.get(str(error["code"]), "api_error")
        if error["code"] == OverloadedError.code:
            kind = "overloaded_error"
        elif error["code"] == "rate_limit_exceeded":
            kind = "rate_limit_error"
        elif error["code"] == "model_not_found":
            kind = "not_found_error"
        return {"type": "error", "error": {**error, "type": kind}}


def _encoded(value: dict[str, Any], otherwise: bytes) -> bytes:
    """Its bytes; ``otherwise`` where it holds a number that JSON has not, as 1e999 is read."""
    try:
        return encode_object(value)
    except (ValueError, RecursionError):
        return otherwise


MESSAGES = MessagesStyle()
