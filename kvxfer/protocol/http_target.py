"""The target of a request, the same at every HTTP port of ours: which host it names, and which paths no route has. Must
never know a route.
"""

from __future__ import annotations

import re

from kvxfer.errors import ProtocolError
from kvxfer.protocol.http_url import is_host_field

_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE | re.DOTALL)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_SHOWN_BYTES = 80


def path_and_query(target: bytes, host: bytes | None) -> bytes:
    """What of ``target`` stands behind the host. Where it names one, as for a proxy, that must be ``host``, which the
    request's field says (None: it has no such field): one reader goes by the one, and another by the other. Raises
    ProtocolError for another host, and for what is no target of a request to a server."""
    if target.startswith(b"/") or target == b"*":
        return target
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise ProtocolError(f"illegal request line: the target is {_shown(target)}")
    named, rest = match.groups()
    if not named or not is_host_field(named) or (host is not None and named.lower() != host.lower()):
        raise ProtocolError(f"the target names the host {_shown(named)}, not the host field's")
    return rest if rest.startswith(b"/") else b"/" + rest


def has_control_character(path: str) -> bool:
    """Whether ``path``, percent-decoded, has one. No route has: a reader that takes a line feed at the end for the end
    of the text, as ``$`` of a regular expression does, would find the route before it."""
    return _CONTROL.search(path) is not None


def _shown(data: bytes) -> str:
    return repr(data[:_SHOWN_BYTES])[1:]
