"""The two request bodies of the OpenAI API as the built-in engine reads them: what it has, with its bounds.

Decides what is refused before a prompt becomes tokens: a value out of its range, and a field that would change the
answer and that this engine does not have (:mod:`kvxfer.engine.unsupported`). It must never know which models exist or
how long a context is.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from kvxfer.engine import unsupported
from kvxfer.openai import schemas
from kvxfer.openai.schemas import INTEGER_MAX, MESSAGES_MAX, check_text, wrong

STOPS_MAX = 4
COMPLETION_TOKENS_DEFAULT = 16


def _check_prompt(value: Any) -> Any:
    prompt = schemas.check_prompt(value)
    if isinstance(prompt, list) and type(prompt[0]) is not int:
        if len(prompt) > 1:
            wrong("a list of several prompts is not supported: send one prompt a request")
        return prompt[0]
    return prompt


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        wrong("must be a string or a list of strings")
    if len(stops) > STOPS_MAX:
        wrong(f"must have at most {STOPS_MAX} strings")
    if not all(stops):
        wrong("must not contain an empty string")
    return [check_text(stop) for stop in stops]


def _check_content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value if value is None else check_text(value)
    if not isinstance(value, list):
        wrong("must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            wrong('only parts of {"type": "text", "text": ...} are supported')
        texts.append(check_text(part["text"]))
    return "".join(texts)


class StreamOptions(schemas.Model):
    """How a stream looks."""

    include_usage: bool = False


class ChatMessage(schemas.Message):
    """One chat message; ``content`` given as text parts is joined into one string, ``None`` where there is none."""

    content: Annotated[str | None, BeforeValidator(_check_content)] = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            wrong(f"content is required for role {self.role!r}")
        return self


class _Answer(BaseModel):
    """What both kinds of request share: how the answer is made, and what is done with it."""

    max_tokens: int | None = Field(default=None, ge=1, le=INTEGER_MAX)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    stop: Annotated[list[str], BeforeValidator(_check_stop)] = Field(default_factory=list)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the last data event of a stream must carry the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_Answer, schemas.CompletionRequest):
    """``POST /v1/completions``: ``prompt`` is one string or one list of token ids, or a list with one of these."""

    prompt: Annotated[Any, BeforeValidator(_check_prompt)] = None

    @property
    def max_new_tokens(self) -> int:
        """How many tokens to generate at most; OpenAI's default where the client gave none."""
        return COMPLETION_TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens


class ChatCompletionBody(_Answer, schemas.ChatCompletionRequest):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MESSAGES_MAX)  # type: ignore[assignment]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INTEGER_MAX)

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens to generate at most, or None for the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def parse_completion(body: bytes | dict[str, Any]) -> CompletionBody:
    """Read a body of ``/v1/completions``; raise RequestError that names the field."""
    values = schemas.load_object(body) if isinstance(body, bytes) else body
    parsed = schemas.validate(CompletionBody, values)
    unsupported.refuse_in_body(values, route=unsupported.ONLY_IN_COMPLETIONS)
    return parsed


def parse_chat(body: bytes | dict[str, Any]) -> ChatCompletionBody:
    """Read a body of ``/v1/chat/completions``; raise RequestError that names the field."""
    values = schemas.load_object(body) if isinstance(body, bytes) else body
    parsed = schemas.validate(ChatCompletionBody, values)
    unsupported.refuse_in_body(values, route=unsupported.ONLY_IN_CHAT)
    unsupported.refuse_in_messages(values["messages"])
    return parsed
