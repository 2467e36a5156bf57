"""Events of ``/v1/responses``: named, numbered, and ended by a whole Response object; there is no ``[DONE]``.

Decides which events have some of the answer and which are errors; see ``style``.
"""

from __future__ import annotations

import json
from typing import Any

from kvxfer.openai import scanner
from kvxfer.openai.errors import SERVER_ERROR
from kvxfer.openai.scanner import Kind
from kvxfer.openai.sse import Event, encode_object
from kvxfer.router import failure
from kvxfer.router.apis.style import is_comment, scanned, text_of
from kvxfer.router.failure import Failure

FRAMES = frozenset(
    {
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_part.added",
        "response.reasoning_summary_part.added",
    }
)
"""Types of events that an engine writes before there is a token."""
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})


class ResponsesStyle:
    LAST = b""
    PING_MARKS: tuple[bytes, ...] = ()
    END_MARKS: tuple[bytes, ...] = (
        b"response.completed",
        b"response.incomplete",
        b"response.failed",
        b"response.cancelled",
        b'"error"',
        b"[DONE]",
    )

    def has_content(self, data: bytes) -> bool:
        if not data:
            return False
        scan = scanned(data)
        return scan is None or text_of(scan, "type") not in FRAMES

    def is_keepalive(self, event: Event) -> bool:
        return is_comment(event)

    def is_end(self, event: Event) -> bool:
        """Also ``[DONE]``, which some engines write behind the last event."""
        if event.is_done:
            return True
        if not any(mark in event.data for mark in self.END_MARKS):
            return False
        scan = scanned(event.data)
        return scan is not None and text_of(scan, "type") in ENDS

    def failure(self, what: str, event: Event) -> Failure | None:
        """An ``error`` event, an error object as other routes have it, or a Response that failed."""
        if b'"error"' not in event.data and b"response.failed" not in event.data:
            return None
        scan = scanned(event.data)
        if scan is None:
            return None
        kind = text_of(scan, "type")
        if scan.kind("error") is Kind.OBJECT:
            return failure.from_event(what, event.data)
        if kind == "error":
            return failure.from_event(
                what,
                encode_object({"error": {"message": text_of(scan, "message"), "code": text_of(scan, "code") or None}}),
            )
        if kind == "response.failed":
            return failure.from_event(what, encode_object({"error": _error_of(scan, what)}))
        return None

    def end_with_error(self, body: dict[str, Any]) -> bytes:
        """OpenAI's ``error`` event. ``error`` stands in it too: by that its clients tell that a stream broke."""
        error = body["error"]
        event = {
            "type": "error",
            "sequence_number": 0,
            "code": error["code"],
            "message": error["message"],
            "param": error["param"],
            "error": error,
        }
        return b"event: error\ndata: " + encode_object(event) + b"\n\n"

    def error_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        return body


def _error_of(scan: scanner.Scan, what: str) -> dict[str, Any]:
    """The error of a Response that failed, which need not say why."""
    try:
        error = json.loads(bytes(scanner.raw(scan, "response") or b"")).get("error")
    except (ValueError, RecursionError, AttributeError):
        error = None
    error = error if isinstance(error, dict) else {}
    message = error.get("message")
    return {
        "type": SERVER_ERROR,
        **error,
        "message": message if isinstance(message, str) else f"the {what} worker's response failed",
    }


RESPONSES = ResponsesStyle()
