"""The head of a request: from bytes to a method, a target and fields, or one error.

Decides which heads are malformed, and what a head says about the body behind it. llhttp cuts a head into fields. It
takes more than HTTP/1.1 allows, and what it takes depends on its version, so a strict grammar looks at the bytes first:
what two readers may understand differently is refused. It must never know a socket or a route.
"""

from __future__ import annotations

import re
import urllib.parse

import httptools

from kvxfer.errors import ProtocolError
from kvxfer.protocol.http_target import has_control_character, path_and_query
from kvxfer.protocol.http_url import is_host_field

HEAD_BYTES_MAX = 16 << 10
"""Longest head of a request: request line, fields and the empty line behind them."""
HEAD_END = b"\r\n\r\n"
LENGTH_DIGITS_MAX = 20
"""Of a content-length."""

BAD_REQUEST = 400
NOT_FOUND = 404
TIMED_OUT = 408
TOO_LARGE = 431
NOT_IMPLEMENTED = 501
VERSION_NOT_SUPPORTED = 505

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_FIELD = rb"%b:[\t\x20-\x7e\x80-\xff]*+\r\n" % _TOKEN
_REQUEST_LINE = rb"(?:%b) ([!-\"$-~]++) HTTP/([0-9]\.[0-9])\r\n" % _TOKEN
REQUEST_LINE = re.compile(_REQUEST_LINE)
FIELDS = re.compile(rb"(?:%b)*+" % _FIELD)
HEAD = re.compile(rb"%b(?:%b)*+\r\n" % (_REQUEST_LINE, _FIELD))
BARE_LF = re.compile(rb"(?<!\r)\n")
SHOWN_BYTES = 80
"""Of what is malformed, in the text of its error."""

_FRAMING = frozenset({b"connection", b"content-length", b"expect", b"host", b"transfer-encoding"})
_Fields = list[tuple[bytes, bytes]]


class MalformedRequestError(ProtocolError):
    """Bytes of a client that are not a request; ``status`` is that of the answer."""

    def __init__(self, reason: str, status: int = BAD_REQUEST) -> None:
        super().__init__(reason)
        self.status = status


class RequestHead:
    """One head. llhttp calls ``on_...``; the fields are final when :func:`read_head` returns."""

    __slots__ = (
        *("_framing", "expects_continue", "headers", "host", "is_chunked", "keeps_alive", "length", "method", "path"),
        *("query", "raw_path", "version"),
    )

    def __init__(self) -> None:
        self.headers: _Fields = []
        """Names in lower case, in the order in which they came."""
        self._framing: _Fields = []
        self.method = ""
        self.version = "1.1"
        self.host: bytes | None = None
        self.raw_path = b"/"
        self.query = b""
        self.path = "/"
        """Percent-decoded."""
        self.length = 0
        """Of the body, where it does not come in chunks."""
        self.is_chunked = False
        self.keeps_alive = True
        self.expects_continue = False

    @property
    def raw_target(self) -> bytes:
        """Path and query."""
        return self.raw_path + b"?" + self.query if self.query else self.raw_path

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        value = value.rstrip(b" \t")
        self.headers.append((name, value))
        if name in _FRAMING:
            self._framing.append((name, value))

    def frame(self, fields: _Fields | None = None) -> None:
        """Take from the fields how the body comes; raises MalformedRequestError where that is not clear."""
        hosts, connection = 0, b""
        length: bytes | None = None
        for name, value in self._framing if fields is None else fields:
            if name == b"host":
                hosts += 1
                if not is_host_field(value):
                    raise MalformedRequestError(f"bad host {_shown(value)}: a name or an address, and maybe a port")
                self.host = value
            elif name == b"connection":
                connection += b"," + value.lower()
            elif name == b"content-length":
                if length is not None:
                    raise MalformedRequestError("the request has more than one content-length")
                if not value.isdigit() or len(value) > LENGTH_DIGITS_MAX:
                    raise MalformedRequestError(f"bad content-length {_shown(value)}")
                length = value
            elif name == b"expect":
                self.expects_continue = self.version == "1.1" and value.lower() == b"100-continue"
            elif name == b"transfer-encoding":
                if self.is_chunked or value.lower() != b"chunked":
                    raise MalformedRequestError("only transfer-encoding: chunked is supported", NOT_IMPLEMENTED)
                self.is_chunked = True
        if hosts != 1 and (hosts or self.version == "1.1"):
            raise MalformedRequestError("the request needs one host field")
        if self.is_chunked:
            if length is not None:
                raise MalformedRequestError("the request has both content-length and transfer-encoding")
            if self.version != "1.1":
                raise MalformedRequestError("the request is HTTP/1.0 and has transfer-encoding")
        elif length is not None:
            self.length = int(length)
        self.keeps_alive = self.version == "1.1" and not (
            connection and b"close" in (word.strip() for word in connection.split(b","))
        )

    def aim(self, target: bytes) -> None:
        """Take path and query from the request's target; raises MalformedRequestError."""
        try:
            self.raw_path, _, self.query = path_and_query(target, self.host).partition(b"?")
        except ProtocolError as error:
            raise MalformedRequestError(str(error)) from None
        path = self.raw_path.decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(path)
            if has_control_character(path):
                raise MalformedRequestError("the path has a control character", NOT_FOUND)
        self.path = path


def read_head(data: bytes) -> RequestHead:
    """The head that is ``data``, with the empty line at its end. Raises MalformedRequestError."""
    match = HEAD.fullmatch(data)
    if match is None:
        raise _malformed(data)
    target, version = match.groups()
    head = RequestHead()
    head.version = version.decode("ascii")
    if head.version not in ("1.1", "1.0"):
        raise MalformedRequestError(f"HTTP/{head.version} is not supported", VERSION_NOT_SUPPORTED)
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # the request is answered as HTTP/1.1
    except httptools.HttpParserInvalidMethodError:
        method = data.partition(b" ")[0]
        raise MalformedRequestError(f"unknown method {_shown(method)}", NOT_IMPLEMENTED) from None
    except httptools.HttpParserError as error:
        head.frame(_fields(data))  # says the same in our words
        raise MalformedRequestError(f"malformed request: {error}") from None
    head.method = parser.get_method().decode("ascii")
    head.frame()
    head.aim(target)
    return head


def check_partial_head(data: bytes, seen: int) -> None:
    """Raise MalformedRequestError where no bytes behind ``data`` make a head of it. ``seen`` of them were checked
    before.
    """
    if len(data) >= HEAD_BYTES_MAX:
        raise MalformedRequestError(f"the request's head is too long: it exceeds {HEAD_BYTES_MAX} bytes", TOO_LARGE)
    if data[:1] <= b" " or data[:1] > b"~":
        raise MalformedRequestError(f"illegal request line: {_shown(data)}")
    if BARE_LF.search(data, seen) is not None:
        raise MalformedRequestError("the request's head has a line feed without a carriage return")


def _fields(data: bytes) -> _Fields:
    """Those of a head that :data:`HEAD` matches."""
    lines = [line.partition(b":") for line in data.split(b"\r\n")[1:-2]]
    return [(name.lower(), value.strip(b" \t")) for name, _, value in lines]


def _malformed(data: bytes) -> MalformedRequestError:
    """Why :data:`HEAD` does not match."""
    line = REQUEST_LINE.match(data)
    if line is None:
        return MalformedRequestError(f"illegal request line: {_shown(data.partition(HEAD_END[:2])[0])}")
    end = FIELDS.match(data, line.end())
    rest = data[end.end() if end is not None else 0 :]
    return MalformedRequestError(f"illegal header line: {_shown(rest.partition(HEAD_END[:2])[0])}")


def _shown(data: bytes) -> str:
    return repr(data[:SHOWN_BYTES])[1:]
