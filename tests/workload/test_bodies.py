"""Bodies: what a server is asked for, and what a user may add."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.workload.bodies import FIXED, BodyMaker, extra_body_of
from kvxfer.workload.prompts import PromptMaker
from kvxfer.workload.request import WorkloadRequest

PROMPTS = PromptMaker(hash_tokens=16)


def planned(**more: Any) -> WorkloadRequest:
    return WorkloadRequest(**{"number": 3, "prompt_tokens": 40, "output_tokens": 7, "due_s": 0.0, **more})


def test_a_completion_asks_for_token_ids_streamed_with_usage() -> None:
    body = json.loads(BodyMaker("m", "completions", PROMPTS).body(planned()))
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 7,
        "prompt": PROMPTS.tokens(planned()).tolist(),
    }


def test_a_chat_asks_with_one_message() -> None:
    body = json.loads(BodyMaker("m", "chat", PROMPTS, ignore_eos=False).body(planned()))
    assert body["messages"] == [{"role": "user", "content": PROMPTS.text(planned())}]
    assert "ignore_eos" not in body
    assert "prompt" not in body


def test_text_is_sent_as_text_to_either_route() -> None:
    asked = planned(text='Say "hé"\n')
    assert json.loads(BodyMaker("m", "completions", PROMPTS).body(asked))["prompt"] == 'Say "hé"\n'
    assert json.loads(BodyMaker("m", "chat", PROMPTS).body(asked))["messages"][0]["content"] == 'Say "hé"\n'


@given(
    st.text(max_size=30),
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name not in FIXED),
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.lists(st.integers(), max_size=3),
        max_size=4,
    ),
)
def test_whatever_is_added_the_body_is_json_and_says_it(model: str, extra: dict[str, Any]) -> None:
    body = json.loads(BodyMaker(model, "completions", PROMPTS, extra_body=extra).body(planned()))
    assert body["model"] == model
    assert body["max_tokens"] == 7
    assert {name: body[name] for name in extra} == extra


def test_a_name_stands_once() -> None:
    made = BodyMaker("m", "completions", PROMPTS, extra_body={"temperature": 0.7, "ignore_eos": False}).body(planned())
    names = [name for name, _ in json.loads(made, object_pairs_hook=list)]
    assert len(names) == len(set(names))
    assert json.loads(made)["temperature"] == 0.7


@pytest.mark.parametrize("name", sorted(FIXED))
def test_what_the_load_test_decides_cannot_be_added(name: str) -> None:
    with pytest.raises(ConfigError, match=f"extra_body must not have {name}"):
        BodyMaker("m", "chat", PROMPTS, extra_body={name: 1})


@pytest.mark.parametrize("extra", [{"a": float("nan")}, {"a": {1, 2}}])
def test_what_is_no_json_cannot_be_added(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        BodyMaker("m", "chat", PROMPTS, extra_body=extra)


def test_an_api_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="api must be completions or chat"):
        BodyMaker("m", "embeddings", PROMPTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "extra_body is not JSON"),
        ("[1]", "extra_body must be a JSON object"),
        ("[" * 100_000, "extra_body is not JSON"),
        ("x" * ((1 << 20) + 1), "at most 1048576 characters"),
    ],
)
def test_a_wrong_extra_body_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        extra_body_of(text)


def test_an_extra_body_is_an_object_or_nothing() -> None:
    assert extra_body_of("") == {}
    assert extra_body_of('{"top_p": 0.5}') == {"top_p": 0.5}
