"""The answers of ``/v1/responses`` (OpenAI), ``/v1/messages`` (Anthropic) and ``/generate`` (SGLang).

Decides bytes only; it must never know when a token is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.mock_engine.asked import AnswerApi, AskedAnswer
from kvxfer.mock_engine.choice import ChoiceText
from kvxfer.mock_engine.openai_shapes import OpenAiShape
from kvxfer.mock_engine.shape import (
    DONE_CHUNK,
    AnswerShape,
    ShapeBase,
    TokenTotals,
    event,
    seeded_logprob,
    to_json,
)
from kvxfer.mock_engine.tokens import unpack_ids


class ResponsesShape(ShapeBase):
    """One message as a Response object, or as its named events, which are numbered."""

    def __init__(self, asked: AskedAnswer, choices: Sequence[ChoiceText], answer_id: str) -> None:
        super().__init__(asked, choices, answer_id)
        self._number = 0
        self._at = {"item_id": f"msg_{answer_id}", "output_index": 0, "content_index": 0}

    def begin(self, choice: ChoiceText) -> bytes:
        item = {**self._item(""), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        started = self._response("in_progress", [], None)
        return (
            self._event("response.created", response=started)
            + self._event("response.in_progress", response=started)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._at, part=part)
        )

    def token(self, choice: ChoiceText, number: int) -> bytes:
        return self._event("response.output_text.delta", **self._at, delta=choice.piece(number).decode(), logprobs=[])

    def end(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        text = self.choices[0].text()
        item = self._item(text)
        name = "response.incomplete" if self._status() == "incomplete" else "response.completed"
        return (
            self._event("response.output_text.done", **self._at, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._at, part=item["content"][0])
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(name, response={**self._response(self._status(), [item], totals), **extra})
        )

    def whole(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        item = self._item(self.choices[0].text())
        return to_json({**self._response(self._status(), [item], totals), **extra})

    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _event(self, name: str, **members: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **members}, name)

    def _item(self, text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": []}
        item_id, status = self._at["item_id"], self._status()
        return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": [part]}

    def _response(self, status: str, output: list[dict[str, Any]], totals: TokenTotals | None) -> dict[str, Any]:
        usage = totals and {
            "input_tokens": totals.prompt,
            "input_tokens_details": {"cached_tokens": totals.cached},
            "output_tokens": totals.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": totals.prompt + totals.completion,
        }
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "model": self.asked.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }


class MessagesShape(ShapeBase):
    """Anthropic's message, or its named events."""

    def begin(self, choice: ChoiceText) -> bytes:
        message = {**self._message([], None), "usage": {"input_tokens": choice.prompt.count, "output_tokens": 0}}
        block = {"type": "text", "text": ""}
        return event({"type": "message_start", "message": message}, "message_start") + event(
            {"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start"
        )

    def token(self, choice: ChoiceText, number: int) -> bytes:
        delta = {"type": "text_delta", "text": choice.piece(number).decode()}
        return event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")

    def end(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        closing = {"type": "message_delta", "delta": delta, "usage": totals.of_anthropic(), **extra}
        return (
            event({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + event(closing, "message_delta")
            + event({"type": "message_stop"}, "message_stop")
        )

    def whole(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        content = [{"type": "text", "text": self.choices[0].text()}]
        return to_json({**self._message(content, self._reason()), "usage": totals.of_anthropic(), **extra})

    def _reason(self) -> str:
        if self.choices[0].finish_reason == "length":
            return "max_tokens"
        return "stop_sequence" if self.asked.stops else "end_turn"

    def _message(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
        }


class GenerateShape(ShapeBase):
    """SGLang's own: each event has all of the text so far."""

    def begin(self, choice: ChoiceText) -> bytes:
        return b""

    def token(self, choice: ChoiceText, number: int) -> bytes:
        return event(self._value(choice, number + 1))

    def end(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        return DONE_CHUNK

    def whole(self, totals: TokenTotals, extra: dict[str, Any]) -> bytes:
        values = [{**self._value(choice, choice.count), **extra} for choice in self.choices]
        return to_json(values if self.asked.is_batch else values[0])

    def _value(self, choice: ChoiceText, count: int) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if count == choice.count:
            reason = {"type": choice.finish_reason, "length": count}
        meta: dict[str, Any] = {
            "id": self.answer_id if len(self.choices) == 1 else f"{self.answer_id}-{choice.index}",
            "finish_reason": reason,
            "prompt_tokens": choice.prompt.count,
            "completion_tokens": count,
            "cached_tokens": self.cached[choice.index],
            "weight_version": "default",
        }
        if self.asked.logprobs is not None:
            prompt = unpack_ids(choice.prompt.packed)
            ids = [choice.token_id(number) for number in range(count)]
            meta["input_token_logprobs"] = [[seeded_logprob(token), token, None] for token in prompt]
            meta["output_token_logprobs"] = [[seeded_logprob(token), token, None] for token in ids]
        value = {
            "text": choice.text(count),
            "output_ids": [choice.token_id(number) for number in range(count)],
            "meta_info": meta,
        }
        return {**value, "index": choice.index} if self.asked.stream and self.asked.is_batch else value


_SHAPES: dict[AnswerApi, type[OpenAiShape | ResponsesShape | MessagesShape | GenerateShape]] = {
    AnswerApi.COMPLETION: OpenAiShape,
    AnswerApi.CHAT: OpenAiShape,
    AnswerApi.RESPONSES: ResponsesShape,
    AnswerApi.MESSAGES: MessagesShape,
    AnswerApi.GENERATE: GenerateShape,
}


def shape_of(asked: AskedAnswer, choices: Sequence[ChoiceText], answer_id: str) -> AnswerShape:
    """The shape of the answer to ``asked``."""
    return _SHAPES[asked.api](asked, choices, answer_id)
