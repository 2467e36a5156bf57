"""Request schemas: what is accepted, and the name of the field where it is not."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgument
from kvxfer.openai.errors import RequestError
from kvxfer.openai.schemas import load_object, parse_chat, parse_completion

TEXT = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def encoded(*parts: dict[str, Any]) -> bytes:
    return json.dumps({name: value for part in parts for name, value in part.items()}).encode()


def test_defaults() -> None:
    request = parse_completion(encoded(TEXT))
    assert (request.temperature, request.top_p, request.n, request.seed, request.stop) == (1.0, 1.0, 1, None, [])
    assert request.max_new_tokens == 16
    assert (request.stream, request.include_usage, request.ignore_eos) == (False, False, False)
    assert parse_chat(encoded(CHAT)).max_new_tokens is None


def test_null_means_default_and_unknown_fields_are_kept() -> None:
    fields = ["max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "logprobs", "user"]
    request = parse_completion(encoded(TEXT, dict.fromkeys(fields), {"my_field": [1]}))
    assert request.temperature == 1.0
    assert request.model_extra == {"my_field": [1]}


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
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [[1]]}, "prompt"),
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
    assert isinstance(caught.value, InvalidArgument)
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


@pytest.mark.parametrize(
    "accepted",
    [
        {"logprobs": False},
        {"logprobs": 0},
        {"echo": False},
        {"stop": []},
        {"stop": "a"},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": ""},
        {"presence_penalty": None, "logit_bias": None, "response_format": None},
        {"response_format": {"type": "text"}, "tools": []},
    ],
)
def test_harmless_values_are_accepted(accepted: dict[str, Any]) -> None:
    parse_completion(encoded(TEXT, accepted))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff", b'{"a":NaN}', b"[" * 200_000, b'{"a":' * 50_000, b"1" * 5000],
    ids=lambda body: ascii(body[:8]),
)
def test_what_is_no_json_object_is_said_so(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        load_object(body)
    assert caught.value.param is None
    assert "JSON" in str(caught.value)


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


@given(st.binary(max_size=60))
def test_decoding_is_total(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(load_object(body), dict)
