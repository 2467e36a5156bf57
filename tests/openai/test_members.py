"""Members of a JSON object changed in its own bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.openai.errors import RequestError
from kvxfer.openai.members import with_members

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["a", "b", "kv", "x y", "\u9de1", '"', "}", "\\"]) | st.text(max_size=3)
objects = st.dictionaries(names, values, max_size=6)


@given(objects, objects, st.sets(names, max_size=3), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_members_are_replaced_and_all_others_keep_their_value(
    found: dict[str, Any], added: dict[str, Any], without: set[str], is_ascii: bool, indent: Any
) -> None:
    try:
        body = json.dumps(found, ensure_ascii=is_ascii, indent=indent).encode()
    except UnicodeEncodeError:
        body = json.dumps(found, indent=indent).encode()
    changed = with_members(body, found.keys(), added, without=without)
    assert json.loads(changed) == {name: found[name] for name in found if name not in without} | added
    assert len(changed) <= len(body) + sum(len(json.dumps({name: value})) for name, value in added.items())


def test_members_nothing_to_change_gives_the_same_bytes() -> None:
    body = b' {"a" : 1e400 } \n'
    assert with_members(body, {"a"}, {}, without={"b"}) == body
    assert with_members(body, {"a"}, {"b": 2}) == b' {"a" : 1e400,"b":2}'
    assert with_members(b"{ }", (), {"b": 2}) == b'{"b":2}'


def test_members_of_one_name_are_all_replaced_however_they_are_written() -> None:
    body = b'{"kv":1,"\\u006bv":[{"kv":2}],"z":{"kv":3}}'
    assert with_members(body, {"kv", "z"}, {"kv": 4}) == b'{"z":{"kv":3},"kv":4}'


def test_members_nested_too_deep_to_be_looked_through_are_a_request_error() -> None:
    depth = 100_000
    with pytest.raises(RequestError, match="nested too deep"):
        with_members(b'{"kv":' + b"[" * depth + b"]" * depth + b"}", {"kv"}, {"kv": 1})
