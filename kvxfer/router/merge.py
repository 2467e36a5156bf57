"""What the router adds to D's account of the transfer: who took which part, the attempt, and P's own timings.

Touches only an object that already has a ``kvxfer`` member; every other byte passes as it came.
"""

from __future__ import annotations

import json
from typing import Any

from kvxfer.errors import ProtocolViolation
from kvxfer.openai.sse import Event, encode_event

ACCOUNT = "kvxfer"
_MARK = b'"kvxfer"'


def has_account(content: bytes) -> bool:
    """Whether there may be an account in these bytes; inside a JSON string the quotes would be escaped."""
    return _MARK in content


def merge_event(event: Event, extra: dict[str, Any]) -> bytes:
    """The event's bytes, with ``extra`` in its account if it has one."""
    try:
        values = event.json()
    except ProtocolViolation:
        return event.raw
    return encode_event(values) if _merge(values, extra) else event.raw


def merge_body(content: bytes, extra: dict[str, Any]) -> bytes:
    """A whole answer's bytes, with ``extra`` in its account if it has one."""
    if not has_account(content):
        return content
    values = json.loads(content)
    return json.dumps(values, separators=(",", ":")).encode() if _merge(values, extra) else content


def _merge(values: Any, extra: dict[str, Any]) -> bool:
    if not isinstance(values, dict) or not isinstance(values.get(ACCOUNT), dict):
        return False
    values[ACCOUNT].update(extra)
    return True
