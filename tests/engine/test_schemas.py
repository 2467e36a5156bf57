"""The requests of the built-in engine: what is accepted, and the name of the field where it is not."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.engine import unsupported
from kvxfer.engine.schemas import parse_chat, parse_completion
from kvxfer.engine.unsupported import IgnoredFields
from kvxfer.errors import InvalidArgumentError
from kvxfer.openai.errors import RequestError

TEXT = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def encoded(*parts: dict[str, Any]) -> bytes:
    return json.dumps({name: value for part in parts for name, value in part.items()}).encode()


def test_defaults() -> None:
    request = parse_completion(encoded(TEXT))
    assert (request.temperature, request.top_p, request.seed, request.stop) == (1.0, 1.0, None, [])
    assert request.max_new_tokens == 16
    assert (request.stream, request.include_usage, request.ignore_eos) == (False, False, False)
    assert parse_chat(encoded(CHAT)).max_new_tokens is None


def test_null_means_default_and_unknown_fields_are_kept() -> None:
    fields = ["max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "logprobs", "user"]
    nulls = dict.fromkeys([*fields, *unsupported.NEUTRAL, "guided_json"])
    request = parse_completion(encoded(TEXT, nulls, {"my_field": [1]}))
    assert request.temperature == 1.0
    assert request.model_extra == {"my_field": [1]}


@pytest.mark.parametrize("prompt", ["hi", [1, 2]])
def test_a_list_of_one_prompt_is_that_prompt(prompt: Any) -> None:
    assert parse_completion(encoded(TEXT, {"prompt": [prompt]})).prompt == prompt


def test_both_names_of_the_token_limit() -> None:
    assert parse_chat(encoded(CHAT, {"max_tokens": 3})).max_new_tokens == 3
    assert parse_chat(encoded(CHAT, {"max_tokens": 3, "max_completion_tokens": 4})).max_new_tokens == 4


def test_message_parts_are_joined_and_only_an_assistant_may_be_silent() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    request = parse_chat({"model": "m", "messages": messages})
    assert [message.content for message in request.messages] == ["ab", None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": "\udc00"}, "stop"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": []}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"suffix": "end"}, "suffix"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"kv_transfer_params": []}, "kv_transfer_params"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(encoded(TEXT, fields))
    assert isinstance(caught.value, InvalidArgumentError)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "User!", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(encoded(CHAT, fields))
    assert caught.value.param == param


ROUTES = [
    (parse_completion, TEXT, unsupported.ONLY_IN_COMPLETIONS),
    (parse_chat, CHAT, unsupported.ONLY_IN_CHAT),
]
WANTED = {
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= x",
    "guided_of_tomorrow": 0,
    "structured_outputs": {"regex": "a+"},
    "response_format": {"type": "json_object"},
    "reasoning_effort": "high",
    "logit_bias": {"5": -100},
    "logprobs": True,
    "top_logprobs": 2,
    "best_of": 2,
    "n": 2,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "use_beam_search": True,
    "min_tokens": 5,
    "stop_token_ids": [2],
    "bad_words": ["no"],
    "chat_template_kwargs": {"enable_thinking": True},
    "max_new_tokens": 5,
    "prompt_logprobs": 0,
    "cache_salt": "mine",
}


@pytest.mark.parametrize(("parse", "body", "route"), ROUTES, ids=["completions", "chat"])
@pytest.mark.parametrize(("field", "value"), WANTED.items())
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    parse: Any, body: dict[str, Any], route: Any, field: str, value: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        parse(encoded(body, {"user": "u", field: value}))
    assert (caught.value.param, caught.value.status, caught.value.error_code) == (field, 400, "invalid_argument")
    assert str(caught.value).startswith(f"{field}: not supported by the built-in engine")


@pytest.mark.parametrize(("parse", "body", "route"), ROUTES, ids=["completions", "chat"])
def test_each_field_of_the_table_is_refused_unless_it_asks_for_nothing(
    parse: Any, body: dict[str, Any], route: Any
) -> None:
    for field, neutral in {**unsupported.NEUTRAL, **route}.items():
        for value in (None, *neutral):
            parsed = parse(encoded(body, {field: value}))
            assert IgnoredFields().note(parsed.model_extra) == ()
        for value in ("something", 7.5, ["x"], {"x": 1}, True not in neutral):
            with pytest.raises(RequestError) as caught:
                parse(encoded(body, {field: value}))
            assert caught.value.param == field


@pytest.mark.parametrize(("parse", "body", "route"), ROUTES, ids=["completions", "chat"])
def test_fields_that_change_nothing_are_accepted(parse: Any, body: dict[str, Any], route: Any) -> None:
    harmless = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "priority": 3}
    parsed = parse(encoded(body, harmless, {"stream": True, "stream_options": {"include_usage": True}}))
    assert parsed.include_usage
    assert IgnoredFields().note(parsed.model_extra) == ()


def test_an_unknown_field_is_named_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields()
    body = encoded(TEXT, {"temprature": 0, "user": "u", "nothing": None, "x" * 100: 1, "\n\x00": 1, "top_k": -1})
    for _ in range(2):
        extra = parse_completion(body).model_extra
        assert extra is not None
        assert fields.note(extra) == ("temprature", "x" * 64, "\\n\\x00")
    assert len(caplog.records) == 3
    flood = {f"field{number}": 1 for number in range(1000)}
    assert len(fields.note(flood)) == unsupported.NAMES_MAX
    assert len(caplog.records) == unsupported.NAMES_MAX


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
            "messages.1.tool_calls",
        ),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "messages.1.function_call"),
        ({"role": "assistant", "content": "a", "prefix": True}, "messages.1.prefix"),
        ({"role": "tool", "content": "42", "tool_call_id": "1"}, "messages.1.role"),
        ({"role": "function", "content": "42", "name": "f"}, "messages.1.role"),
    ],
)
def test_a_message_of_tools_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({"model": "m", "messages": [CHAT["messages"][0], message]})
    assert caught.value.param == param


def test_a_long_wrong_value_is_not_echoed_whole() -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(encoded(TEXT, {"max_tokens": "x" * 10_000}))
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream")


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), JSON, max_size=8))
def test_parsing_is_total(values: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        with contextlib.suppress(RequestError):
            parse(values)
