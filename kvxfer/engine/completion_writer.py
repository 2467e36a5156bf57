"""What an answer looks like on the wire: OpenAI's completion and chat objects, whole and in chunks, and the prefill
leg's.

It decides shapes only; it must never know how text was made or what reads it.
"""

from __future__ import annotations

import time
from typing import Any

from kvxfer.engine.completion_parser import ParsedCompletion
from kvxfer.engine.request import Delta, Outcome, PrefillOutcome


class CompletionWriter:
    """The objects of one answer, all with the same id and time."""

    def __init__(self, parsed: ParsedCompletion, model: str) -> None:
        self._parsed = parsed
        kind = "chat.completion" if parsed.is_chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if parsed.is_chat else 'cmpl'}-{parsed.request.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, token_ids: list[int], finish_reason: str, outcome: Outcome) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._parsed.is_chat else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        if self._parsed.has_token_ids:
            choice["token_ids"] = token_ids
        return {**self._head, "choices": [choice], "usage": _usage(outcome), "kvxfer": self._report(outcome)}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._parsed.is_chat else []

    def piece(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunk for one delta; none where it adds nothing that was asked for."""
        if not delta.text and not (self._parsed.has_token_ids and delta.token_ids):
            return []
        chunk = self._chunk({"content": delta.text} if self._parsed.is_chat else delta.text)
        if self._parsed.has_token_ids:
            chunk["choices"][0]["token_ids"] = list(delta.token_ids)
        return [chunk]

    def last(self, finish_reason: str, outcome: Outcome) -> list[dict[str, Any]]:
        """What a stream ends with, before its end mark: the finish chunk, and the usage where it was asked for."""
        chunks = [self._chunk({} if self._parsed.is_chat else "", finish_reason)]
        if self._parsed.has_usage:
            chunks.append({**self._chunk_head(), "choices": [], "usage": _usage(outcome)})
        chunks[-1]["kvxfer"] = self._report(outcome)
        return chunks

    def prefilled(self, outcome: PrefillOutcome, transfer_id: str) -> dict[str, Any]:
        """The body of a prefill leg's answer."""
        return {
            "object": "kvxfer.prefill",
            "id": self._parsed.request.request_id,
            "model": self._head["model"],
            "usage": {"prompt_tokens": outcome.prompt_tokens, "cached_tokens": outcome.cached_tokens},
            "timings": {
                "queue_s": round(outcome.queue_s, 6),
                "prefill_s": round(outcome.prefill_s, 6),
                "ended_unix_s": outcome.ended_unix_s,
            },
            "transfer_id": transfer_id,
        }

    def _report(self, outcome: Outcome) -> dict[str, Any]:
        ignored = self._parsed.ignored_fields
        return {**outcome.as_dict(), "ignored_fields": list(ignored)} if ignored else outcome.as_dict()

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._parsed.is_chat else dict(self._head)

    def _chunk(self, content: Any, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self._parsed.is_chat else "text": content}
        chunk = {**self._chunk_head(), "choices": [{**choice, "logprobs": None, "finish_reason": finish_reason}]}
        return {**chunk, "usage": None} if self._parsed.has_usage else chunk


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
    }
