"""What clients send to our HTTP servers."""

from __future__ import annotations

from kvxfer.serving.heads import HEAD_END, MalformedRequestError, check_partial_head, read_head
from kvxfer.serving.incoming import ChunkReader, LengthReader
from tests.fuzz.python_targets.samples import Target


def http_request(data: bytes) -> object:
    """A head and its body; the body is the same however its bytes are split."""
    end = data.find(HEAD_END) + len(HEAD_END)
    if end < len(HEAD_END):
        check_partial_head(data or b"G", 0)
        return b""
    head, rest = read_head(data[:end]), data[end:]
    assert head.path.startswith("/") or head.path == "*"
    assert not (head.is_chunked and head.length)
    bodies = []
    for step in (1, 7, len(rest) or 1):
        reader = ChunkReader() if head.is_chunked else LengthReader(head.length)
        body, behind = [], b""
        for piece in (rest[at : at + step] for at in range(0, len(rest), step)):
            behind = behind + piece if reader.is_over else reader.feed(piece, body.append)
        bodies.append((b"".join(body), behind if reader.is_over else b"", reader.is_over))
    assert len(set(bodies)) == 1
    return head, bodies[0]


FIELDS = b"Host: x\r\nAuthorization: Bearer a\r\nX-A:\t b c \r\n"
TARGETS = {
    "http_request": Target(
        http_request,
        [
            b"GET /v1/models?a=%20 HTTP/1.1\r\n" + FIELDS + b"Connection: close\r\n\r\n",
            b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}GET /",
            b"POST /a%2Fb HTTP/1.1\r\n" + FIELDS + b"Expect: 100-continue\r\nContent-Length: 12\r\n\r\nhello, world",
            b"POST / HTTP/1.1\r\n"
            + FIELDS
            + b'Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0a;b="c"\r\n0123456789\r\n'
            b"0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\n",
            b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
            b"PUT http://y:1/a?b HTTP/1.1\r\nhost: y:1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost:",
        ],
        (MalformedRequestError,),
    )
}
