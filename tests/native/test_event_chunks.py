"""Which bytes of a chunked stream pass unread: held against a reader of chunks in Python."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer._native import _core
from kvxfer.errors import InvalidArgumentError

MARKS = (b"[DONE]", b'"error"')
CHUNKS = _core.EventChunks(MARKS)
BODY = st.lists(
    st.sampled_from([b"data: 1\n\n", b'{"error"', b"[DONE]", b"\n\n", b"\n", b"\r\n", b"x" * 300, b"data: ", b'"err']),
    max_size=5,
).map(b"".join)


def chunk(body: bytes, *, size: bytes | None = None) -> bytes:
    return b"%b\r\n%b\r\n" % (b"%x" % len(body) if size is None else size, body)


def expected(data: bytes) -> int:
    total, left = 0, data
    while left:
        head = re.match(rb"([0-9A-Fa-f]{1,7})\r\n", left)
        if head is None:
            return 0
        size = int(head[1], 16)
        body, end = left[head.end() :][:size], left[head.end() + size :][:2]
        if not size or len(body) != size or end != b"\r\n" or not body.endswith(b"\n\n"):
            return 0
        if any(mark in body for mark in MARKS):
            return 0
        total += size
        left = left[head.end() + size + 2 :]
    return total


@given(
    bodies=st.lists(BODY, max_size=4), cut=st.integers(0, 20), more=st.sampled_from([b"", b"0\r\n\r\n", b"\r\n", b"5"])
)
@example(bodies=[b"data: 1\n\n"], cut=0, more=b"")
@example(bodies=[b"data: 1\n\n", b"data: 2\n\n"], cut=0, more=b"")
@example(bodies=[b'data: "err\n\n', b'or"\n\n'], cut=0, more=b"")
def test_whole_chunks_of_whole_events_without_marks_pass(bodies: list[bytes], cut: int, more: bytes) -> None:
    data = b"".join(chunk(body) for body in bodies) + more
    data = data[: len(data) - cut]
    assert CHUNKS.body_bytes(data) == expected(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"9",
        b"9;a=b\r\ndata: 1\n\n\r\n",
        b" 9\r\ndata: 1\n\n\r\n",
        b"0x9\r\ndata: 1\n\n\r\n",
        b"+9\r\ndata: 1\n\n\r\n",
        b"9\ndata: 1\n\n\n",
        b"fffffffff\r\ndata: 1\n\n\r\n",
        b"ffffffffffffffff9\r\ndata: 1\n\n\r\n",
        b"7fffffff\r\n",
        b"-1\r\n\n\n\r\n",
    ],
)
def test_other_bytes_are_left_to_the_parser(data: bytes) -> None:
    assert CHUNKS.body_bytes(data) == 0


def test_sizes_are_read_in_every_form_that_stands_for_them() -> None:
    for size in (b"9", b"09", b"0000009"):
        assert CHUNKS.body_bytes(chunk(b"data: 1\n\n", size=size)) == 9
    body = b"x" * 0xAB + b"\n\n"
    for size in (b"ad", b"AD", b"aD"):
        assert CHUNKS.body_bytes(chunk(body, size=size)) == 0xAD


def test_an_empty_mark_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        _core.EventChunks([b""])
