"""Which caller a call is from, whether it may make the call, and the audit log of both.

Decides by the certificate of the connection or, on a coordinator without TLS, by the cluster token. What a certificate
allows is the table of :mod:`kvxfer.trust.permissions`. It must never know what a call does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from kvxfer.coordinator.metrics import CoordinatorMetrics
from kvxfer.errors import AuthenticationError, InvalidArgumentError, KvxferError
from kvxfer.rpc.link import CODE_KEY, REASON_BYTES_MAX
from kvxfer.trust.files import fingerprint
from kvxfer.trust.identity import CertIdentity, identity_among
from kvxfer.trust.permissions import NO_SUBJECT, ControlCall, Subject, check
from kvxfer.trust.revoked import RevokedList

audit = logging.getLogger("kvxfer.audit")

_CERTIFICATE, _URI, _RESUMED = "x509_pem_cert", "peer_uri", "ssl_session_reused"
"""Keys of gRPC's authentication context."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """Whose call it is. ``identity`` is None where the cluster token was shown. ``peer`` is its address."""

    identity: CertIdentity | None
    fingerprint: str
    peer: str

    def __str__(self) -> str:
        return "token" if self.identity is None else str(self.identity)


class Gate:
    """Of one coordinator. Empty ``cluster``: it has no TLS, and :class:`TokenGate` asks for the token."""

    def __init__(self, cluster: str, revoked: RevokedList, metrics: CoordinatorMetrics) -> None:
        self._cluster = cluster
        self._revoked = revoked
        self._metrics = metrics

    def identify(self, context: Any, call: ControlCall) -> Caller:
        """The caller behind gRPC's ``context``. Raises AuthenticationError for a certificate of another cluster, of no
        identity, or that is revoked, and for a resumed TLS session: its certificate was judged once, and may have ended
        since. gRPC offers no way to resume none."""
        peer = str(context.peer())
        if not self._cluster:
            return Caller(None, "", peer)
        try:
            caller = self._certified(context.auth_context(), peer)
            self.check_revoked(caller)
        except AuthenticationError as error:
            self._log("unknown", peer, call, NO_SUBJECT, error.code, str(error))
            raise
        return caller

    def check_revoked(self, caller: Caller) -> None:
        """Raise AuthenticationError if the caller's name or certificate is revoked by now."""
        if caller.identity is not None and self._revoked.has(caller.identity, caller.fingerprint):
            raise AuthenticationError(f"the certificate of {caller.identity} is revoked")

    @contextlib.contextmanager
    def audited(self, caller: Caller, call: ControlCall, subject: Subject = NO_SUBJECT) -> Iterator[None]:
        """The block does what was called. Raises ForbiddenError before it if the caller may not; either way the audit
        log has one line, with the code of the block's error."""
        try:
            check(caller.identity, call, subject)
            yield
        except KvxferError as error:
            self._log(str(caller), caller.peer, call, subject, error.code, str(error))
            raise
        self._log(str(caller), caller.peer, call, subject, "ok", "")

    def ended(self, caller: Caller, call: ControlCall, subject: Subject, error: KvxferError) -> None:
        """The audit line of a stream that the coordinator ends because its caller lost what let it in."""
        self._log(str(caller), caller.peer, call, subject, error.code, str(error))

    def _certified(self, shown: Any, peer: str) -> Caller:
        if shown.get(_RESUMED) != [b"false"]:
            raise AuthenticationError("this TLS session was resumed, and shows its certificate no more: connect anew")
        try:
            identity = identity_among(value.decode("ascii", "replace") for value in shown.get(_URI, ()))
            certificate = next(iter(shown.get(_CERTIFICATE, ())), b"")
            caller = Caller(identity, fingerprint(certificate), peer)
        except (InvalidArgumentError, ValueError) as error:
            why = error if isinstance(error, InvalidArgumentError) else "it cannot be read"
            raise AuthenticationError(f"the certificate shows no identity of this cluster: {why}") from None
        if identity.cluster != self._cluster:
            raise AuthenticationError(f"the certificate is of cluster {identity.cluster}, not {self._cluster}")
        return caller

    def _log(self, caller: str, peer: str, call: ControlCall, subject: Subject, outcome: str, why: str) -> None:
        level = logging.INFO if outcome == "ok" else logging.WARNING
        fields = {"caller": caller, "peer": peer, "call": str(call), "subject": subject.agent_id, "outcome": outcome}
        audit.log(level, "control call", extra=fields | ({"why": why[:REASON_BYTES_MAX]} if why else {}))
        self._metrics.called(call, outcome)


class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets nothing pass without the cluster token but the health service, which says nothing worth hiding."""

    def __init__(self, token: bytes, *, open_prefix: str) -> None:
        self._expected = b"Bearer " + token
        self._open_prefix = open_prefix
        self._denial = grpc.stream_stream_rpc_method_handler(self._deny)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method.startswith(self._open_prefix) or self._is_member(details.invocation_metadata):
            return await continuation(details)
        return self._denial

    def _is_member(self, metadata: Any) -> bool:
        shown = [value for key, value in metadata or () if key == "authorization"]
        if len(shown) != 1:
            return False
        given = shown[0] if isinstance(shown[0], bytes) else shown[0].encode()
        return hmac.compare_digest(given, self._expected)

    async def _deny(self, requests: Any, context: Any) -> None:
        error = AuthenticationError("the cluster token is missing or wrong")
        audit.warning("control call", extra={"caller": "unknown", "peer": str(context.peer()), "outcome": error.code})
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error), trailing_metadata=((CODE_KEY, error.code),))
