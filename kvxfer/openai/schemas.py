"""What a client may ask: the two request bodies of the OpenAI API, validated once, with errors that name the field.

Decides whether a body is a well-formed request; it must never know which models exist, how long a context is, or
how text becomes tokens. A field that would change the answer and is not supported is refused by name; an unknown
field is kept and ignored; ``null`` means the default.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvxfer.openai.errors import RequestError

INTEGER_MAX = (1 << 31) - 1
MESSAGES_MAX = 4096
STOPS_MAX = 4
COMPLETION_TOKENS_DEFAULT = 16
_SHOWN_CHARS = 80


def _wrong(message: str) -> NoReturn:
    raise PydanticCustomError("request", "{reason}", {"reason": message})


def _check_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        _wrong("must be valid Unicode text, without lone surrogates")
    return text


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str):
        if not value:
            _wrong("must not be empty")
        return _check_text(value)
    if isinstance(value, list):
        if not value:
            _wrong("must not be empty")
        if all(type(token) is int for token in value):
            if min(value) < 0 or max(value) > INTEGER_MAX:
                _wrong("token ids must be 0 or more, and fit 31 bits")
            return value
        if all(isinstance(item, (str, list)) for item in value):
            _wrong("a list of prompts is not supported: send one prompt a request")
    _wrong("must be a string or a list of token ids")


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        _wrong("must be a string or a list of strings")
    if len(stops) > STOPS_MAX:
        _wrong(f"must have at most {STOPS_MAX} strings")
    if not all(stops):
        _wrong("must not contain an empty string")
    return [_check_text(stop) for stop in stops]


def _check_content(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        return _check_text(value)
    if not isinstance(value, list):
        _wrong("must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            _wrong('only parts of {"type": "text", "text": ...} are supported')
        texts.append(_check_text(part["text"]))
    return "".join(texts)


def _refuse_logprobs(value: Any) -> Any:
    if value is not False and (type(value) is not int or value != 0):
        _wrong("log probabilities are not supported")
    return value


def _refuse_penalty(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != 0:
        _wrong("penalties are not supported: leave it out, or send 0")
    return value


def _refuse_unless_empty(value: Any) -> Any:
    if value not in ({}, [], ""):
        _wrong("not supported: leave it out")
    return value


def _refuse_format(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "text":
        _wrong('only {"type": "text"} is supported')
    return value


_Nothing = Annotated[Any, BeforeValidator(_refuse_unless_empty)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(_Model):
    include_usage: bool = False


class Message(_Model):
    """One chat message; ``content`` given as text parts is joined into one string, ``None`` where there is none."""

    role: str = Field(pattern="^[a-z_]{1,64}$")
    content: Annotated[str | None, BeforeValidator(_check_content)] = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            _wrong(f"content is required for role {self.role!r}")
        return self


class _Request(_Model):
    """What both kinds of request share."""

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(default=None, ge=1, le=INTEGER_MAX)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=1)
    stop: Annotated[list[str], BeforeValidator(_check_stop)] = Field(default_factory=list)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[bool | int, BeforeValidator(_refuse_logprobs)] = False
    presence_penalty: Annotated[float, BeforeValidator(_refuse_penalty)] = 0.0
    frequency_penalty: Annotated[float, BeforeValidator(_refuse_penalty)] = 0.0
    logit_bias: _Nothing = None
    response_format: Annotated[Any, BeforeValidator(_refuse_format)] = None
    ignore_eos: bool = False
    user: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the last data event of a stream must carry the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """``POST /v1/completions``: ``prompt`` is one string or one list of token ids."""

    prompt: Annotated[str | list[int], BeforeValidator(_check_prompt)]
    best_of: int = Field(default=1, ge=1, le=1)
    echo: bool = False
    suffix: _Nothing = None

    @model_validator(mode="after")
    def _no_echo(self) -> CompletionRequest:
        if self.echo:
            raise PydanticCustomError("echo", "echo of the prompt is not supported")
        return self

    @property
    def max_new_tokens(self) -> int:
        """How many tokens to generate at most; OpenAI's default where the client gave none."""
        return COMPLETION_TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens


class ChatCompletionRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INTEGER_MAX)
    top_logprobs: Annotated[bool | int, BeforeValidator(_refuse_logprobs)] = 0
    tools: _Nothing = None
    functions: _Nothing = None

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens to generate at most, or None for the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


AnyRequest = CompletionRequest | ChatCompletionRequest
_R = TypeVar("_R", bound=_Request)


def parse_completion(body: bytes | dict[str, Any]) -> CompletionRequest:
    """Validate a body of ``/v1/completions``; raise RequestError that names the field."""
    return _validate(CompletionRequest, body)


def parse_chat(body: bytes | dict[str, Any]) -> ChatCompletionRequest:
    """Validate a body of ``/v1/chat/completions``; raise RequestError that names the field."""
    return _validate(ChatCompletionRequest, body)


def load_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object; raise RequestError for anything else (bad UTF-8, NaN, too deep, not an object)."""
    try:
        values = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(values, dict):
        raise RequestError(f"the body must be a JSON object, not {type(values).__name__}")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _validate(kind: type[_R], body: bytes | dict[str, Any]) -> _R:
    values = load_object(body) if isinstance(body, bytes) else body
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _request_error(error, values) from None


def _request_error(error: ValidationError, values: dict[str, Any]) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "echo":
        param = "echo"
    reason = first["msg"][:1].lower() + first["msg"][1:]
    shown = ""
    value: Any = values
    for part in first["loc"]:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
    else:
        if first["loc"] and isinstance(value, (bool, int, float, str)):
            text = ascii(value)
            shown = f" (got {text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + '...'})"
    return RequestError(f"{param}: {reason}{shown}" if param else f"the request: {reason}", param=param)
