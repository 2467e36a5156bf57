"""Requests as every engine reads them: what can be placed, and what is left to the engine that answers."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.openai.errors import RequestError
from kvxfer.openai.schemas import load_object, parse_chat, parse_completion

TEXT = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def encoded(*parts: dict[str, Any]) -> bytes:
    return json.dumps({name: value for part in parts for name, value in part.items()}).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 40, "min_p": 0.1, "guided_json": {}, "structured_outputs": {"regex": "a"}},
        {"logprobs": 5, "echo": True, "suffix": "end", "logit_bias": {"5": -100}, "presence_penalty": 1},
        {"response_format": {"type": "json_object"}, "reasoning_effort": "high", "temperature": 3, "max_tokens": 0},
        {"tools": [{"type": "function"}], "tool_choice": "required", "stop": ["a"] * 9, "stream_options": {"x": 1}},
    ],
)
def test_field_that_only_some_engines_have_is_accepted(fields: dict[str, Any]) -> None:
    assert parse_completion(encoded(TEXT, fields)).model_extra == fields
    assert parse_chat(encoded(CHAT, fields)).model_extra == fields


@pytest.mark.parametrize(
    ("fields", "is_one"),
    [
        ({}, True),
        ({"n": 1, "best_of": None, "use_beam_search": False}, True),
        ({"n": 2}, False),
        ({"best_of": 2}, False),
        ({"use_beam_search": True}, False),
    ],
)
def test_one_sequence_is_told_from_several(fields: dict[str, Any], is_one: bool) -> None:
    assert parse_completion(encoded(TEXT, fields)).is_one_sequence is is_one
    assert parse_completion(encoded(TEXT, fields, {"prompt": [1, 2]})).is_one_sequence is is_one
    assert parse_chat(encoded(CHAT, fields)).is_one_sequence is is_one


@pytest.mark.parametrize("prompt", [["a", "b"], ["a"], [[1, 2], [3]], [[1]]])
def test_a_list_of_prompts_is_several_sequences(prompt: Any) -> None:
    assert not parse_completion(encoded(TEXT, {"prompt": prompt})).is_one_sequence


def test_a_prompt_may_be_embeddings() -> None:
    assert parse_completion({"model": "m", "prompt_embeds": "AAAA"}).prompt is None


def test_messages_of_other_engines_are_accepted() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "four"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    request = parse_chat({"model": "m", "messages": messages})
    assert [message.text_chars for message in request.messages] == [4, 0, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(encoded(TEXT, fields))
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([3], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "User!", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": 7}], "messages.0.content"),
        ([{"role": "user", "content": "\ud800"}], "messages.0.content"),
    ],
)
def test_a_wrong_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({"model": "m", "messages": messages})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff", b'{"a":NaN}', b"[" * 200_000, b'{"a":' * 50_000, b"1" * 5000],
    ids=lambda body: ascii(body[:8]),
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        load_object(body)
    assert caught.value.param is None
    assert "JSON" in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("model", "prompt", "messages", "stream", "n", "best_of")


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), JSON, max_size=8))
def test_parsing_is_total(values: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        with contextlib.suppress(RequestError):
            assert parse(values).is_one_sequence in (True, False)


@given(st.binary(max_size=60))
def test_decoding_is_total(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(load_object(body), dict)
