"""What a client asks: one reading of the bodies of all generation routes, as prompts and limits.

Decides which bodies are refused, and with which words. It must never know how an answer is made or written.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from kvxfer.mock_engine.options import MockEngineOptions
from kvxfer.mock_engine.tokens import PromptTokens, ids_of_text, pack_ids
from kvxfer.openai.errors import RequestError

COMPLETION_TOKENS_DEFAULT = 16
CHOICES_MAX = 1024


class AnswerApi(enum.Enum):
    """Whose shape the answer has."""

    COMPLETION = "cmpl"
    CHAT = "chatcmpl"
    RESPONSES = "resp"
    MESSAGES = "msg"
    GENERATE = "gen"


@dataclasses.dataclass(slots=True)
class AskedAnswer:
    """One request for text."""

    api: AnswerApi
    model: str
    prompts: list[PromptTokens]
    n: int
    max_tokens: int
    is_default_length: bool
    """No limit was named: the answer ends by itself."""
    stream: bool
    includes_usage: bool = False
    logprobs: int | None = None
    stops: tuple[str, ...] = ()
    is_json: bool = False
    tool: str = ""
    """The tool that the answer calls; empty: it is text."""
    echoes: bool = False
    has_token_ids: bool = False
    is_batch: bool = False
    """SGLang's ``/generate`` was asked with a list, so that it answers with a list."""
    salt: str = ""


def _number(body: dict[str, Any], name: str, default: int | None, *, least: int = 1) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise RequestError(f"{name} must be a whole number of at least {least}", param=name)
    return value


def _strings(body: dict[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise RequestError(f"{name} must be a string or a list of strings", param=name)
    return tuple(text for text in listed if text)


def text_of(content: Any, field: str) -> str:
    """The text of a message's content: a string, or a list of parts; parts without text count as their kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{field} must be a string or a list of parts", param=field)
    texts = []
    for part in content:
        if not isinstance(part, dict):
            texts.append(str(part))
            continue
        text = part.get("text", part.get("content"))
        texts.append(text if isinstance(text, str) else f"<{part.get('type', 'part')}>")
    return "".join(texts)


def chat_text(messages: Any, tools: Any = None) -> str:
    """The prompt that a list of messages makes."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of messages", param="messages")
    parts = [f"<|tools|>{len(tools)}\n"] if isinstance(tools, list) and tools else []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role", "user"), str):
            raise RequestError(f"messages.{index} must be an object with a role", param=f"messages.{index}")
        parts.append(f"<|{message.get('role', 'user')}|>{text_of(message.get('content'), f'messages.{index}')}\n")
    return "".join(parts) + "<|assistant|>"


def read_prompts(value: Any, field: str) -> list[PromptTokens]:
    """A string, a list of strings, a list of token ids, or a list of such lists. Raises RequestError."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RequestError(f"{field} must be a string, or a list of strings or token ids", param=field)
    return [_read_prompt(one, field) for one in value]


def _read_prompt(value: Any, field: str) -> PromptTokens:
    try:
        packed = ids_of_text(value) if isinstance(value, str) else pack_ids(value)
    except ValueError as error:
        raise RequestError(f"{field}: {error}", param=field) from None
    if not packed:
        raise RequestError(f"{field} must not be empty", param=field)
    return PromptTokens(packed)


def _called_tool(body: dict[str, Any], messages: Sequence[Any]) -> str:
    """Which tool the answer calls: the named one; else the first, unless the last message is a tool's result."""
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if not isinstance(tools, list) or not tools or choice == "none":
        return ""
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        return str(function.get("name", "")) if isinstance(function, dict) else ""
    first = tools[0] if isinstance(tools[0], dict) else {}
    function = first.get("function", first)
    name = str(function.get("name", "")) if isinstance(function, dict) else ""
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    return name if choice == "required" or last.get("role") != "tool" else ""


def _is_json(body: dict[str, Any]) -> bool:
    wanted = body.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    return kind in ("json_object", "json_schema") or any(
        body.get(name) for name in ("guided_json", "structured_outputs")
    )


def _asked(
    api: AnswerApi, body: dict[str, Any], prompts: list[PromptTokens], limit: int | None, default: int, **more: Any
) -> AskedAnswer:
    n = _number(body, "n", 1) or 1
    if n * len(prompts) > CHOICES_MAX:
        raise RequestError(f"n times the prompts must be at most {CHOICES_MAX}", param="n")
    stream = body.get("stream") or False
    if type(stream) is not bool:
        raise RequestError("stream must be true or false", param="stream")
    options = body.get("stream_options")
    if options is not None and not stream:
        raise RequestError("Stream options can only be defined when `stream=True`.", param="stream_options")
    return AskedAnswer(
        api=api,
        model=body.get("model") or "",
        prompts=prompts,
        n=n,
        max_tokens=default if limit is None else limit,
        is_default_length=limit is None and api is not AnswerApi.COMPLETION,
        stream=stream,
        includes_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        has_token_ids=bool(body.get("return_token_ids")),
        salt=str(body.get("cache_salt") or ""),
        **more,
    )


def read_completion(body: dict[str, Any], options: MockEngineOptions) -> AskedAnswer:
    """``POST /v1/completions``."""
    return _asked(
        AnswerApi.COMPLETION,
        body,
        read_prompts(body.get("prompt"), "prompt"),
        _number(body, "max_tokens", None),
        COMPLETION_TOKENS_DEFAULT,
        logprobs=_number(body, "logprobs", None, least=0),
        stops=_strings(body, "stop"),
        is_json=_is_json(body),
        echoes=bool(body.get("echo")),
    )


def read_chat(body: dict[str, Any], options: MockEngineOptions) -> AskedAnswer:
    """``POST /v1/chat/completions``."""
    messages = body.get("messages")
    prompt = PromptTokens(ids_of_text(chat_text(messages, body.get("tools"))))
    limit = _number(body, "max_completion_tokens", _number(body, "max_tokens", None))
    return _asked(
        AnswerApi.CHAT,
        body,
        [prompt],
        limit,
        options.answer_tokens,
        logprobs=(_number(body, "top_logprobs", 0, least=0) if body.get("logprobs") else None),
        stops=_strings(body, "stop"),
        is_json=_is_json(body),
        tool=_called_tool(body, messages or ()),
    )


def _after_system(system: Any, messages: Any) -> Any:
    """The messages after what the request says apart from them; what is no list of messages is left as it is."""
    if system and (messages is None or isinstance(messages, list)):
        return [{"role": "system", "content": system}, *(messages or [])]
    return messages


def read_responses(body: dict[str, Any], options: MockEngineOptions) -> AskedAnswer:
    """``POST /v1/responses``."""
    given = body.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    prompt = PromptTokens(ids_of_text(chat_text(_after_system(body.get("instructions"), messages))))
    limit = _number(body, "max_output_tokens", None)
    return _asked(AnswerApi.RESPONSES, {**body, "n": 1}, [prompt], limit, options.answer_tokens)


def read_messages(body: dict[str, Any], options: MockEngineOptions) -> AskedAnswer:
    """``POST /v1/messages``, Anthropic's."""
    prompt = PromptTokens(ids_of_text(chat_text(_after_system(body.get("system"), body.get("messages")))))
    limit = _number(body, "max_tokens", None)
    if limit is None:
        raise RequestError("max_tokens: field required", param="max_tokens")
    stops = _strings(body, "stop_sequences")
    return _asked(AnswerApi.MESSAGES, {**body, "n": 1}, [prompt], limit, options.answer_tokens, stops=stops)


def read_generate(body: dict[str, Any], options: MockEngineOptions) -> AskedAnswer:
    """``POST /generate``, SGLang's."""
    field = "text" if body.get("text") is not None else "input_ids"
    value = body.get(field)
    is_batch = isinstance(value, list) and bool(value) and type(value[0]) is not int
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise RequestError("sampling_params must be an object", param="sampling_params")
    limit = _number(params, "max_new_tokens", 128)
    return _asked(
        AnswerApi.GENERATE,
        {**body, "n": params.get("n"), "model": ""},
        read_prompts(value, field),
        limit,
        128,
        stops=_strings(params, "stop"),
        logprobs=0 if body.get("return_logprob") else None,
        is_batch=is_batch or (_number(params, "n", 1) or 1) > 1,
    )
