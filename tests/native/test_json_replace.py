"""Fields of a body are replaced in its own bytes: the result says what a dict would say, and no other byte changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.openai import scanner
from tests.support.native.json_bodies import MARK, NAMES, bodies, loaded, written_values

FIELDS = scanner.Fields(["model", "stream"])
changes_of = st.dictionaries(
    st.sampled_from(["kv_transfer_params", *(name for name in NAMES if name != "\ud800")]),
    st.none() | written_values(2).map(str.encode),
    max_size=4,
)


def replaced(body: bytes, changes: dict[str, bytes | None]) -> bytes:
    return b"".join(scanner.replace(FIELDS.scan(body), changes))


def kept_bytes(body: bytes, names: set[str]) -> list[tuple[bytes, bytes]]:
    """The members that stay, as they are written."""
    return [
        (body[slice(*member.key)], body[slice(*member.value)])
        for member in scanner.members_of(FIELDS.scan(body))
        if member.name not in names
    ]


def is_subsequence(short: bytes, long: bytes) -> bool:
    rest = iter(long)
    return all(byte in rest for byte in short)


@settings(max_examples=400)
@given(bodies(), changes_of)
@example(b'{"a":1,"model":2,"b":3,"model":4}', {"model": None})
@example(b'{ "model" : 1 , "model" : 2 }', {"model": None, "stream": None})
@example(b"{ }", {"model": b"1"})
@example(b'{"str\\u0065am":true , "x":1,"stream":false}', {"stream": b"false"})
@example(b'{"x":1 , "stream":false , "str\\u0065am":2 }', {"stream": None})
def test_the_result_says_what_a_dict_would(body: bytes, changes: dict[str, bytes | None]) -> None:
    added: dict[str, Any] = {name: json.loads(value) for name, value in changes.items() if value is not None}
    result = replaced(body, changes)
    kept = {name: value for name, value in loaded(body).items() if name not in changes}
    assert json.dumps(loaded(result), sort_keys=True) == json.dumps({**kept, **added}, sort_keys=True)
    # The client's members are what they were, in their order, behind the new ones.
    members = kept_bytes(result, set())
    assert members[len(added) :] == kept_bytes(body, set(changes))
    assert [json.loads(key) for key, _ in members[: len(added)]] == list(added)
    # Without what was put in, no byte is there that the body has not, in its order.
    assert is_subsequence(replaced(body, dict.fromkeys(changes)), body)


@given(bodies())
def test_no_change_is_no_change(body: bytes) -> None:
    assert replaced(body, {}) == body
    assert replaced(body, {"absent": None}) == body


@pytest.mark.parametrize(
    ("body", "changes", "result"),
    [
        (b"{}", {"a": b"1"}, b'{"a":1}'),
        (b"{ }", {"a": b"1", "b": b"[]"}, b'{"a":1,"b":[] }'),
        (b'{"model":1}', {"model": None}, b"{}"),
        (b'{"model":1}', {"model": b"2"}, b'{"model":2}'),
        (b'{"x":0,"model":1}', {"model": b"2"}, b'{"model":2,"x":0}'),
        (b'{"model":1,"x":0}', {"model": None}, b'{"x":0}'),
        (b'{ "x": 0, "model": 1 }\n', {"model": None}, b'{ "x": 0 }\n'),
        (b'{ "x": 0, "model": 1, "y": 2 }', {"model": None}, b'{ "x": 0,  "y": 2 }'),
        (b'{"x":0,"model":1,"mod\\u0065l":2}', {"model": None}, b'{"x":0}'),
        (b'{"model":0,"x":0,"model":1,"y":1,"model":2}', {"model": None}, b'{"x":0,"y":1}'),
        (MARK + b' {"model":0}', {"a": b"{}"}, MARK + b' {"a":{},"model":0}'),
        (b'{"x":0}', {"\xe9\n": b"1"}, b'{"\\u00e9\\n":1,"x":0}'),
        (b'{"\\u00e9":0}', {"\xe9": b"1"}, b'{"\\u00e9":1}'),
    ],
)
def test_bytes_of_the_result(body: bytes, changes: dict[str, bytes | None], result: bytes) -> None:
    assert replaced(body, changes) == result


@pytest.mark.parametrize("value", [b"", b"1,2", b'1,"stream":true', b"}", b"nan", MARK + b"1", b'"\xff"', b"1 2"])
def test_a_new_value_must_be_json(value: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="the new value of 'model' is not a JSON value: "):
        replaced(b"{}", {"model": value})


def test_long_bodies_are_not_copied() -> None:
    body = b'{"model":"tiny","prompt":"' + b"x" * 100_000 + b'"}'
    pieces = scanner.replace(FIELDS.scan(body), {"model": b'"other"'})
    assert len(pieces) == 3
    assert [type(piece) for piece in pieces] == [memoryview, bytes, memoryview]
    assert isinstance(pieces[2], memoryview)
    assert pieces[2].obj is body
