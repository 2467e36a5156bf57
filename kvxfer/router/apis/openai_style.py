"""Events of ``/v1/completions``, ``/v1/chat/completions`` and SGLang's ``/generate``, which end with ``[DONE]``.

Decides which chunks have some of the answer and which are errors; see ``style``.
"""

from __future__ import annotations

import json
from typing import Any

from kvxfer.errors import OverloadedError
from kvxfer.openai import scanner
from kvxfer.openai.errors import INVALID_REQUEST, SERVER_ERROR, error_body
from kvxfer.openai.scanner import Kind
from kvxfer.openai.sse import DONE, Event, encode_event
from kvxfer.router import failure
from kvxfer.router.apis.style import is_comment, scanned
from kvxfer.router.failure import Failure, FailureKind

_ABORT = b'"abort"'


class OpenAiStyle:
    """Chunks with ``choices``."""

    LAST = DONE
    PING_MARKS: tuple[bytes, ...] = ()
    END_MARKS: tuple[bytes, ...] = (b"[DONE]", b'"error"')

    def has_content(self, data: bytes) -> bool:
        """A text, a tool's call, reasoning, the reason why a choice ended. The role alone is none, nor is a chunk that
        has only usage."""
        if not data:
            return False
        scan = scanned(data)
        if scan is None or scan.kind("choices") is not Kind.ARRAY:
            return True  # [DONE], an error, or what cannot be read
        try:
            choices = json.loads(bytes(scanner.raw(scan, "choices") or b""))
            return any(
                choice.get("finish_reason")
                or choice.get("text")
                or any(value for name, value in (choice.get("delta") or {}).items() if name != "role")
                for choice in choices
            )
        except (ValueError, RecursionError, TypeError, AttributeError):
            return True

    def is_keepalive(self, event: Event) -> bool:
        return is_comment(event)

    def is_end(self, event: Event) -> bool:
        return event.is_done

    def failure(self, what: str, event: Event) -> Failure | None:
        return failure.from_event(what, event.data)

    def end_with_error(self, body: dict[str, Any]) -> bytes:
        return encode_event(body) + self.LAST

    def error_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        return body


class GenerateStyle(OpenAiStyle):
    """SGLang's own: each event has all of the text so far. A request that the engine aborted has no ``error``: its last
    event says ``"finish_reason": {"type": "abort", "message": ..., "status_code": ...}``."""

    END_MARKS = (*OpenAiStyle.END_MARKS, _ABORT)

    def has_content(self, data: bytes) -> bool:
        """Every event but a comment: SGLang writes none before there is a token."""
        return bool(data)

    def failure(self, what: str, event: Event) -> Failure | None:
        return super().failure(what, event) or _aborted(what, event.data)


def _aborted(what: str, data: bytes) -> Failure | None:
    if _ABORT not in data:
        return None
    scan = scanned(data)
    if scan is None or scan.kind("meta_info") is not Kind.OBJECT:
        return None
    try:
        reason = json.loads(bytes(scanner.raw(scan, "meta_info") or b"")).get("finish_reason")
    except (ValueError, RecursionError):
        return None
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return None
    message, status = reason.get("message"), reason.get("status_code")
    text = message if isinstance(message, str) and message else f"the {what} worker aborted the request"
    if status == failure.UNAVAILABLE or status == failure.TOO_MANY:
        return Failure(FailureKind.OVERLOADED, failure.UNAVAILABLE, error_body(OverloadedError(text)))
    if type(status) is int and 400 <= status < 500:
        return Failure(FailureKind.REFUSED, status, error_body(text, kind=INVALID_REQUEST, code=str(status)))
    return Failure(FailureKind.ERROR, failure.INTERNAL, error_body(text, kind=SERVER_ERROR, code="aborted"))


OPENAI = OpenAiStyle()
GENERATE = GenerateStyle()
