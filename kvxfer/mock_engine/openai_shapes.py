"""The answers of ``/v1/completions`` and ``/v1/chat/completions``, whole and in chunks, as vLLM writes them.

Decides bytes only; it must never know when a token is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.mock_engine.asked import AnswerApi, AskedAnswer
from kvxfer.mock_engine.choice import ChoiceText
from kvxfer.mock_engine.shape import (
    DONE_CHUNK,
    PieceFormat,
    ShapeBase,
    TokenTotals,
    chunk,
    event,
    seeded_logprob,
    to_json,
)
from kvxfer.mock_engine.tokens import text_of_ids, unpack_ids

_MARK = "\x00"


def _split(value: dict[str, Any]) -> tuple[bytes, bytes]:
    """The JSON of ``value`` before and after the one string that is _MARK."""
    before, _, after = to_json(value).partition(b"\\u0000")
    return before, after


class OpenAiShape(ShapeBase):
    """Completions and chat, which differ in where a choice has its text."""

    def __init__(self, asked: AskedAnswer, choices: Sequence[ChoiceText], answer_id: str) -> None:
        super().__init__(asked, choices, answer_id)
        self._is_chat = asked.api is AnswerApi.CHAT
        self._is_fast = asked.logprobs is None and not asked.has_token_ids
        kind = ("chat.completion.chunk" if asked.stream else "chat.completion") if self._is_chat else "text_completion"
        self._head = {"id": answer_id, "object": kind, "created": self.created, "model": asked.model}
        self._formats: dict[int, PieceFormat] = {}

    def begin(self, choice: ChoiceText) -> bytes:
        if not self._is_chat:
            return self._echo(choice) if self.asked.echoes else b""
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if self.asked.tool:
            function = {"name": self.asked.tool, "arguments": ""}
            call = {"id": self._call_id(choice), "type": "function", "index": 0, "function": function}
            delta = {"role": "assistant", "content": None, "tool_calls": [call]}
        made = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event({**self._head, "choices": [made]})

    def token(self, choice: ChoiceText, number: int) -> bytes:
        is_last = number + 1 == choice.count
        if not self._is_fast:
            return event({**self._head, "choices": [self._detailed(choice, number, is_last)]})
        made = self._formats.get(choice.index)
        if made is None:
            made = self._formats[choice.index] = self._format(choice)
        piece = choice.piece(number)
        return made.any(piece, is_last=is_last) if is_last or not choice.is_plain else made.plain(piece)

    def end(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        closing = {**self._head, "choices": [], **extra}
        if self.asked.includes_usage:
            return event({**closing, "usage": totals.as_dict()}) + DONE_CHUNK
        return event(closing) + DONE_CHUNK if extra else DONE_CHUNK

    def whole(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        made = [self._whole_choice(choice) for choice in self.choices]
        return to_json({**self._head, "choices": made, "usage": totals.as_dict(has_nulls=True), **extra})

    def _format(self, choice: ChoiceText) -> PieceFormat:
        before, after = _split({**self._head, "choices": [self._text_choice(choice, None)]})
        _, last = _split({**self._head, "choices": [self._text_choice(choice, choice.finish_reason)]})
        return PieceFormat(b"data: " + before, after + b"\n\n", last + b"\n\n")

    def _text_choice(self, choice: ChoiceText, reason: str | None) -> dict[str, Any]:
        if not self._is_chat:
            return {"index": choice.index, "text": _MARK, "logprobs": None, "finish_reason": reason}
        delta: dict[str, Any] = {"content": _MARK}
        if self.asked.tool:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": _MARK}}]}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _detailed(self, choice: ChoiceText, number: int, is_last: bool) -> dict[str, Any]:
        """A chunk with log probabilities or token ids: made anew for each token."""
        text = choice.text(number + 1)[len(choice.text(number)) :] if not choice.is_plain else None
        text = choice.piece(number).decode() if text is None else text
        made: dict[str, Any] = {"index": choice.index, "logprobs": self._logprobs(choice, number, number + 1)}
        if not self._is_chat:
            made["text"] = text
        elif self.asked.tool:
            made["delta"] = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        else:
            made["delta"] = {"content": text}
        if self.asked.has_token_ids:
            made["token_ids"] = [choice.token_id(number)]
        return {**made, "finish_reason": choice.finish_reason if is_last else None}

    def _logprobs(self, choice: ChoiceText, first: int, last: int) -> dict[str, Any] | None:
        wanted = self.asked.logprobs
        if wanted is None:
            return None
        ids = [choice.token_id(number) for number in range(first, last)]
        tops = [[(token, 0), *((token + rank, rank) for rank in range(1, wanted))] for token in ids]
        if self._is_chat:
            return {"content": [self._chat_logprob(token, top) for token, top in zip(ids, tops, strict=True)]}
        return {
            "text_offset": [3 * number for number in range(first, last)],
            "tokens": [text_of_ids([token]) for token in ids],
            "token_logprobs": [seeded_logprob(token) for token in ids],
            "top_logprobs": [{text_of_ids([one]): seeded_logprob(one, rank) for one, rank in top} for top in tops],
        }

    def _chat_logprob(self, token: int, top: list[tuple[int, int]]) -> dict[str, Any]:
        def entry(one: int, rank: int) -> dict[str, Any]:
            text = text_of_ids([one])
            return {"token": text, "logprob": seeded_logprob(one, rank), "bytes": list(text.encode())}

        tops = [entry(one, rank) for one, rank in top] if self.asked.logprobs else []
        return {**entry(token, 0), "top_logprobs": tops}

    def _whole_choice(self, choice: ChoiceText) -> dict[str, Any]:
        made: dict[str, Any] = {"index": choice.index, "logprobs": self._logprobs(choice, 0, choice.count)}
        text = choice.text()
        if not self._is_chat:
            made["text"] = self._prompt_text(choice) + text if self.asked.echoes else text
        elif self.asked.tool:
            function = {"name": self.asked.tool, "arguments": text}
            call = {"id": self._call_id(choice), "type": "function", "function": function}
            made["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
        else:
            made["message"] = {"role": "assistant", "content": text}
        if self.asked.has_token_ids:
            made["token_ids"] = [choice.token_id(number) for number in range(choice.count)]
            made["prompt_token_ids"] = unpack_ids(choice.prompt.packed)
        return {**made, "finish_reason": choice.finish_reason, "stop_reason": None}

    def _call_id(self, choice: ChoiceText) -> str:
        return f"call_{choice.prompt.seed:016x}{choice.index}"

    def _prompt_text(self, choice: ChoiceText) -> str:
        return text_of_ids(unpack_ids(choice.prompt.packed))

    def _echo(self, choice: ChoiceText) -> bytes:
        made = {"index": choice.index, "text": self._prompt_text(choice), "logprobs": None, "finish_reason": None}
        return chunk(b"data: " + to_json({**self._head, "choices": [made]}) + b"\n\n")
