"""What every answer's shape has: framing of chunks, usage, and the seam that the exchanges write through.

Decides bytes from counts. It must never know when a token is due, or what a connection is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvxfer.mock_engine.asked import AskedAnswer
from kvxfer.mock_engine.choice import ChoiceText
from kvxfer.mock_engine.tokens import TOKEN_BYTES

to_json = msgspec.json.encode


def chunk(payload: bytes) -> bytes:
    """``payload`` as one chunk of HTTP's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event as one chunk."""
    head = f"event: {name}\n".encode() if name else b""
    return chunk(head + b"data: " + to_json(value) + b"\n\n")


DONE_CHUNK = chunk(b"data: [DONE]\n\n")


class TokenTotals:
    """The counts that a usage object tells. Without ``has_details`` OpenAI's and Anthropic's usage have no cached
    tokens; Responses and SGLang's ``/generate`` always have them.
    """

    __slots__ = ("cached", "completion", "has_details", "prompt")

    def __init__(self, prompt: int, completion: int, cached: int, *, has_details: bool = True) -> None:
        self.prompt, self.completion, self.cached = prompt, completion, cached
        self.has_details = has_details

    def as_dict(self, *, has_nulls: bool = False) -> dict[str, Any]:
        """As completions and chat have it. ``has_nulls``: what is not told is null, as in a whole answer of vLLM and
        SGLang, and not left out, as in a stream.
        """
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
        }
        if self.has_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        elif has_nulls:
            usage["prompt_tokens_details"] = None
        return usage

    def of_anthropic(self) -> dict[str, Any]:
        """Anthropic's ``input_tokens`` are those that were not cached, in vLLM only where cached ones are told (vLLM
        #40912).
        """
        if not self.has_details:
            return {"input_tokens": self.prompt, "output_tokens": self.completion}
        return {
            "input_tokens": max(0, self.prompt - self.cached),
            "output_tokens": self.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
        }


class AnswerShape(Protocol):
    """How one request's answer looks. All methods that return chunks return them framed, or nothing."""

    cached: list[int]
    """Cached prompt tokens of each choice, set before its first token."""

    def begin(self, choice: ChoiceText) -> bytes:
        """What comes before the first token of ``choice``."""

    def token(self, choice: ChoiceText, number: int) -> bytes:
        """The chunk of one token."""

    def end(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        """What comes after the last token of the last sequence; ``extra`` are members of the last chunk."""

    def whole(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""


class PieceFormat:
    """Chunks that differ only in their piece of text; built once a sequence."""

    __slots__ = ("_after", "_before", "_framed_after", "_framed_before", "_last")

    def __init__(self, before: bytes, after: bytes, last: bytes) -> None:
        self._before, self._after, self._last = before, after, last
        self._framed_before = b"%x\r\n%b" % (len(before) + TOKEN_BYTES + len(after), before)
        self._framed_after = after + b"\r\n"

    def plain(self, piece: bytes) -> bytes:
        """A piece of TOKEN_BYTES that is not the last."""
        return self._framed_before + piece + self._framed_after

    def any(self, piece: bytes, *, is_last: bool) -> bytes:
        return chunk(self._before + piece + (self._last if is_last else self._after))


class ShapeBase:
    """The members that all chunks of an answer share."""

    def __init__(self, asked: AskedAnswer, choices: Sequence[ChoiceText], answer_id: str) -> None:
        self.asked = asked
        self.choices = choices
        self.answer_id = answer_id
        self.created = int(time.time())
        self.cached = [0] * len(choices)


def seeded_logprob(token_id: int, rank: int = 0) -> float:
    """A logarithm of a probability that depends on the token alone."""
    return -0.01 * (1 + token_id % 89) - rank
