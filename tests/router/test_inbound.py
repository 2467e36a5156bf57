"""A client's body as the router reads it: what it must know, and nothing else."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.openai.errors import RequestError
from kvxfer.policy.capacity import Need
from kvxfer.router.apis import ROUTES
from kvxfer.router.inbound import INTEGER_MAX, Inbound
from tests.support.native.json_bodies import bodies
from tests.support.router_bodies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    LEAST,
    MESSAGES,
    RESPONSES,
    TRACE,
    inbound,
)


@pytest.mark.parametrize("path", sorted(LEAST))
def test_the_least_body_of_each_route_is_read(path: str) -> None:
    read = inbound(path)
    assert read.model == ("" if path == GENERATE else "m")
    assert (read.stream, read.is_one_sequence, read.path) == (False, True, path)
    assert read.prompt_tokens()[0] > 0
    assert read.body == json.dumps(LEAST[path]).encode()
    assert read.traceparent == TRACE


@pytest.mark.parametrize("path", sorted(LEAST))
def test_null_means_that_a_field_is_not_there(path: str) -> None:
    names = ("n", "best_of", "use_beam_search", "max_tokens", "stream", "echo", "max_output_tokens")
    fields = {name: None for name in names if name not in LEAST[path]}
    assert inbound(path, **fields).size == inbound(path).size
    assert inbound(path, **fields).is_one_sequence
    for name in inbound(path).api.prompt_fields[:1]:
        with pytest.raises(RequestError, match="required") as caught:
            inbound(path, **{name: None})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"model": None}, "model", "required"),
        ({"model": ""}, "model", "1 to 256"),
        ({"model": "m" * 257}, "model", "1 to 256"),
        ({"model": 3}, "model", "3"),
        ({"model": ["m"]}, "model", "string"),
        ({"model": "\ud800"}, "model", "Unicode"),
        ({"stream": "yes"}, "stream", "yes"),
        ({"stream": 1}, "stream", "1"),
        ({"stream": "y" * 200}, "stream", "true or false"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": 3}, "prompt", "string"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": [1, True]}, "prompt", "token ids"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        inbound(COMPLETIONS, **fields)
    assert (caught.value.param, caught.value.status, caught.value.error_code) == (param, 400, "invalid_argument")


@pytest.mark.parametrize(("messages", "word"), [(None, "required"), ([], "empty"), ("hi", "list"), ({}, "list")])
def test_wrong_messages_are_named(messages: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        inbound(CHAT, messages=messages)
    assert caught.value.param == "messages"


def test_a_messages_content_is_the_engines_business() -> None:
    assert inbound(CHAT, messages=[{"role": "User!", "content": 7}, 3]).is_one_sequence


@pytest.mark.parametrize(
    ("body", "word"),
    [(b"", "JSON"), (b"{", "JSON"), (b"[]", "object"), (b"null", "object"), (b"\xff", "JSON"), (b'{"a":NaN}', "JSON")],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        inbound(COMPLETIONS, body)
    assert (caught.value.param, caught.value.error_code) == (None, "invalid_argument")


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"n": 1, "best_of": None, "use_beam_search": False}, None),
        (COMPLETIONS, {"n": 1.0}, None),
        (COMPLETIONS, {"n": 2}, "n"),
        (COMPLETIONS, {"n": "1"}, "n"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"prompt": ["a"]}, None),
        (COMPLETIONS, {"prompt": [[1]]}, None),
        (COMPLETIONS, {"prompt": ["a"], "n": 2}, "n"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "prompt"),
        (GENERATE, {"text": ["a"]}, None),
        (GENERATE, {"text": None, "input_ids": [[1, 2]]}, None),
        (COMPLETIONS, {"prompt": [1]}, None),
        (CHAT, {"n": 3}, "n"),
        (RESPONSES, {"n": 3}, None),
        (MESSAGES, {"n": 3}, None),
        (GENERATE, {"n": 3}, None),
        (GENERATE, {"sampling_params": {"n": 3}}, "sampling_params.n"),
        (GENERATE, {"sampling_params": {"n": 1, "beam_width": 4}}, "sampling_params.beam_width"),
        (GENERATE, {"sampling_params": {"n": None}}, None),
        (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {}]}, "text"),
        (GENERATE, {"sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        (GENERATE, {"sampling_params": [{"n": 1}, 7]}, "sampling_params"),
        (GENERATE, {"sampling_params": [{"x": "y" * 70_000}]}, "sampling_params"),
        (GENERATE, {"text": ["a", "b"]}, "text"),
    ],
)
def test_one_sequence_is_told_from_several(path: str, fields: dict[str, Any], field: str | None) -> None:
    read = inbound(path, **fields)
    assert (read.several, read.is_one_sequence) == (field, field is None)


def test_a_list_of_one_prompt_has_that_prompts_size() -> None:
    """And its answer may have the shape that belongs to a list."""
    listed, alone = inbound(COMPLETIONS, prompt=[[1, 2, 3]]), inbound(COMPLETIONS, prompt=[1, 2, 3])
    assert (listed.prompt_tokens(), listed.needs()) == (alone.prompt_tokens(), alone.needs())
    assert [inbound(GENERATE, text=text).may_get_array for text in ("a", ["a"], ["a", "b"])] == [False, True, True]
    assert inbound(GENERATE, text=None, input_ids=[[1]]).may_get_array


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        (COMPLETIONS, {"max_tokens": 7}, ("max_tokens", 7)),
        (COMPLETIONS, {"max_completion_tokens": 7}, None),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 8}, ("max_completion_tokens", 8)),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": None}, ("max_tokens", 7)),
        (RESPONSES, {"max_output_tokens": 5}, ("max_output_tokens", 5)),
        (MESSAGES, {}, ("max_tokens", 9)),
        (GENERATE, {"sampling_params": {"max_new_tokens": 4}}, ("sampling_params.max_new_tokens", 4)),
        (GENERATE, {"max_tokens": 4}, None),
        *(
            (COMPLETIONS, {"max_tokens": wrong}, None)
            for wrong in (0, -1, 1.5, "7", True, [7], INTEGER_MAX + 1, 10**40)
        ),
    ],
)
def test_the_bound_of_the_answer_is_a_count_or_not_there(path: str, fields: Any, limit: Any) -> None:
    read = inbound(path, **fields)
    assert read.token_limit == limit
    assert read.token_limit_field == (None if limit is None else limit[0])


def test_needs_are_exact_for_token_ids_only() -> None:
    assert inbound(COMPLETIONS, prompt=[1] * 50, max_tokens=7).needs() == (Need(50, 7), Need(50, 7))
    assert inbound(COMPLETIONS, prompt="a" * 400).needs() == (Need(1, 1), Need(100, 1))
    assert inbound(COMPLETIONS, prompt=[[1] * 25] * 2, max_tokens=7).needs() == (Need(1, 7), Need(50, 7))
    assert inbound(COMPLETIONS, prompt=[1] * 50, n=2).needs() == (Need(1, 1), Need(50, 1))
    assert inbound(COMPLETIONS, prompt=[1] * 50, truncate_prompt_tokens=9).needs() == (Need(1, 1), Need(50, 1))


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "tools"), (RESPONSES, "instructions"), (RESPONSES, "tools"), (MESSAGES, "system")]
)
def test_text_beside_the_messages_counts_too(path: str, field: str) -> None:
    value: Any = "a" * 4000 if field != "tools" else [{"type": "function", "description": "a" * 4000}]
    least = inbound(path).size.tokens
    assert 1000 <= inbound(path, **{field: value}).size.tokens - least < 1030
    assert inbound(path, **{field: None}).size.tokens <= least + 1


@pytest.mark.parametrize("field", ["prompt_embeds", "prompt"])
def test_a_prompt_may_be_embeddings(field: str) -> None:
    read = inbound(COMPLETIONS, json.dumps({"model": "m", field: "AAAA"}).encode())
    assert read.prompt_field == field


def test_of_a_repeated_field_the_last_one_counts() -> None:
    read = inbound(COMPLETIONS, b'{"model":"a","prompt":"x","mod\\u0065l":"b","stream":false,"stre\\u0061m":true}')
    assert (read.model, read.stream) == ("b", True)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize", "/v1/score"])
def test_other_routes_are_read_for_their_model_only(path: str) -> None:
    [api] = [api for api in ROUTES if api.path == path]
    assert not api.generates
    assert Inbound.read(api, b'{"model":"m","input":7,"documents":[]}').model == "m"
    if not api.requires_model:
        assert Inbound.read(api, b"{}").model == ""


@settings(max_examples=200)
@given(bodies(), st.sampled_from(ROUTES))
def test_reading_is_total(body: bytes, api: Any) -> None:
    with contextlib.suppress(RequestError):
        read = Inbound.read(api, body)
        assert read.body == body
        assert read.needs()[1].prompt_tokens >= 1
        assert read.is_one_sequence in (True, False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("model", "prompt", "messages", "input", "text", "input_ids", "stream", "n", "sampling_params", "max_tokens")


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=8), st.sampled_from(ROUTES))
def test_reading_of_any_values_is_total(values: dict[str, Any], api: Any) -> None:
    with contextlib.suppress(RequestError):
        assert Inbound.read(api, json.dumps(values).encode()).prompt_tokens()[0] >= 0
