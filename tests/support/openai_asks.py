"""What clients ask an engine for, or a router, through the real `openai` package; and what came back of it: the text,
the tokens where the engine says them, the headers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import openai

TOKENS = 16
GREEDY: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}
"""The field beside OpenAI's own is both vLLM's and SGLang's."""
GREEDY_IDS: Any = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
"""Where the tokens are to be told: vLLM does in streams too."""


@dataclasses.dataclass
class Said:
    """One answer, whole, or put together again."""

    text: str
    tokens: list[int]
    headers: Mapping[str, str]
    chunks: list[Any]

    @property
    def answer(self) -> tuple[str, list[int]]:
        return self.text, self.tokens


class Asks:
    """A client of the server at ``url``, that asks for one model, with ``more`` in each body."""

    def __init__(self, url: str, model: str, more: dict[str, Any] = GREEDY) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)
        self.url, self._model, self._more = url, model, more

    def __enter__(self) -> Asks:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def complete(self, prompt: str | Sequence[int], *, stream: bool = False, tokens: int = TOKENS, **more: Any) -> Said:
        create: Any = self.client.completions.with_raw_response.create
        raw = create(model=self._model, prompt=prompt, max_tokens=tokens, stream=stream, **{**self._more, **more})
        chunks = list(raw.parse()) if stream else [raw.parse()]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        return Said("".join(choice.text for choice in choices), _ids(choices), raw.headers, chunks)

    def chat(self, text: str, *, stream: bool = False, tokens: int = TOKENS, **more: Any) -> Said:
        messages: Any = [{"role": "user", "content": text}]
        create: Any = self.client.chat.completions.with_raw_response.create
        raw = create(model=self._model, messages=messages, max_tokens=tokens, stream=stream, **{**self._more, **more})
        chunks = list(raw.parse()) if stream else [raw.parse()]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        parts = [choice.delta if stream else choice.message for choice in choices]
        return Said("".join(part.content or "" for part in parts), _ids(choices), raw.headers, chunks)

    def response(self, text: str, *, stream: bool = False, tokens: int = TOKENS) -> str:
        create: Any = self.client.responses.create
        made = create(model=self._model, input=text, max_output_tokens=tokens, temperature=0, stream=stream)
        if not stream:
            return str(made.output_text)
        return "".join(event.delta for event in made if event.type == "response.output_text.delta")


def _ids(choices: Sequence[Any]) -> list[int]:
    return [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
