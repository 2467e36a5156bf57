"""JSON bodies for the scanner's tests: objects as a client may write them, and the same with some bytes changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hypothesis import strategies as st

NAMES = ["model", "stream", "prompt", "max_tokens", "n", "é", "", "a\nb", "\ud800", "😀", 'q"\\']
MARK = b"\xef\xbb\xbf"

numbers = st.sampled_from(
    ["0", "-0", "-1", "12", "120", "1.5", "-0.25e-3", "1E+2", "1e999", "123456789012345678901234567890"]
) | st.integers().map(str)
names_of_fields = st.sampled_from(NAMES)
spaces = st.text(" \t\r\n", max_size=2) | st.just("")
texts = st.text(max_size=6) | st.sampled_from(
    [*NAMES, "plain text " * 9, "世界" * 9, "\ud83d", "\U0010ffff", "\x7f\x1f"]
)


def _escaped(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02X}" for at in range(0, len(units), 2))


@st.composite
def written_texts(draw: st.DrawFn, texts: st.SearchStrategy[str] = texts) -> str:
    """A string in one of its spellings, with quotes; never a surrogate as itself, which UTF-8 has not."""
    text = draw(texts)
    how = draw(st.sampled_from(["plain", "ascii", "escapes", "mixed"]))
    if how == "escapes":
        return f'"{_escaped(text)}"'
    if how == "mixed" and text:
        cut = draw(st.integers(0, len(text)))
        return f'"{_escaped(text[:cut])}{json.dumps(text[cut:])[1:]}'
    plain = json.dumps(text, ensure_ascii=how == "ascii")
    return re.sub("[\ud800-\udfff]", lambda match: _escaped(match.group()), plain)


@st.composite
def written_values(draw: st.DrawFn, depth: int = 3) -> str:
    """A JSON value with spaces where they may be."""
    kind = draw(st.sampled_from(["string", "number", "literal", "array", "object", "ids"] if depth else ["number"]))
    if kind == "string":
        return draw(written_texts())
    if kind == "literal":
        return draw(st.sampled_from(["true", "false", "null"]))
    if kind == "array":
        items = draw(st.lists(written_values(depth - 1), max_size=4))
        return "[" + ",".join(draw(spaces) + item + draw(spaces) for item in items) + ("]" if items else " ]")
    if kind == "object":
        return draw(written_objects(depth - 1, st.just("key") | texts))
    if kind == "ids":
        separator = draw(st.sampled_from([",", ", ", " ,", ",  "]))
        return f"[{separator.join(map(str, draw(st.lists(st.integers(0, 128_000), min_size=1, max_size=40))))}]"
    return draw(numbers)


@st.composite
def written_objects(draw: st.DrawFn, depth: int = 2, names: st.SearchStrategy[str] = names_of_fields) -> str:
    """A JSON object; names occur more than once, in several spellings."""
    members = []
    for _ in range(draw(st.integers(0, 5))):
        key, value = draw(written_texts(names)), draw(written_values(depth))
        members.append(f"{draw(spaces)}{key}{draw(spaces)}:{draw(spaces)}{value}{draw(spaces)}")
    return "{" + (",".join(members) or draw(spaces)) + "}"


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """The bytes of a valid body."""
    text = draw(spaces) + draw(written_objects()) + draw(spaces)
    return (MARK if draw(st.booleans()) and draw(st.booleans()) else b"") + text.encode()


PIECES = [
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"0", b"1", b"-", b".", b"e", b"\n", b"\x00", b"\x1f"),
    *(
        b"\x7f",
        b"\x80",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe4\xb8",
        b"\xff",
        MARK,
        b"\\u12",
        b"\\x",
    ),
    *(b"\\ud83d", b"\\ude00", b"NaN", b"-Infinity", b"true", b"nul", b'"a":1,', b"\x0b", b"\x0c", b"\xc2\xa0", b"00"),
]


def _edited(body: bytes, changes: Sequence[tuple[str, float, bytes]]) -> bytes:
    for kind, place, piece in changes:
        at = int(place * (len(body) + 1))
        end = at + len(piece)
        middle = {"put": piece + body[at:end], "over": piece, "cut": b"", "double": body[at:end] * 2}[kind]
        body = body[:at] + middle + body[end:]
    return body


edits = st.tuples(
    st.sampled_from(["put", "over", "cut", "double"]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(PIECES) | st.binary(min_size=1, max_size=2),
)
mutated = st.builds(_edited, bodies(), st.lists(edits, min_size=1, max_size=3))


def _refused(name: str) -> NoReturn:
    raise ValueError(name)


def loaded(body: bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What ``json.loads`` makes of the bytes, where the scanner has nothing stricter to say; else ValueError.

    ``hook`` is given each object's members as they stand.
    """
    return json.loads(body.decode("utf-8-sig"), parse_constant=_refused, object_pairs_hook=hook)
