"""What a client may ask: the two request bodies of the OpenAI API, as far as every engine reads them the same way.

Decides whether a body can be placed and answered at all: it names a model, has a prompt or messages, and says whether
it wants a stream. What else a body holds is the business of the engine that answers it: fields that one engine lacks
another has, so they are kept here as they came. ``null`` means that a field is not there.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvxfer.openai.errors import RequestError

INTEGER_MAX = (1 << 31) - 1
MESSAGES_MAX = 4096
_SHOWN_CHARS = 80


def wrong(message: str) -> NoReturn:
    """Raise what pydantic makes a ValidationError of, for use in its validators."""
    raise PydanticCustomError("request", "{reason}", {"reason": message})


def check_text(text: str) -> str:
    """``text``, unless it holds what UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        wrong("must be valid Unicode text, without lone surrogates")
    return text


def check_prompt(value: Any) -> Any:
    """A string or a list of token ids, or a list of such prompts."""
    if isinstance(value, list) and value and all(isinstance(item, (str, list)) for item in value):
        return [_check_one_prompt(item) for item in value]
    return _check_one_prompt(value)


def _check_one_prompt(value: Any) -> Any:
    if isinstance(value, (str, list)) and not value:
        wrong("must not be empty")
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, list) and all(type(token) is int for token in value):
        if min(value) < 0 or max(value) > INTEGER_MAX:
            wrong("token ids must be 0 or more, and fit 31 bits")
        return value
    wrong("must be a string or a list of token ids")


def _check_content(value: Any) -> Any:
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list):
        wrong("must be a string or a list of parts")
    return value


class Model(BaseModel):
    """A JSON object of a body: strict types, no NaN, fields that are not declared are kept, ``null`` is dropped."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class Message(Model):
    """One chat message. ``content`` is a string, a list of parts (text, images ...) or None where there is none."""

    role: str = Field(pattern="^[a-z_]{1,64}$")
    content: Annotated[Any, BeforeValidator(_check_content)] = None

    @property
    def text_chars(self) -> int:
        """How many characters of text it has; other parts count nothing."""
        if isinstance(self.content, list):
            texts = [part.get("text") for part in self.content if isinstance(part, dict)]
            return sum(len(text) for text in texts if isinstance(text, str))
        return len(self.content or "")


class _Request(Model):
    TOKEN_LIMITS: ClassVar[tuple[str, ...]] = ("max_tokens",)

    model: str = Field(min_length=1, max_length=256)
    stream: bool = False

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """The field by which the client bounds the answer, and its tokens; None where it does not, or says what is no
        count: the engine refuses that.
        """
        extra = self.model_extra or {}
        for name in self.TOKEN_LIMITS:
            if type(value := extra.get(name)) is int and 0 < value <= INTEGER_MAX:
                return name, value
        return None

    def _asks_for_many(self) -> bool:
        """Whether one prompt is to be answered several times."""
        extra = self.model_extra or {}
        return bool(extra.get("use_beam_search")) or any(extra.get(name, 1) != 1 for name in ("n", "best_of"))


class CompletionRequest(_Request):
    """``POST /v1/completions``: ``prompt`` is a string or a list of token ids, or a list of such prompts.

    None stands for a prompt that is not text: some engines take ``prompt_embeds`` in its place.
    """

    prompt: Annotated[Any, BeforeValidator(check_prompt)] = None

    @model_validator(mode="after")
    def _has_prompt(self) -> CompletionRequest:
        if self.prompt is None and "prompt_embeds" not in (self.model_extra or {}):
            raise PydanticCustomError("prompt", "field required")
        return self

    @property
    def is_one_sequence(self) -> bool:
        """Whether an engine makes one sequence of it: one prompt and one answer."""
        prompts = self.prompt if isinstance(self.prompt, list) else []
        return not self._asks_for_many() and all(type(token) is int for token in prompts)


class ChatCompletionRequest(_Request):
    """``POST /v1/chat/completions``."""

    TOKEN_LIMITS: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES_MAX)

    @property
    def is_one_sequence(self) -> bool:
        """Whether an engine makes one sequence of it: one answer."""
        return not self._asks_for_many()


AnyRequest = CompletionRequest | ChatCompletionRequest
_M = TypeVar("_M", bound=Model)


def parse_completion(body: bytes | dict[str, Any]) -> CompletionRequest:
    """Validate a body of ``/v1/completions``; raise RequestError that names the field."""
    return validate(CompletionRequest, body)


def parse_chat(body: bytes | dict[str, Any]) -> ChatCompletionRequest:
    """Validate a body of ``/v1/chat/completions``; raise RequestError that names the field."""
    return validate(ChatCompletionRequest, body)


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


def validate(kind: type[_M], body: bytes | dict[str, Any]) -> _M:
    """The body as a ``kind``; raise RequestError that names the first field that is wrong."""
    values = load_object(body) if isinstance(body, bytes) else body
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _request_error(error, values) from None


def _request_error(error: ValidationError, values: dict[str, Any]) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "prompt":
        param = "prompt"
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
