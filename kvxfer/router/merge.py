"""What the router adds to D's account of the transfer: who took which part, the attempt, and P's own timings.

Touches only an object that already has a ``kvxfer`` member; every other byte passes as it came.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvxfer.openai.sse import Event, encode_event, encode_object

ACCOUNT = "kvxfer"
_MARK = b'"kvxfer"'


def has_account(content: bytes) -> bool:
    """Whether there may be an account in these bytes; inside a JSON string the quotes would be escaped."""
    return _MARK in content


def merge_event(event: Event, extra: dict[str, Any]) -> bytes:
    """The event's bytes, with ``extra`` in its account if it has one."""
    return _merged(event.data, encode_event, extra) or event.raw


def merge_body(content: bytes, extra: dict[str, Any]) -> bytes:
    """A whole answer's bytes, with ``extra`` in its account if it has one."""
    return (has_account(content) and _merged(content, encode_object, extra)) or content


def _merged(content: bytes, encode: Callable[[Any], bytes], extra: dict[str, Any]) -> bytes | None:
    """None where there is no account, or what could be read cannot be written again: a number like 1e999."""
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or not isinstance(values.get(ACCOUNT), dict):
            return None
        values[ACCOUNT].update(extra)
        return encode(values)
    except (ValueError, RecursionError):
        return None
