"""Which pages of other origins may read the router's answers (CORS), as headers. Pure; off without a configured origin.

Decides which origin is allowed, what a preflight is told, and which routes answer no other origin. It must never know
what a route does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvxfer.errors import ConfigError
from kvxfer.router import headers
from kvxfer.serving.exchange import Headers

ANY = "*"
ORIGINS_MAX = 64
METHODS = b"GET, POST"
MAX_AGE = b"600"
"""Seconds for which a browser keeps a preflight."""
EXPOSED = ", ".join(
    (headers.REQUEST_ID, headers.PREFILL, headers.PREFILL_REASON, headers.ATTEMPT, headers.RETRY_AFTER, headers.ACCOUNT)
).encode()
NEVER = ("/workers", "/ui")
"""The admin routes, and the page's feed: on loopback they may be open without a key, and any page could reach them
there."""
WANTED_BYTES_MAX = 4096
"""Of the names of headers that a preflight asks for."""
PREFLIGHT = (b"origin", b"access-control-request-method", b"access-control-request-headers")
"""What a preflight says."""
ALLOW_ORIGIN = b"access-control-allow-origin"
VARY = b"vary"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._~-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_WANTED = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")
_VARIES = (VARY, b"origin")


class Cors:
    """``origins`` are exact, as browsers send them, or ``*`` alone. Raises ConfigError for others, and for ``*`` with
    credentials: any page could then use what a browser knows of the router."""

    def __init__(self, origins: Iterable[str], *, allows_credentials: bool = False) -> None:
        given = tuple(origins)
        if len(given) > ORIGINS_MAX:
            raise ConfigError(f"cors_origin must be at most {ORIGINS_MAX} origins, not {len(given)}")
        for origin in given:
            if origin != ANY and _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"cors_origin must be * or like https://app.example.com:8443, without a path, not {origin!r:.100}"
                )
        self._is_any = ANY in given
        if self._is_any and len(given) > 1:
            raise ConfigError("cors_origin * allows every origin: give no other with it")
        if self._is_any and allows_credentials:
            raise ConfigError("cors_credentials needs exact origins: cors_origin must not be *")
        if allows_credentials and not given:
            raise ConfigError("cors_credentials needs a cors_origin")
        self._origins = frozenset(origin.encode("ascii") for origin in given)
        self._credentials = [(b"access-control-allow-credentials", b"true")] if allows_credentials else []

    def __bool__(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: bytes | None) -> bool:
        """Whether pages of this origin may read answers."""
        return origin is not None and (self._is_any or origin in self._origins)

    def answer_headers(self, origin: bytes | None) -> Headers:
        """What an answer says to a page of ``origin`` (the request's header, if it has one)."""
        if not self.allows(origin):
            return () if self._is_any else (_VARIES,)
        return (*self._allowed(origin), (b"access-control-expose-headers", EXPOSED))

    def preflight_headers(self, origin: bytes | None, method: bytes | None, wanted: bytes | None) -> Headers | None:
        """What ``OPTIONS`` answers with 204; None for one that is no preflight, which asks neither."""
        if origin is None or method is None:
            return None
        if not self.allows(origin):
            return () if self._is_any else (_VARIES,)
        told = self._allowed(origin)
        told += [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", MAX_AGE)]
        if wanted is not None and len(wanted) <= WANTED_BYTES_MAX and _WANTED.fullmatch(wanted):
            told.append((b"access-control-allow-headers", wanted))
        return told

    def _allowed(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        if self._is_any:
            return [(ALLOW_ORIGIN, b"*")]
        assert origin is not None
        return [(ALLOW_ORIGIN, origin), _VARIES, *self._credentials]


def is_for_pages(path: str) -> bool:
    """Whether a route may answer another origin at all."""
    return not any(path == route or path.startswith(route + "/") for route in NEVER)
