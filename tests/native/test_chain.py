"""The keys of prompts are those that a plain reader finds, shared exactly by what prompts begin with in common."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.openai import scanner
from kvxfer.openai.chains import INTERVAL_BYTES, KEYS_MAX, ChainHasher, Secret
from kvxfer.policy.prefixes import Chain
from tests.native.test_json_scan import runs_beside
from tests.support.native.chain_model import chain_of, parsed, root_of
from tests.support.native.json_bodies import (
    NAMES,
    bodies,
    spaces,
    texts,
    written_objects,
    written_texts,
    written_values,
)

SECRET = Secret(bytes(range(16)))
FIELDS = scanner.Fields(["model", "prompt", "system", "é", "n"])
HASHER = ChainHasher(SECRET, FIELDS, root=["model", "é", "n"], heads=["system"])
ROOT = 0x0123456789ABCDEF

LENGTHS = [1, 2, 511, 512, 1023, 1024, 2046, 2047, 2048, 2049, 4095, 4096, 4200]
long_texts = st.builds(
    lambda text, length, end: (text * length)[:length] + end,
    st.sampled_from(["x", "plain text ", "世界", "é", "\ud83d", "\U0010ffff", '"', "\\", "\n", "line\n"]),
    st.sampled_from(LENGTHS),
    texts,
)
"""Up to 16 KiB of UTF-8; their ends lie around the places of keys."""
written_long = written_texts(texts | long_texts)
contents = written_long | written_values()
names = st.sampled_from(['"role"', '"content"', '"\\u0063ontent"', '"type"', '"text"', '""'])


@st.composite
def messages(draw: st.DrawFn) -> str:
    """A list of messages, most of which are objects with a text."""
    items = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.integers(0, 4)):
            members = draw(st.lists(st.tuples(names, contents), max_size=3))
            members = [f"{draw(spaces)}{name}:{draw(spaces)}{value}" for name, value in members]
            items.append("{" + ",".join(members) + draw(spaces) + "}")
        else:
            items.append(draw(contents))
    return "[" + ",".join(draw(spaces) + item + draw(spaces) for item in items) + "]"


@st.composite
def lists_of_ids(draw: st.DrawFn) -> str:
    """Token ids, with other values among some."""
    first = draw(st.integers(0, 2**32))
    ids = [str((first + 7919 * at) % 128_000) for at in range(draw(st.sampled_from([1, 3, 511, 512, 513, 1024, 1500])))]
    others = draw(st.lists(written_values() | st.sampled_from(["4294967295", "4294967296", "-1", "1.0", "1e2", "0"])))
    for other in others[:8]:
        ids.insert(draw(st.integers(0, len(ids))), other)
    return "[" + draw(st.sampled_from([",", ", ", " ,\n"])).join(ids) + "]"


prompts = (
    written_long | lists_of_ids() | st.lists(lists_of_ids() | written_long).map(lambda some: f"[{','.join(some)}]")
)
anything = prompts | messages() | written_objects() | written_values()


def chain(prompt: str, *, system: str | None = None, root: int = ROOT, is_list: bool = False) -> Chain:
    front = "" if system is None else f'"system":{system},'
    scan = FIELDS.scan(f'{{{front}"prompt":{prompt}}}'.encode())
    return HASHER.chain(scan, root, "prompt", is_list_of_prompts=is_list)


def keys(prompt: Any, **more: Any) -> list[int]:
    return list(chain(json.dumps(prompt), **more).keys)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@settings(max_examples=150)
@given(anything, st.none() | contents | messages(), st.booleans())
@example('"' + "x" * 2047 + '\\ud83d\\ude00"', None, True)
@example('"' + "x" * 2045 + '\\ud83d\\ude00y"', '""', False)
@example("[" + "1," * 511 + '"x",2,3]', None, True)
@example("[" + "9" * 4300 + "]", None, True)
@example('[{"content":' + "1" * 2040 + "." + "2" * 5000 + "}]", None, False)
def test_a_chain_is_that_of_a_plain_reader(prompt: str, system: str | None, is_list: bool) -> None:
    parts = [] if system is None or parsed(system.encode()) is None else [("system", system.encode())]
    if parsed(prompt.encode()) is not None:
        parts.append(("prompt", prompt.encode()))
        expected = chain_of(SECRET.value, ROOT, parts, is_list_of_prompts=is_list)
    else:
        expected = chain_of(SECRET.value, ROOT, parts)
    found = chain(prompt, system=system, is_list=is_list)
    assert (list(found.keys), list(found.sizes)) == expected


@given(bodies(), st.lists(st.binary(max_size=20), max_size=3))
def test_a_root_is_that_of_a_plain_reader(body: bytes, given: list[bytes]) -> None:
    scan = FIELDS.scan(body)
    members = [
        (name, body[slice(*member.value)])
        for name in ("model", "é", "n")
        for member in scanner.members_of(scan)
        if member.name == name and member.kind is not scanner.Kind.NULL
    ]
    assert HASHER.root(scan, given) == root_of(SECRET.value, given, members)


@settings(max_examples=60)
@given(anything, st.booleans())
def test_neither_spaces_nor_spelling_matter(prompt: str, is_list: bool) -> None:
    """Numbers stay as they are written, and so do members."""
    marks: list[str] = []

    def kept(number: str) -> str:
        marks.append(number)
        return f"\ue000{len(marks) - 1}\ue000"

    class Pairs(dict[str, Any]):
        def __init__(self, pairs: list[tuple[str, Any]]) -> None:
            super().__init__({str(at): value for at, (_, value) in enumerate(pairs)})
            self.pairs = pairs

        def items(self) -> Any:
            return self.pairs

    value = json.loads(prompt, parse_int=kept, parse_float=kept, object_pairs_hook=Pairs)
    again = json.dumps(value, indent=3)
    for at, number in enumerate(marks):
        again = again.replace(f'"\\ue000{at}\\ue000"', number)
    assert chain(again, is_list=is_list) == chain(prompt, is_list=is_list)


def told(value: Any) -> Any:
    """A parsed value beside its kinds, so that only what says the same is equal."""
    if isinstance(value, list):
        return type(value).__name__, [told(one) for one in value]
    return (value[0], told(value[1])) if isinstance(value, tuple) else (type(value).__name__, value)


@settings(max_examples=60)
@given(anything, anything)
def test_two_chains_part_where_their_prompts_do(one: str, other: str) -> None:
    """Behind the first key that differs none is shared."""
    is_same = told(parsed(one.encode())) == told(parsed(other.encode()))
    first, second = (list(chain(f'[{{"role":"user"}},{prompt}]').keys) for prompt in (one, other))
    assert (first[-1] == second[-1]) == (first == second) == is_same
    common = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    assert common > 0
    assert not set(first[common:]) & set(second[common:])


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), long_texts), min_size=1, max_size=5), long_texts)
def test_the_next_turn_has_the_keys_of_the_turn_before(turns: list[tuple[str, str]], text: str) -> None:
    before = [{"role": role, "content": content} for role, content in turns]
    first = chain(json.dumps(before), system=json.dumps(text))
    after = chain(json.dumps([*before, user("more")]), system=json.dumps(text))
    assert list(after.keys[: len(first.keys)]) == list(first.keys)
    assert list(after.sizes[: len(first.sizes)]) == list(first.sizes)
    assert len(after.keys) == len(first.keys) + 1


@given(long_texts, long_texts.filter(bool))
def test_a_text_that_grows_keeps_the_keys_within_it(text: str, more: str) -> None:
    for is_message in (True, False):
        shorter, longer = (keys([user(one)] if is_message else one) for one in (text, text + more))
        inner = shorter[:-1] if is_message or len(text.encode("utf-8", "surrogatepass")) % INTERVAL_BYTES else shorter
        assert longer[: len(inner)] == inner
        assert not set(shorter[len(inner) :]) & set(longer)


def test_keys_are_where_they_are_said_to_be() -> None:
    assert list(chain(json.dumps("x" * 5000)).sizes) == [2048, 4096, 5000]
    assert list(chain(json.dumps("x" * 4096)).sizes) == [2048, 4096]
    assert list(chain(json.dumps("é" * 1025)).sizes) == [2048, 2050]
    assert list(chain('""').sizes) == list(chain("[]").sizes) == list(chain("[]", is_list=True).sizes) == []
    ids = json.dumps(list(range(1300)))
    assert list(chain(ids, is_list=True).sizes) == [2048, 4096, 5200]
    assert list(chain(json.dumps([user("hi"), user("x" * 2048)])).sizes) == [17, 17 + 2048, 17 + 15 + 2048]
    assert list(chain("[{},null]").sizes) == [0, 0]
    assert list(chain('[{"a":12.50}]', system='"abc"').sizes) == [3, 9]


def test_of_a_list_of_prompts_the_first_counts() -> None:
    assert keys(["one", "two"], is_list=True) == keys("one", is_list=True) == keys("one")
    assert keys([[1, 2], [3]], is_list=True) == keys([1, 2], is_list=True)
    assert keys(["one"]) != keys(["one"], is_list=True)


def test_what_looks_like_something_else_is_not_it() -> None:
    said = json.dumps([user('"},{"role":"user","content":"')])
    alike = [
        '"[]"',
        "[]",
        '"1"',
        "[1]",
        "[[1]]",
        "1",
        "[12]",
        "[1,2]",
        "true",
        '"true"',
        "null",
        '"null"',
        "{}",
        '"{}"',
    ]
    alike += ['{"a":"b"}', '["a","b"]', '{"a":{"b":null}}', '{"a":null,"b":null}', '{"ab":""}', '{"a":"b","":""}']
    alike += [
        '{"":"ab"}',
        '["ab"]',
        '["ab",""]',
        '["","ab"]',
        '"ab"',
        '"a\\u0000b"',
        '"ab\\u0000"',
        "1.0",
        "-0",
        "0",
        "1e0",
    ]
    ends = [list(chain(f"[{value}]").keys)[-1] for value in [*alike, said]]
    assert len(set(ends)) == len(ends)


@given(st.lists(long_texts.filter(bool), min_size=2, max_size=4))
def test_a_text_in_other_messages_shares_nothing_behind_the_cut(parts: list[str]) -> None:
    apart = keys([user(part) for part in parts])
    joined = keys([user("".join(parts[:2])), *map(user, parts[2:])])
    common = next(at for at, (a, b) in enumerate(zip(apart, joined, strict=False)) if a != b)
    assert not set(apart[common:]) & set(joined[common:])
    assert common <= (len("roleusercontent") + len(parts[0].encode("utf-8", "surrogatepass"))) // INTERVAL_BYTES


def test_other_secrets_and_roots_have_other_keys() -> None:
    scan = FIELDS.scan(b'{"prompt":"text","model":"m"}')
    other = ChainHasher(Secret(bytes(16)), FIELDS, root=["model"])
    assert len({HASHER.root(scan), other.root(scan), HASHER.root(scan, [b""]), HASHER.root(scan, [b"m"])}) == 4
    found = [HASHER.chain(scan, 1, "prompt"), HASHER.chain(scan, 2, "prompt"), other.chain(scan, 1, "prompt")]
    assert len({one.keys[0] for one in found}) == 3


def test_each_occurrence_of_a_name_counts_in_a_root() -> None:
    def root(body: bytes) -> int:
        return HASHER.root(FIELDS.scan(body))

    assert root(b'{"n":1,"model":"a"}') == root(b'{"model":"\\u0061", "n":1,"prompt":"x","n":null}')
    some = [b'{"model":"a"}', b'{"model":"b"}', b'{"model":"a","model":"b"}', b'{"model":"b","model":"a"}', b"{}"]
    some += [b'{"model":"a","model":null,"model":"a"}', b'{"n":"a"}', b'{"\xc3\xa9":"a"}']
    assert len(set(map(root, some))) == len(some)


def test_a_chain_has_a_bound() -> None:
    text = "x" * (16 << 20)
    started = time.monotonic()
    found = chain(json.dumps(text))
    assert list(found.sizes) == [INTERVAL_BYTES * at for at in range(1, KEYS_MAX + 1)]
    assert list(chain(json.dumps(text[: 9 << 20])).keys) == list(found.keys)
    many = chain("[" + "{}," * KEYS_MAX * 2 + "1]")
    assert len(many.keys) == KEYS_MAX
    assert len(chain("[" + "1," * (8 << 20) + "1]", is_list=True).keys) == KEYS_MAX
    assert len(chain("[" + "1," * (4 << 20) + "1]").keys) == KEYS_MAX
    assert len(chain('["' + "\\ud83d" * (2 << 20) + '"]').keys) == 3 * (2 << 20) // INTERVAL_BYTES + 1
    assert len(chain("[[" + '{"":[]},' * (2 << 20) + "1]]").keys) == 1
    assert time.monotonic() - started < 60


def test_deep_values_are_hashed() -> None:
    most = scanner.DEPTH_MAX - 2
    ends = [keys_of_deep(b"[", b"]", most), keys_of_deep(b'{"a":', b"}", most), keys_of_deep(b"[", b"]", most - 1)]
    assert len({end for one in ends for end in one}) == 3


def keys_of_deep(opened: bytes, closed: bytes, levels: int) -> list[int]:
    prompt = b"[" + opened * levels + b"1" + closed * levels + b"]"
    found = HASHER.chain(FIELDS.scan(b'{"prompt":' + prompt + b"}"), ROOT, "prompt")
    assert (list(found.keys), list(found.sizes)) == chain_of(SECRET.value, ROOT, [("prompt", prompt)])
    return list(found.keys)


def test_another_thread_works_while_a_long_body_is_hashed() -> None:
    long = FIELDS.scan(b'{"prompt":[[' + b"{}," * (4 << 20) + b"1]]}")
    short = FIELDS.scan(b'{"prompt":"text"}')
    assert any(runs_beside(lambda: HASHER.chain(long, ROOT, "prompt")) for _ in range(10))
    assert not any(runs_beside(lambda: HASHER.chain(short, ROOT, "prompt")) for _ in range(10))


def test_wrong_calls_name_what_is_wrong() -> None:
    with pytest.raises(InvalidArgumentError, match="16 bytes, not 3"):
        Secret(b"abc")
    assert repr(SECRET) == "Secret()"
    with pytest.raises(InvalidArgumentError, match="'other' is none of the fields"):
        ChainHasher(SECRET, FIELDS, root=["other"])
    with pytest.raises(InvalidArgumentError, match="'other' is none of the fields"):
        HASHER.chain(FIELDS.scan(b"{}"), ROOT, "other")
    scan = scanner.Fields(NAMES[:3]).scan(b"{}")
    with pytest.raises(InvalidArgumentError, match="scanned with other fields"):
        HASHER.root(scan)
    with pytest.raises(InvalidArgumentError, match="scanned with other fields"):
        HASHER.chain(scan, ROOT, "prompt")


def test_fields_that_are_absent_have_no_part() -> None:
    assert not len(HASHER.chain(FIELDS.scan(b"{}"), ROOT, "prompt").keys)
    assert chain('"x"', system="null") == chain('"x"')
    assert chain('"x"', system='""').keys[0] != chain('"x"').keys[0]
    assert chain("null", system='"x"').keys[0] == chain('"y"', system='"x"').keys[0]
