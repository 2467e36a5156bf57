"""What an answer says of its tokens, in the words of each API. Decides where these stand; it must never know what they
are counted for."""

from __future__ import annotations

import json
from typing import Any

MARKS = (b'"prompt_tokens"', b'"input_tokens"', b'"output_tokens"')
"""One of these is in every event that says something of them."""
COUNT_MAX = (1 << 31) - 1
"""What is more counts no tokens of one answer: it is as if it were not said."""
SEQUENCES_MAX = 4096
"""Of one answer of SGLang's ``/generate``; those beyond it are not counted."""
_PROMPT = ("prompt_tokens", "input_tokens")
_ANSWER = ("completion_tokens", "output_tokens")

_Counts = tuple[int | None, int | None]


class UsageSeen:
    """Of one request. Later events, and another attempt, say the same or more: the most counts, and nothing twice."""

    __slots__ = ("_sequences", "answer", "prompt")

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.answer: int | None = None
        """None where nothing was said."""
        self._sequences: dict[int, _Counts] = {}
        """Of SGLang's ``/generate``, which counts each prompt and each of its answers by itself."""

    def note(self, content: bytes) -> None:
        """Look at a whole answer, or the data of an event."""
        if not any(mark in content for mark in MARKS):
            return
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            return
        if isinstance(values, list):
            for number, one in enumerate(values[:SEQUENCES_MAX]):
                self._take_sequence(number, one)
        elif isinstance(values, dict):
            self._take(values.get("usage"))
            self._take(_usage_in(values.get("response")))  # of `/v1/responses`
            # `/v1/messages` begins its stream so: of the answer it says nothing yet, and the client may leave.
            self._take(_usage_in(values.get("message")), has_answer=False)
            self._take_sequence(_index(values.get("index")), values)

    def _take(self, usage: Any, *, has_answer: bool = True) -> None:
        prompt, answer = _counted(usage, (self.prompt, self.answer))
        self.prompt = prompt
        if has_answer:
            self.answer = answer

    def _take_sequence(self, number: int, values: Any) -> None:
        said = values.get("meta_info") if isinstance(values, dict) else None
        if not isinstance(said, dict):
            return
        before = self._sequences.get(number, (None, None))
        self._sequences[number] = after = _counted(said, before)
        self.prompt = _moved(self.prompt, before[0], after[0])
        self.answer = _moved(self.answer, before[1], after[1])


def _usage_in(values: Any) -> Any:
    return values.get("usage") if isinstance(values, dict) else None


def _index(value: Any) -> int:
    return value if type(value) is int and 0 <= value < SEQUENCES_MAX else 0


def _counted(usage: Any, known: _Counts) -> _Counts:
    if not isinstance(usage, dict):
        return known
    return _most(known[0], usage, _PROMPT), _most(known[1], usage, _ANSWER)


def _most(known: int | None, usage: dict[str, Any], names: tuple[str, ...]) -> int | None:
    counts = [usage[name] for name in names if type(usage.get(name)) is int and 0 <= usage[name] <= COUNT_MAX]
    return max([*counts, *([] if known is None else [known])], default=None)


def _moved(total: int | None, before: int | None, after: int | None) -> int | None:
    """The sum, where one of its parts is another one now."""
    return total if after is None else (total or 0) + after - (before or 0)
