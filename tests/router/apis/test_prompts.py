"""Sizes of prompts by counting bytes: the same as by making Python objects of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.openai.errors import RequestError
from kvxfer.openai.scanner import Kind
from kvxfer.router.apis.prompts import PromptSize, size_of_embeds, size_of_messages, size_of_prompt, text_bytes

SEPARATORS = [(",", ":"), (", ", ": "), (" ,\n\t", " : ")]
ids = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20)
texts = st.text(min_size=1, max_size=12) | st.sampled_from(['"', '\\"', "\\", '\\\\"', ",", "[]", '","', "\\n"])


def kind_of(value: Any) -> Kind:
    kinds = {
        str: Kind.STRING,
        list: Kind.ARRAY,
        dict: Kind.OBJECT,
        bool: Kind.TRUE,
        int: Kind.NUMBER,
        float: Kind.NUMBER,
    }
    return kinds[type(value)]


def size(value: Any, separators: tuple[str, str] = (",", ":"), *, ascii_only: bool = True) -> PromptSize:
    raw = json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    return size_of_prompt(raw, kind_of(value), "prompt")


@given(ids, st.sampled_from(SEPARATORS))
def test_token_ids_are_counted_exactly(prompt: list[int], separators: tuple[str, str]) -> None:
    assert size(prompt, separators) == PromptSize(len(prompt), is_exact=True)


@given(st.lists(ids, min_size=1, max_size=5), st.sampled_from(SEPARATORS))
def test_lists_of_token_ids_are_counted(prompts: list[list[int]], separators: tuple[str, str]) -> None:
    assert size(prompts, separators) == PromptSize(
        sum(map(len, prompts)), is_exact=len(prompts) == 1, prompts=len(prompts)
    )


@given(st.lists(texts, min_size=1, max_size=6), st.sampled_from(SEPARATORS), st.booleans())
def test_texts_are_counted_whatever_they_escape(
    prompts: list[str], separators: tuple[str, str], ascii_only: bool
) -> None:
    found = size(prompts, separators, ascii_only=ascii_only)
    assert (found.prompts, found.is_exact) == (len(prompts), False)
    assert found.tokens >= 1


@given(st.lists(texts | st.just(""), max_size=6).filter(lambda texts: "" in texts))
def test_an_empty_text_among_others_is_found(prompts: list[str]) -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        size(prompts)


@pytest.mark.parametrize("prompt", ["", [], [[]], [[1], []], ["a", ""]])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    for separators in SEPARATORS:
        with pytest.raises(RequestError, match="must not be empty") as caught:
            size(prompt, separators)
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [3, True, {"a": 1}, [1, "a"], [1, True], [1.5], [1e3], [-1], [[1], [-1]], [[1], "a"], [[[1]]], [{}], [None]],
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="must be a string or a list") as caught:
        size(prompt)
    assert caught.value.param == "prompt"


def test_a_text_is_estimated_by_its_bytes() -> None:
    assert size("a" * 400) == PromptSize(100)
    assert size("a") == PromptSize(1)


def test_messages_are_estimated_by_their_text() -> None:
    def of(*contents: Any) -> PromptSize:
        raw = json.dumps([{"role": "user", "content": content} for content in contents], separators=(",", ":")).encode()
        return size_of_messages(raw, Kind.ARRAY, "messages")

    assert 990 < of("a" * 4000).tokens < 1010
    assert 990 < of(*["a" * 40] * 100).tokens < 1100
    assert of("").tokens == 1


@pytest.mark.parametrize("separators", SEPARATORS)
def test_base64_in_messages_is_no_text(separators: tuple[str, str]) -> None:
    blob = base64.b64encode(bytes(range(256)) * 400).decode()
    contents: list[Any] = [
        [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{blob}"}}],
        [{"type": "input_audio", "input_audio": {"data": blob, "format": "wav"}}],
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": blob}}],
    ]
    messages = [{"role": "user", "content": content} for content in contents]
    raw = json.dumps(messages, separators=separators).encode()
    assert len(raw) > 400_000
    assert text_bytes(raw) < 1000


@given(st.binary(max_size=200), st.integers(0, 3))
def test_the_estimate_of_messages_is_total(noise: bytes, marks: int) -> None:
    raw = b"[" + noise + b'";base64,' * marks + b'"data"' * marks + noise
    assert text_bytes(raw) <= len(raw)


@pytest.mark.parametrize(("value", "word"), [("hi", "a list"), ({}, "a list"), ([], "empty"), (3, "a list")])
def test_what_are_no_messages_is_refused(value: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        size_of_messages(json.dumps(value).encode(), kind_of(value), "messages")
    assert caught.value.param == "messages"


def test_the_input_of_a_response_is_a_text_or_items() -> None:
    assert size_of_messages(b'"abcdefgh"', Kind.STRING, "input", may_be_text=True) == PromptSize(2)
    assert size_of_messages(b'[{"role":"user"}]', Kind.ARRAY, "input", may_be_text=True).tokens >= 1
    with pytest.raises(RequestError, match="must be a string or a list"):
        size_of_messages(b"{}", Kind.OBJECT, "input", may_be_text=True)


def test_embeddings_are_of_unknown_length() -> None:
    assert size_of_embeds(b'"AAAA"', Kind.STRING, "prompt_embeds", has_lists=False) == PromptSize(1)
    assert size_of_embeds(b'["AAAA", "BBBB"]', Kind.ARRAY, "prompt_embeds", has_lists=False) == PromptSize(1, prompts=2)
    assert size_of_embeds(b"[[0.5, 1], [2, 3]]", Kind.ARRAY, "input_embeds", has_lists=True) == PromptSize(1)
    batch = b"[ [ [0.5, 1], [2, 3] ], [[1, 2]] ]"
    assert size_of_embeds(batch, Kind.ARRAY, "input_embeds", has_lists=True) == PromptSize(1, prompts=2)
    for raw, kind in ((b"[]", Kind.ARRAY), (b"3", Kind.NUMBER)):
        with pytest.raises(RequestError):
            size_of_embeds(raw, kind, "input_embeds", has_lists=True)
