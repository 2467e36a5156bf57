"""The JSON scanner accepts what ``json.loads`` accepts, and says what it says of each member; all exceptions."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError, InvalidJsonError, JsonTooComplexError, LimitExceededError
from kvxfer.openai import scanner
from kvxfer.openai.errors import error_body, status_for
from tests.support.native.json_bodies import MARK, NAMES, bodies, loaded, mutated

FIELDS = scanner.Fields([name for name in NAMES if name != "\ud800"])
KINDS = {
    str: scanner.Kind.STRING,
    int: scanner.Kind.NUMBER,
    float: scanner.Kind.NUMBER,
    dict: scanner.Kind.OBJECT,
    list: scanner.Kind.ARRAY,
    type(None): scanner.Kind.NULL,
}


def kind_of(value: Any) -> scanner.Kind:
    if isinstance(value, bool):
        return scanner.Kind.TRUE if value else scanner.Kind.FALSE
    return KINDS[type(value)]


def same(one: Any, other: Any) -> bool:
    """Equal, and of one type; -0.0 is not 0.0."""
    return json.dumps(one) == json.dumps(other)


def members_by_json(body: bytes) -> list[tuple[str, Any]]:
    """The outer object's members as they stand; it is the last object that ends."""
    objects: list[list[tuple[str, Any]]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        objects.append(pairs)
        return dict(pairs)

    loaded(body, hook=keep)
    return objects[-1]


def check_equal(body: bytes) -> None:
    scan = FIELDS.scan(body)
    assert scan.body == body
    assert body[scan.open : scan.open + 1] == b"{"
    members = scanner.members_of(scan)
    expected = members_by_json(body)
    assert len(scan) == len(members) == len(expected)
    for member, (name, value) in zip(members, expected, strict=True):
        assert member.name == name
        assert json.loads(body[slice(*member.key)]) == name
        own = json.loads(body[slice(*member.value)])
        assert same(own, value)
        assert member.kind == kind_of(own)
    whole = loaded(body)
    for name in FIELDS.names:
        if name not in whole:
            assert scan.kind(name) is scan.span(name) is scan.scalar(name) is scanner.raw(scan, name) is None
            continue
        assert scan.kind(name) == kind_of(whole[name])
        assert scan.span(name) == [member.value for member in members if member.name == name][-1]
        text = scanner.raw(scan, name)
        assert text is not None
        assert same(json.loads(bytes(text)), whole[name])
        if isinstance(whole[name], (dict, list)):
            with pytest.raises(InvalidArgumentError, match="is an object or an array"):
                scan.scalar(name)
        else:
            assert same(scan.scalar(name), whole[name])


def check_refused(body: bytes) -> InvalidJsonError:
    with pytest.raises(InvalidJsonError, match=r" at byte \d+$") as caught:
        FIELDS.scan(body)
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(body)
    return caught.value


@settings(max_examples=300)
@given(bodies())
@example(b'{"str\\u0065am":true,"stream":false,"strea\\u006D":null}')
@example(b'{"\\ud83d\\ude00":1,"\xf0\x9f\x98\x80":2,"\\ud83d":3,"\\ude00\\ud83d":4}')
@example(b'{"model":"\\ud83d\\ud83d\\ude00","prompt":"\\ud800\\u0041"}')
@example(b'{"n":1e999,"max_tokens":-0,"model":-0.0,"prompt":1E400}')
@example(MARK + b'{"n":1}')
def test_a_valid_body_reads_as_json_has_it(body: bytes) -> None:
    check_equal(body)


@settings(max_examples=400)
@given(mutated | st.binary(max_size=20))
def test_a_changed_body_is_judged_as_json_judges_it(body: bytes) -> None:
    try:
        is_object = isinstance(loaded(body), dict)
    except ValueError:
        is_object = False
    if is_object:
        check_equal(body)
    else:
        check_refused(body)


@given(
    st.lists(
        st.integers(0, 10**7).map(str) | st.sampled_from(["0", "00", "01", "", " ", "1 1", "-1", "2.5", "x"]),
        max_size=30,
    ),
    st.sampled_from([",", ", ", ",  ", " ,"]),
    st.integers(0, 17),
)
def test_lists_of_token_ids(items: list[str], separator: str, shift: int) -> None:
    """Any place of a wrong item in the sixteen bytes that are looked at together."""
    body = b'{"prompt":' + b" " * shift + b"[" + separator.join(items).encode() + b"]}"
    try:
        loaded(body)
    except ValueError:
        check_refused(body)
    else:
        check_equal(body)


@given(
    st.integers(0, 40),
    st.sampled_from([b'"', b"\\", b"\x1f", b"\x7f", b"\x80", b"\xc3\xa9", b"\x00"]),
    st.integers(0, 20),
)
def test_any_byte_at_any_place_of_a_string(before: int, byte: bytes, after: int) -> None:
    body = b'{"model":"' + b"x" * before + byte + b"y" * after + b'"}'
    try:
        loaded(body)
    except ValueError:
        check_refused(body)
    else:
        check_equal(body)


@pytest.mark.parametrize(
    ("body", "what", "offset"),
    [
        (b"", "expected a value", 0),
        (b"  ", "expected a value", 2),
        (b"[1]", "another kind of value", 0),
        (b' "x"', "another kind of value", 1),
        (b"[1", "expected ',' or ']'", 2),
        (b"{", "expected a name in quotes", 1),
        (b"{1:2}", "expected a name in quotes", 1),
        (b'{"a":1,}', "expected a name in quotes", 7),
        (b'{"a" 1}', "expected ':'", 5),
        (b'{"a":}', "expected a value", 5),
        (b'{"a":tru}', "expected a value", 5),
        (b'{"a":1 "b":2}', "expected ',' or '}'", 7),
        (b'{"a":[1,]}', "expected a value", 8),
        (b'{"a":1}x', "bytes after the value", 7),
        (b'{"a":1}{}', "bytes after the value", 7),
        (b'{"a":"x', "the string has no end", 7),
        (b'{"a":"\\', "the string has no end", 7),
        (b'{"a":"\\x"}', "an invalid escape", 6),
        (b'{"a":"\\u12g4"}', "an invalid escape", 6),
        (b'{"a":"\n"}', "a control character within a string", 6),
        (b'{"a":"\xff"}', "invalid UTF-8", 6),
        (b'{"a":"\xed\xa0\x80"}', "invalid UTF-8", 6),
        (b'{"a":01}', "expected ',' or '}'", 6),
        (b'{"a":1.}', "a number without digits after its point", 5),
        (b'{"a":1e+}', "a number without digits in its exponent", 5),
        (b'{"a":-}', "a number without digits", 5),
        (b'{"a":NaN}', "NaN, which is not JSON,", 5),
        (b'{"a":Infinity}', "Infinity, which is not JSON,", 5),
        (b'{"a":-Infinity}', "-Infinity, which is not JSON,", 5),
        (MARK * 2 + b"{}", "expected a value", 3),
        (b"{}" + MARK, "bytes after the value", 2),
    ],
)
def test_the_error_says_what_is_wrong_and_where(body: bytes, what: str, offset: int) -> None:
    error = check_refused(body)
    assert str(error).endswith(f": {what} at byte {offset}")
    begin = "the body must be a JSON object: " if what.startswith("another") else "the body is not valid JSON: "
    assert str(error).startswith(begin)
    assert error.offset == offset
    assert type(error) is InvalidJsonError
    assert status_for(error) == 400
    assert error_body(error)["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_are_refused_that_json_reads(encoding: str) -> None:
    body = '{"model":"tiny"}'.encode(encoding)
    assert json.loads(body) == {"model": "tiny"}
    check_refused(body)


@pytest.mark.parametrize("body", [b'{"a":"\xed\xa0\x80"}', b'{"a":NaN}', b'{"a":[-Infinity]}'])
def test_what_is_refused_though_json_reads_it(body: bytes) -> None:
    json.loads(body)
    check_refused(body)


def nested(levels: int, opened: bytes, inner: bytes, closed: bytes) -> bytes:
    return b'{"prompt":' + opened * levels + inner + closed * levels + b"}"


@pytest.mark.parametrize(
    ("opened", "inner", "closed"), [(b"[", b"", b"]"), (b'{"a":', b"1", b"}"), (b"[[", b"", b"]]")]
)
def test_nesting_has_a_bound(opened: bytes, inner: bytes, closed: bytes) -> None:
    most = (scanner.DEPTH_MAX - 1) // opened.count(b"[") if b"[" in opened else scanner.DEPTH_MAX - 1
    check_equal(nested(most, opened, inner, closed))
    error = check_refused(nested(most + 1, opened, inner, closed))
    assert type(error) is JsonTooComplexError
    assert str(error).startswith("the body is too complex: nested deeper than 512 levels at byte ")
    assert status_for(error) == 400
    assert error_body(error)["error"]["code"] == "json_too_complex"
    check_refused(b"[" * 1_000_000)


def test_members_have_a_bound() -> None:
    def body(count: int) -> bytes:
        return b"{" + b",".join([b'"n":%d' % i for i in range(count)]) + b"}"

    scan = FIELDS.scan(body(scanner.MEMBERS_MAX))
    assert scan.scalar("n") == len(scan) - 1 == scanner.MEMBERS_MAX - 1
    assert isinstance(check_refused(body(scanner.MEMBERS_MAX + 1)), JsonTooComplexError)
    inner = b'{"x":' + body(5000) + b"}"
    assert len(FIELDS.scan(inner)) == 1


def test_integers_have_the_digits_that_json_reads() -> None:
    most = b'{"n":-' + b"9" * sys.int_info.default_max_str_digits + b"}"
    check_equal(most)
    check_equal(b'{"n":' + b"9" * 9000 + b".5}")
    check_equal(b'{"n":' + b"9" * 9000 + b"e0}")
    for digits in (b"9" * 4301, b"1" * 100_000):
        for body in (b'{"n":%s}', b'{"n":[1,%s,2]}', b'{"n":[1,22,333,4444,55555,%s]}'):
            with pytest.raises(ValueError, match="4300"):
                json.loads(body % digits)
            assert isinstance(check_refused(body % digits), JsonTooComplexError)


def test_infinite_numbers_are_numbers() -> None:
    scan = FIELDS.scan(b'{"n":1e999,"max_tokens":-1e999}')
    assert scan.scalar("n") == math.inf == -(scan.scalar("max_tokens") or 0)  # type: ignore[operator]


def test_names_that_were_not_prepared() -> None:
    scan = FIELDS.scan(b'{"other":1}')
    with pytest.raises(InvalidArgumentError, match="'other' is none of the fields"):
        scan.kind("other")
    with pytest.raises(TypeError):
        scan.kind("\ud800")
    with pytest.raises(LimitExceededError):
        scanner.Fields([str(i) for i in range(1025)])


def test_only_bytes_are_scanned() -> None:
    """What may change while it is looked at is not: the GIL is free meanwhile."""
    for body in (bytearray(b"{}"), memoryview(b"{}"), "{}"):
        with pytest.raises(TypeError):
            FIELDS.scan(body)  # type: ignore[arg-type]


def runs_beside(call: Callable[[], object]) -> bool:
    """Whether another thread, which only waits for the GIL, gets it while ``call`` runs: no thread has to give it."""
    held, ready = threading.Lock(), threading.Event()
    has_run: list[bool] = []

    def run() -> None:
        ready.set()
        with held:
            has_run.append(True)

    thread = threading.Thread(target=run)
    before = sys.getswitchinterval()
    held.acquire()
    thread.start()
    ready.wait(30)
    sys.setswitchinterval(1000)
    try:
        held.release()
        call()
        return bool(has_run)
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_another_thread_works_while_a_long_body_is_looked_at() -> None:
    body = b'{"x":[' + b"{}," * (4 << 20) + b"1]}"
    assert any(runs_beside(lambda: FIELDS.scan(body)) for _ in range(10))
    assert not any(runs_beside(lambda: FIELDS.scan(b'{"model":1}')) for _ in range(10))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
def test_threads_scan_at_once() -> None:
    body = b'{"model":"tiny","prompt":"' + b"text " * 200_000 + b'","n":2}'
    wrong: list[object] = []

    def run() -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            scan = FIELDS.scan(body)
            if (scan.scalar("model"), scan.scalar("n")) != ("tiny", 2):
                wrong.append(scan)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_scan_keeps_what_it_needs() -> None:
    scan = scanner.Fields(["model"]).scan(b"".join([b'{"model":', b'"ti\\u006ey"}']))
    assert scan.scalar("model") == "tiny"
    assert scan.kind("model") == scanner.Kind.STRING
