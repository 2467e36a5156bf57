"""Which callers may ask a worker over HTTP: by the certificate of the connection, else by a leg key, else all.

Decides what a caller without either gets: the error, before anything of its body is read. What a certificate allows is
the table of :mod:`kvxfer.trust.permissions`. It must never know what a request asks for beyond its path, nor where keys
come from.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvxfer.errors import AuthenticationError, ForbiddenError, InvalidArgumentError, KvxferError
from kvxfer.openai.errors import error_body, status_for
from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.serving.cycle import TLS
from kvxfer.serving.json_response import JSONResponse
from kvxfer.serving.leg_keys import LEG_KEY
from kvxfer.trust.files import der_fingerprint
from kvxfer.trust.identity import CertIdentity, identity_among
from kvxfer.trust.permissions import KEYLESS, check_http, part_of
from kvxfer.trust.revoked import RevokedList

log = logging.getLogger("kvxfer.serving")

COMPLAIN_S = 10.0
KNOWN_S = 10.0
"""A router may hear of a worker a moment earlier than the worker hears of its keys."""


class LegAccess:
    """ASGI middleware before ``app``.

    ``cluster``: every connection has a certificate, which must be of that cluster; then no key counts. Without it
    ``keys`` gives those that are taken now, and none at all opens the door. Until ``are_known`` is set, nobody can say
    which they are: a request waits so long, KNOWN_S at most. ``on_refused`` gets the code of an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        cluster: str = "",
        revoked: RevokedList | None = None,
        keys: Callable[[], Iterable[bytes]] = tuple,
        are_known: asyncio.Event | None = None,
        on_refused: Callable[[str], None] = lambda code: None,
    ) -> None:
        self._app = app
        self._cluster = cluster
        self._revoked = revoked or RevokedList("")
        self._keys = keys
        self._are_known = are_known
        self._on_refused = on_refused
        self._callers: weakref.WeakKeyDictionary[Any, tuple[CertIdentity, str]] = weakref.WeakKeyDictionary()
        """By the TLS object of a connection: whose it is, and the certificate's fingerprint."""
        self._refused = RateLimitedWarning(log, "a request is refused: %s", period_s=COMPLAIN_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self._check(scope)
            except (AuthenticationError, ForbiddenError) as error:
                await self._refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        part = part_of(scope["path"])
        if self._cluster:
            identity, fingerprint = self._caller(scope)
            if self._revoked.has(identity, fingerprint):
                raise AuthenticationError(f"the certificate of {identity} is revoked")
            check_http(identity, part)
        elif part not in KEYLESS:
            await self._wait_known()
            self._check_key(scope)

    async def _wait_known(self) -> None:
        if self._are_known is None or self._are_known.is_set():
            return
        try:
            async with asyncio.timeout(KNOWN_S):
                await self._are_known.wait()
        except TimeoutError:
            raise AuthenticationError("this worker has not heard yet which leg keys it takes") from None

    def _caller(self, scope: Scope) -> tuple[CertIdentity, str]:
        tls: ssl.SSLObject | None = scope.get("extensions", {}).get(TLS)
        if tls is None:
            raise AuthenticationError("this connection has no certificate")
        known = self._callers.get(tls)
        if known is None:
            shown: Any = tls.getpeercert() or {}
            try:
                identity = identity_among(value for kind, value in shown.get("subjectAltName", ()) if kind == "URI")
            except InvalidArgumentError as error:
                raise AuthenticationError(f"the certificate shows no identity of this cluster: {error}") from None
            known = self._callers[tls] = identity, der_fingerprint(tls.getpeercert(binary_form=True) or b"")
        if known[0].cluster != self._cluster:
            raise AuthenticationError(f"the certificate is of cluster {known[0].cluster}, not {self._cluster}")
        return known

    def _check_key(self, scope: Scope) -> None:
        known = tuple(self._keys())
        if not known:
            return
        shown = [value for name, value in scope["headers"] if name == LEG_KEY]
        given = shown[0] if len(shown) == 1 else b""
        is_known = False
        for key in known:
            is_known |= hmac.compare_digest(key, given)  # all of them: the time must not tell which one
        if not is_known:
            what = "is wrong" if shown else "is missing"
            raise AuthenticationError(f"the leg key {what}: this worker takes requests from its routers only")

    async def _refuse(self, error: KvxferError, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_refused(error.code)
        self._refused.say(error)
        await JSONResponse(error_body(error), status_code=status_for(error))(scope, receive, send)
