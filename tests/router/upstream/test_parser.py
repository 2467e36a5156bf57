"""The parser of answers: the same bytes give the same answer however they are split; what is no answer is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ProtocolError
from kvxfer.router.upstream.limits import UpstreamLimits
from kvxfer.router.upstream.parser import COMPLETE, AnswerParser

LIMITS = UpstreamLimits(head_bytes_max=400, headers_max=5, silent_bytes_max=64, interim_max=2)


@dataclasses.dataclass(frozen=True)
class Parsed:
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    is_complete: bool
    can_be_kept: bool
    error: str | None


def parse(
    pieces: list[bytes], *, to_head: bool = False, ends: bool = False, parser: AnswerParser | None = None
) -> Parsed:
    parser = parser or AnswerParser(LIMITS)
    chunks: list[bytes] = []
    parser.begin(chunks.append, to_head=to_head)
    error = None
    try:
        for index, piece in enumerate(pieces):
            if parser.stage == COMPLETE:
                parser.is_clean &= not b"".join(pieces[index:])
                break
            parser.feed(piece)
        if ends and parser.stage != COMPLETE and not parser.eof():
            error = "ended early"
    except ProtocolError as found:
        error = str(found)
    can_be_kept = parser.is_clean and parser.keeps_alive
    is_complete = parser.stage == COMPLETE
    return Parsed(parser.status, tuple(parser.headers), b"".join(chunks), is_complete, can_be_kept, error)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[at:until] for at, until in itertools.pairwise(places)]


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
ANSWERS = {
    "length": (OK + b"content-length: 5\r\nx-a: b\r\n\r\nhello", b"hello", True),
    "empty": (OK + b"content-length: 0\r\n\r\n", b"", True),
    "chunks": (CHUNKED + chunked(b"data: 1\n\n", b"x" * 300, b"y"), b"data: 1\n\n" + b"x" * 300 + b"y", True),
    "extensions": (CHUNKED + b"3;a=b\r\nabc\r\n0;c\r\n\r\n", b"abc", True),
    "trailers": (CHUNKED + chunked(b"abc", end=b"0\r\nx-late: 1\r\n\r\n"), b"abc", True),
    "until close": (OK + b"x-a: b\r\n\r\nuntil the end", b"until the end", False),
    "close": (OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
    "1.0": (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
    "1.0 kept": (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi", b"hi", True),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        + OK
        + b"content-length: 2\r\n\r\nhi",
        b"hi",
        True,
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 10\r\n\r\n", b"", True),
    "surplus": (OK + b"content-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\n", b"hi", False),
    "204 with a body": (b"HTTP/1.1 204 No Content\r\n\r\nbody", b"", False),
}
REFUSED = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01",
    "HTTP/2": b"HTTP/2.0 200 OK\r\n\r\n",
    "switched": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "long head": OK + b"x-a: " + b"a" * 400 + b"\r\n\r\n",
    "many headers": OK + b"a: b\r\n" * 6 + b"\r\n",
    "two lengths": OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
    "length and chunks": OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    "coding": OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
    "two codings": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "chunk size": CHUNKED + b"xyz\r\nabc\r\n",
    "negative chunk": CHUNKED + b"-1\r\nabc\r\n",
    "huge chunk": CHUNKED + b"f" * 17 + b"\r\n",
    "no line end after a chunk": CHUNKED + b"3\r\nabcd\r\n",
    "interim without end": b"HTTP/1.1 102 Processing\r\n\r\n" * 3,
    "chunks in 1.0": b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    "bad header": OK + b"a b: c\r\n\r\n",
}


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_an_answer_is_the_same_however_it_is_split(name: str, cuts: list[int]) -> None:
    data, body, can_be_kept = ANSWERS[name]
    parsed = parse(split(data, cuts), ends=True)
    assert (parsed.body, parsed.is_complete, parsed.can_be_kept, parsed.error) == (body, True, can_be_kept, None)
    assert parsed == parse([data], ends=True)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_byte_by_byte(name: str) -> None:
    data, _, _ = ANSWERS[name]
    assert parse([data[at : at + 1] for at in range(len(data))], ends=True) == parse([data], ends=True)


@pytest.mark.parametrize("name", REFUSED)
@given(cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_what_is_no_answer_is_refused_however_it_is_split(name: str, cuts: list[int]) -> None:
    parsed = parse(split(REFUSED[name], cuts))
    assert parsed.error is not None
    assert not parsed.is_complete
    assert not parsed.can_be_kept


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=300), max_size=12),
    cuts=st.lists(st.integers(0, 5000), max_size=20),
    is_chunked=st.booleans(),
)
def test_any_body_comes_out_as_it_was_sent(chunks: list[bytes], cuts: list[int], is_chunked: bool) -> None:
    body = b"".join(chunks)
    data = CHUNKED + chunked(*chunks) if is_chunked else OK + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    parsed = parse(split(data, cuts))
    assert (parsed.body, parsed.is_complete, parsed.can_be_kept) == (body, True, True)


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 500), max_size=8), begins=st.booleans())
def test_any_bytes_end_in_an_answer_or_in_the_one_error(data: bytes, cuts: list[int], begins: bool) -> None:
    data = CHUNKED + data if begins else data
    one, other = parse(split(data, cuts), ends=True), parse([data], ends=True)
    assert (one.status, one.body, one.is_complete) == (other.status, other.body, other.is_complete)
    assert (one.error is None) == (other.error is None)


@given(at=st.integers(0, 10_000), name=st.sampled_from(["length", "chunks", "trailers", "interim"]))
def test_an_answer_that_is_cut_short_is_not_complete(at: int, name: str) -> None:
    data = ANSWERS[name][0]
    parsed = parse([data[: at % len(data)]], ends=True)
    assert (parsed.error, parsed.is_complete, parsed.can_be_kept) == ("ended early", False, False)


def test_a_body_comes_in_one_piece_for_each_read() -> None:
    parser = AnswerParser(LIMITS)
    chunks: list[bytes] = []
    parser.begin(chunks.append, to_head=False)
    for data in (CHUNKED, b"3\r\nabc\r\n", b"2\r\nde\r\n1\r\nX\r\n4\r\nfg", b"hi\r\n"):
        parser.feed(data)
    assert chunks == [b"abc", b"deXfg", b"hi"]


@pytest.mark.parametrize("framing", [b"content-length: 0\r\n\r\n", b"content-length: 7\r\n\r\n", b"\r\n"])
def test_an_answer_to_head_has_no_body_and_the_next_answer_is_read(framing: bytes) -> None:
    parser = AnswerParser(LIMITS)
    for data in ([OK + framing], [OK + framing[:-1], framing[-1:]]):
        parsed = parse(data, to_head=True, parser=parser)
        assert (parsed.is_complete, parsed.can_be_kept, parsed.body) == (True, True, b"")
    assert parse([ANSWERS["chunks"][0]], parser=parser).can_be_kept


def test_one_parser_reads_answer_after_answer() -> None:
    parser = AnswerParser(LIMITS)
    for _ in range(3):
        for name, (data, body, can_be_kept) in ANSWERS.items():
            if can_be_kept:
                assert parse([data], parser=parser).body == body, name


@pytest.mark.parametrize("framing", [b"1;" + b"a" * 200, b"0\r\nx: " + b"a" * 200, b"0\r\n" + b"x: y\r\n" * 40])
def test_framing_without_a_body_is_bounded(framing: bytes) -> None:
    parsed = parse([CHUNKED, *(framing[at : at + 8] for at in range(0, len(framing), 8))])
    assert parsed.error is not None
    assert "64 bytes without a byte of the body" in parsed.error


def test_what_the_consumer_raises_comes_out() -> None:
    def fails(chunk: bytes) -> None:
        raise RuntimeError("full")

    parser = AnswerParser(LIMITS)
    parser.begin(fails, to_head=False)
    with pytest.raises(RuntimeError, match="full"):
        parser.feed(ANSWERS["length"][0])
