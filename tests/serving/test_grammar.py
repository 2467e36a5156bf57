"""Heads and bodies as bytes: what is refused, and that nothing is read otherwise than by h11, which is stricter than
llhttp in places and laxer in others.
"""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.serving.heads import (
    HEAD_BYTES_MAX,
    HEAD_END,
    MalformedRequestError,
    RequestHead,
    check_partial_head,
    read_head,
)
from kvxfer.serving.incoming import CHUNK_LINE_BYTES_MAX, ChunkReader, LengthReader

LINE = b"POST /a HTTP/1.1\r\n"
HOST = b"host: x\r\n"


def fields(*lines: bytes) -> bytes:
    return LINE + HOST + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


REFUSED = {
    "two lengths": (fields(b"content-length: 1", b"content-length: 2"), 400, "content-length"),
    "the same length twice": (fields(b"content-length: 1", b"content-length: 1"), 400, "content-length"),
    "list of lengths": (fields(b"content-length: 1, 1"), 400, "content-length"),
    "length below 0": (fields(b"content-length: -1"), 400, "content-length"),
    "length with a sign": (fields(b"content-length: +1"), 400, "content-length"),
    "length in hex": (fields(b"content-length: 0x1"), 400, "content-length"),
    "length in words": (fields(b"content-length: one"), 400, "content-length"),
    "length with an underscore": (fields(b"content-length: 1_0"), 400, "content-length"),
    "length with a space": (fields(b"content-length: 1 0"), 400, "content-length"),
    "no length": (fields(b"content-length:"), 400, "content-length"),
    "overlong length": (fields(b"content-length: " + b"9" * 21), 400, "content-length"),
    "overlong length of zeros": (fields(b"content-length: " + b"0" * 21), 400, "content-length"),
    "length beyond 64 bits": (fields(b"content-length: " + b"9" * 20), 400, "Content-Length"),
    "length and chunks": (fields(b"content-length: 1", b"transfer-encoding: chunked"), 400, "both"),
    "chunks and length": (fields(b"transfer-encoding: chunked", b"content-length: 1"), 400, "both"),
    "gzip": (fields(b"transfer-encoding: gzip"), 501, "chunked"),
    "gzip in chunks": (fields(b"transfer-encoding: gzip, chunked"), 501, "chunked"),
    "chunks not last": (fields(b"transfer-encoding: chunked, gzip"), 501, "chunked"),
    "chunks twice": (fields(b"transfer-encoding: chunked", b"transfer-encoding: chunked"), 501, "chunked"),
    "identity": (fields(b"transfer-encoding: identity"), 501, "chunked"),
    "chunks with a vertical tab": (fields(b"transfer-encoding:\x0bchunked"), 400, "header line"),
    "space before the colon": (fields(b"content-length : 1"), 400, "header line"),
    "space before the name": (LINE + b" a: b\r\n" + HOST + b"\r\n", 400, "header line"),
    "folded": (fields(b"a: b", b" c"), 400, "header line"),
    "folded with a tab": (fields(b"a: b", b"\tc"), 400, "header line"),
    "no colon": (fields(b"a"), 400, "header line"),
    "no name": (fields(b": a"), 400, "header line"),
    "name with a slash": (fields(b"a/b: c"), 400, "header line"),
    "name beyond ASCII": (fields(b"\xe4: c"), 400, "header line"),
    "lone CR in a value": (fields(b"a: b\rc: d"), 400, "header line"),
    "lone LF in a value": (fields(b"a: b\nc: d"), 400, "header line"),
    "NUL in a value": (fields(b"a: b\0c"), 400, "header line"),
    "control in a value": (fields(b"a: b\x01c"), 400, "header line"),
    "delete in a value": (fields(b"a: b\x7fc"), 400, "header line"),
    "LF after the request line": (b"POST /a HTTP/1.1\n" + HOST + b"\r\n", 400, "request line"),
    "empty line first": (b"\r\n" + fields(), 400, "request line"),
    "two spaces": (b"POST  /a HTTP/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "tab for a space": (b"POST\t/a HTTP/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "space at the end": (b"POST /a HTTP/1.1 \r\n" + HOST + b"\r\n", 400, "request line"),
    "space in the target": (b"POST /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "fragment": (b"POST /a#b HTTP/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "target beyond ASCII": (b"POST /\xe4 HTTP/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "target with a control": (b"POST /\x01 HTTP/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "target without a slash": (b"POST a HTTP/1.1\r\n" + HOST + b"\r\n", 400, ""),
    "target of another scheme": (b"POST ftp://x/a HTTP/1.1\r\n" + HOST + b"\r\n", 400, ""),
    "tunnel": (b"CONNECT x:1 HTTP/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "HTTP/0.9": (b"GET /\r\n" + HOST + b"\r\n", 400, "request line"),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\n" + HOST + b"\r\n", 505, "1.2"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n" + HOST + b"\r\n", 505, "2.0"),
    "HTTP/11": (b"GET / HTTP/11.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "small letters": (b"GET / http/1.1\r\n" + HOST + b"\r\n", 400, "request line"),
    "unknown method": (b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n", 501, "BREW"),
    "no host": (LINE + b"\r\n", 400, "host"),
    "host with a space": (LINE + b"host: a b\r\n\r\n", 400, "bad host"),
    "whole URL of another host": (b"GET http://y/a HTTP/1.1\r\n" + HOST + b"\r\n", 400, "names the host"),
    "two hosts": (fields(b"host: y"), 400, "host"),
    "1.0 chunks": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400, "HTTP/1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_head_when_it_is_malformed_is_refused(name: str) -> None:
    data, status, words = REFUSED[name]
    with pytest.raises(MalformedRequestError) as caught:
        read_head(data)
    assert (caught.value.status, words in str(caught.value)) == (status, True), str(caught.value)


TAKEN_BY_H11 = {"the same length twice", "list of lengths", "folded", "folded with a tab"}
TAKEN_BY_H11 |= {"control in a value", "delete in a value", "fragment", "target without a slash", "lone LF in a value"}
TAKEN_BY_H11 |= {"target of another scheme", "tunnel", "HTTP/1.2", "HTTP/2", "unknown method", "1.0 chunks"}
TAKEN_BY_H11 |= {"host with a space", "whole URL of another host"}
TAKEN_BY_H11 |= {"length and chunks", "chunks and length", "LF after the request line", "length beyond 64 bits"}


def by_h11(data: bytes) -> h11.Request | None:
    """The request as h11 reads it; None where it does not take it."""
    connection = h11.Connection(h11.SERVER, HEAD_BYTES_MAX)
    connection.receive_data(data)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    assert isinstance(event, h11.Request), event
    return event


@pytest.mark.parametrize("name", REFUSED)
def test_head_that_is_refused_is_refused_by_h11_too_but_for_a_few(name: str) -> None:
    assert (by_h11(REFUSED[name][0]) is not None) is (name in TAKEN_BY_H11)


def same_as_h11(data: bytes) -> RequestHead | None:
    """The head, where it is taken: then h11 reads the same."""
    try:
        head = read_head(data)
    except MalformedRequestError:
        return None
    found = by_h11(data)
    assert found is not None, data
    assert head.headers == [(name.lower(), value) for name, value in found.headers.raw_items()]
    assert (head.method.encode(), head.version.encode()) == (found.method, found.http_version)
    if found.target.startswith(b"/"):
        assert head.raw_target == found.target.removesuffix(b"?")
    return head


PIECES = st.sampled_from(
    [
        *(b" ", b"\t", b"\r\n", b"\r", b"\n", b":", b"a", b"b: c", b"content-length: 5", b"transfer-encoding: chunked"),
        *(b"host: x", b"\0", b"\x0b", b"\x80", b",", b"/", b"?x=1", b"#", b"HTTP/1.1", b"HTTP/1.0", b"GET", b"POST"),
        *(b"connection: close", b"expect: 100-continue", b"upgrade: h2c", b"\r\n\r\n", b"http://y/z", b"*", b"%2e"),
    ]
)


@given(st.lists(PIECES, max_size=8).map(b"".join), st.booleans())
def test_head_that_is_taken_is_read_as_h11_reads_it(middle: bytes, is_whole: bool) -> None:
    data = middle if is_whole else b"POST /a?b HTTP/1.1\r\nhost: x\r\n" + middle
    same_as_h11(data + HEAD_END)


@given(st.data())
def test_head_with_one_byte_changed_is_read_as_h11_reads_it_or_refused(data: st.DataObject) -> None:
    head = b"POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nA: b c \r\nConnection: Keep-Alive\r\n\r\n"
    at = data.draw(st.integers(0, len(head) - len(HEAD_END) - 1))
    byte = data.draw(st.binary(max_size=2))
    same_as_h11(head[:at] + byte + head[at + data.draw(st.integers(0, 1)) :])


def test_head_says_what_is_needed_to_serve_it() -> None:
    head = same_as_h11(
        b"POST /v1/a%20b%2Fc?x=%20&y HTTP/1.1\r\nHost: h\r\nX-A:\t 1 2\t \r\nx-a: \xe4\r\ncontent-length: 0012\r\n"
        b"Expect: 100-Continue\r\nConnection: a, CLOSE\r\n\r\n"
    )
    assert head is not None
    assert (head.method, head.path, head.raw_path, head.query) == ("POST", "/v1/a b/c", b"/v1/a%20b%2Fc", b"x=%20&y")
    assert head.raw_target == b"/v1/a%20b%2Fc?x=%20&y"
    assert [value for name, value in head.headers if name == b"x-a"] == [b"1 2", b"\xe4"]
    assert (head.length, head.is_chunked, head.keeps_alive, head.expects_continue) == (12, False, False, True)


@pytest.mark.parametrize(
    ("data", "keeps_alive"),
    [
        (fields(), True),
        (fields(b"connection: keep-alive"), True),
        (fields(b"connection: close"), False),
        (fields(b"connection: a", b"connection: Close"), False),
        (fields(b"connection: closed"), True),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", False),
        (fields(b"upgrade: h2c", b"connection: upgrade, http2-settings"), True),
    ],
)
def test_head_says_whether_its_connection_goes_on(data: bytes, keeps_alive: bool) -> None:
    assert read_head(data).keeps_alive is keeps_alive


def test_head_with_a_whole_url_has_its_path() -> None:
    head = read_head(b"GET http://other:1/a?b=c HTTP/1.1\r\nhost: other:1\r\n\r\n")
    assert (head.path, head.raw_target) == ("/a", b"/a?b=c")
    assert read_head(b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n").path == "*"


def test_head_of_http_1_0_expects_nothing() -> None:
    assert not read_head(b"POST / HTTP/1.0\r\nexpect: 100-continue\r\n\r\n").expects_continue


@pytest.mark.parametrize(
    ("data", "seen", "status"),
    [
        (b"\x16\x03\x01", 0, 400),
        (b"\r", 0, 400),
        (b"\xff", 0, 400),
        (b"GET / HTTP/1.1\n", 0, 400),
        (b"GET / HTTP/1.1\r\na: b\r\n\n", 22, 400),
        (b"G" * HEAD_BYTES_MAX, 0, 431),
    ],
)
def test_head_that_cannot_become_whole_is_refused_at_once(data: bytes, seen: int, status: int) -> None:
    with pytest.raises(MalformedRequestError) as caught:
        check_partial_head(data, seen)
    assert caught.value.status == status


@given(st.integers(1, 200))
def test_head_that_is_not_whole_is_waited_for(size: int) -> None:
    check_partial_head(fields(b"content-length: 1", b"a: b")[:-1][:size], 0)


def read(reader: ChunkReader | LengthReader, pieces: list[bytes]) -> tuple[bytes, bytes]:
    """The body and what is behind it."""
    body: list[bytes] = []
    rest = b""
    for piece in pieces:
        rest = rest + piece if reader.is_over else reader.feed(piece, body.append)
    assert reader.is_over
    return b"".join(body), rest


def split(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


CHUNKED = b'5\r\nhello\r\n00a;x="y"\r\n,\r\n\r\n wide\r\n1\r\n!\r\n0\r\nA: b\r\nc:d\r\n\r\n'


@given(st.lists(st.integers(0, 1000), max_size=12))
def test_body_in_chunks_is_the_same_however_it_is_split(places: list[int]) -> None:
    assert read(ChunkReader(), split(CHUNKED + b"GET /", places)) == (b"hello,\r\n\r\n wide!", b"GET /")


@given(st.lists(st.integers(0, 1000), max_size=12))
def test_body_of_a_length_is_the_same_however_it_is_split(places: list[int]) -> None:
    assert read(LengthReader(7), split(b"0123456GET /", places)) == (b"0123456", b"GET /")


@given(st.lists(st.binary(min_size=1, max_size=50)))
def test_body_in_chunks_is_what_h11_reads(chunks: list[bytes]) -> None:
    data = b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    assert read(ChunkReader(), [data]) == (b"".join(chunks), b"")


@pytest.mark.parametrize(
    "data",
    [
        *(b"\r\n", b"x\r\n", b"-1\r\n", b"+1\r\na\r\n", b"0x1\r\na\r\n", b"1 \r\na\r\n", b" 1\r\na\r\n", b"1\na\r\n"),
        *(b"1\r\nab\r\n", b"1\r\na\n0\r\n\r\n", b"1;a\0b\r\na\r\n", b"1;a\nb\r\n", b"1;a\rb\r\n", b"1\r\na0\r\n"),
        *(b"1" * 17 + b"\r\n", b"1_0\r\n", b"1;" + b"a" * CHUNK_LINE_BYTES_MAX, b"0\r\n a\r\n\r\n", b"0\r\na\r\n\r\n"),
        *(b"0\r\na : b\r\n\r\n", b"0\r\na: b\n\r\n", b"0\r\n\n", b"0\r\na: b\r\n" + b"c: d\r\n" * 4000, b"1, 2\r\n"),
        b"0\r\n" + b"a" * (HEAD_BYTES_MAX + 1),
        b"1;" + b"a" * CHUNK_LINE_BYTES_MAX + b"\r\na\r\n0\r\n\r\n",
    ],
    ids=lambda data: repr(data[:16]),
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_body_with_a_bad_chunk_is_refused(data: bytes, step: int) -> None:
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    with pytest.raises(MalformedRequestError):
        read(ChunkReader(), pieces)
