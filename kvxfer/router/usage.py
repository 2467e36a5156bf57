"""What an answer says of its tokens, in the words of each API. Decides where these stand; it must never know what they
are counted for."""

from __future__ import annotations

import json
from typing import Any

MARKS = (b'"prompt_tokens"', b'"input_tokens"', b'"output_tokens"')
"""One of these is in every event that says something of them."""
_PLACES = ("response", "message")
"""Members in which ``/v1/responses`` and ``/v1/messages`` have their usage."""
_PROMPT = ("prompt_tokens", "input_tokens")
_ANSWER = ("completion_tokens", "output_tokens")


class UsageSeen:
    """Of one request. Later events, and another attempt, say the same or more: the most counts, and nothing twice."""

    __slots__ = ("answer", "prompt")

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.answer: int | None = None
        """None where nothing was said."""

    def note(self, content: bytes) -> None:
        """Look at a whole answer, or the data of an event."""
        if not any(mark in content for mark in MARKS):
            return
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            return
        if isinstance(values, dict):
            for place in (values, *map(values.get, _PLACES)):
                if isinstance(place, dict):
                    self._take(place.get("usage"))
            self._take(values.get("meta_info"))

    def _take(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self.prompt = _most(self.prompt, usage, _PROMPT)
        self.answer = _most(self.answer, usage, _ANSWER)


def _most(known: int | None, usage: dict[str, Any], names: tuple[str, ...]) -> int | None:
    counts = [usage[name] for name in names if type(usage.get(name)) is int and usage[name] >= 0]
    return max([*counts, *([] if known is None else [known])], default=None)
