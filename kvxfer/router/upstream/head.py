"""The head of a request as bytes.

It decides which heads may be sent. Content-Length is ours alone, the connection is kept, and no value can end its line:
what could make one request into two is refused. It must never know where the values come from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from kvxfer.router.upstream.errors import UpstreamRequestError

HEADERS = Iterable[tuple[bytes, bytes]]

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_TARGET = re.compile(rb"[!-~]+").fullmatch
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*").fullmatch
_OURS = frozenset(
    (b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
"""Headers of one connection, not of a request: the caller may not set them."""
_WITHOUT_BODY = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"DELETE"))
"""Methods that say nothing of a length where there is no body."""


@functools.lru_cache(maxsize=1024)
def _checked(name: bytes) -> bytes:
    """A header's name in lower case. Raises UpstreamRequestError for one that the caller may not set."""
    if not _TOKEN(name):
        raise UpstreamRequestError(f"no name of a header: {name[:40]!r}")
    lower = name.lower()
    if lower in _OURS:
        raise UpstreamRequestError(f"header {name[:40]!r} belongs to the connection, not to the request")
    return lower


def encode_head(method: str, target: str, host: bytes, headers: HEADERS, length: int) -> bytes:
    """The request line and the headers, up to the empty line. ``headers`` may replace ``host``."""
    try:
        verb, path = method.encode("ascii"), target.encode("ascii")
    except UnicodeEncodeError:
        raise UpstreamRequestError("method and target must be ASCII") from None
    if not _TOKEN(verb):
        raise UpstreamRequestError(f"no method of HTTP: {method[:40]!r}")
    if verb == b"CONNECT" or not _TARGET(path):
        raise UpstreamRequestError(f"no target of a request: {method[:40]} {target[:40]!r}")
    lines = [b"%b %b HTTP/1.1" % (verb, path)]
    has_host = False
    for name, value in headers:
        if not _VALUE(value):
            raise UpstreamRequestError(f"header {name[:40]!r} has a control character in its value")
        if _checked(name) == b"host":
            if has_host:
                raise UpstreamRequestError("two host headers")
            has_host = True
        lines.append(b"%b: %b" % (name, value))
    if not has_host:
        lines.append(b"host: %b" % host)
    if length or verb not in _WITHOUT_BODY:
        lines.append(b"content-length: %d" % length)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
