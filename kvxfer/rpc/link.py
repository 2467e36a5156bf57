"""What every client of the coordinator shares: how a channel is opened, how a failed call becomes one of our errors,
how long to wait before the next try. Must never know which call it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from grpc.aio import EOF as EOF  # type: ignore[attr-defined]

from kvxfer.errors import (
    AuthenticationError,
    CoordinatorUnavailableError,
    ForbiddenError,
    InvalidArgumentError,
    KvxferError,
    OverloadedError,
    PeerError,
    ProtocolError,
    RefusedError,
    from_code,
)
from kvxfer.rpc.convert import MESSAGE_BYTES_MAX
from kvxfer.trust.files import FollowedFiles

CODE_KEY = "kvxfer-code"
"""Trailing metadata that carries an error's stable code."""
CONNECT_S = 5.0
"""How long one attempt may take until the coordinator's first answer."""
RECEIVER_SAYS_S = 1.0
"""How long a sender that failed waits for the receiver's reason, which is usually the better one."""
REASON_BYTES_MAX = 1024

Argument = TypeVar("Argument")

ChannelOptions = Sequence[tuple[str, Any]]

KEEPALIVE_MS = 20_000
"""Longer than the interval of heartbeats is told to be, or each of them would cost a ping more. What falls silent in a
stream is noticed by that stream; this is for connections without one, and for those of an end that is gone."""
PINGS_APART_MIN_MS = 100
"""The coordinator counts a ping that comes sooner than this after the last one, with no data between them. At the third
it closes the connection (``too_many_pings``). gRPC's default is five minutes, and our clients ping more often."""

KEEPALIVE_OPTIONS: ChannelOptions = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
)
"""Both sides use these options. A process that was suspended, or is slow, finds at most one ping of the other side in
its socket: gRPC sends the next ping only after the answer to the last one, and no two pings within a second.

The probe of the bandwidth is off: it sends a ping with each message, which is two fifths of what a heartbeat costs. The
window is as large as a fast link needs instead."""

CHANNEL_OPTIONS: ChannelOptions = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *KEEPALIVE_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)

NO_COORDINATOR = (
    *("Hostname Verification Check failed", "is not in peer certificate"),
    *("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER"),
)
HUNG_UP = "Socket closed"
"""What gRPC says where a handshake failed; the second text is that of its oldest version that we take."""

_BY_STATUS: dict[grpc.StatusCode, Callable[[str], PeerError]] = {
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: ForbiddenError,
    grpc.StatusCode.FAILED_PRECONDITION: RefusedError,
    grpc.StatusCode.INVALID_ARGUMENT: ProtocolError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
}


RENEW_POLL_S = 1.0
"""How often a client looks whether its certificate was replaced."""


def open_channel(target: str, tls: FollowedFiles | None = None) -> grpc.aio.Channel:
    """A channel with our bounds and keepalive; with ``tls`` it shows the certificate that is newest now, and believes
    only a coordinator of the same cluster.

    One attempt, one channel: gRPC's own slow reconnect backoff stays out of it.
    """
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    keyed = tls.look()
    proof = grpc.ssl_channel_credentials(keyed.ca, keyed.key, keyed.cert)
    name = ("grpc.ssl_target_name_override", keyed.identity.coordinator_host)
    return grpc.aio.secure_channel(target, proof, options=(*CHANNEL_OPTIONS, name))


async def until_renewed(tls: FollowedFiles | None, conversation: Coroutine[Any, Any, None]) -> None:
    """Hold ``conversation`` to its end, or end it when the certificate in ``tls`` was replaced: the next one shows the
    new one."""
    if tls is None:
        await conversation
        return
    shown = tls.newest
    talking = asyncio.create_task(conversation)
    try:
        while not (await asyncio.wait({talking}, timeout=RENEW_POLL_S))[0]:
            if tls.look() is not shown:
                return
        await talking
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


def credentials(token: bytes) -> tuple[tuple[str, str], ...]:
    """Call metadata that proves membership of the cluster; none for an empty token. Raises InvalidArgumentError for a
    token no header can carry."""
    if not token:
        return ()
    if any(not 0x21 <= byte <= 0x7E for byte in token):
        raise InvalidArgumentError("a cluster token has only printable ASCII characters, without spaces")
    return (("authorization", f"Bearer {token.decode('ascii')}"),)


def error_from_status(target: str, status: grpc.StatusCode, details: str, code: str | None) -> KvxferError:
    """The exception for a call that ended with ``status``; ``code`` is the stable code from the trailing metadata."""
    details = details[:REASON_BYTES_MAX]
    if any(sign in details for sign in NO_COORDINATOR) and code is None:
        return AuthenticationError(
            f"what answers at {target} is no coordinator of this cluster that our CAs vouch for: {details}"
        )
    if status is grpc.StatusCode.UNAUTHENTICATED and "certificate" not in details:
        return AuthenticationError(
            f"the coordinator at {target} did not accept this cluster token; "
            "every process of a cluster reads the same token file (KVXFER_TOKEN_FILE)"
        )
    if code is not None:
        return from_code(code, f"coordinator {target}: {details}")
    error_class = _BY_STATUS.get(status)
    if error_class is not None:
        return error_class(f"coordinator {target}: {details}")
    hint = "; one with TLS hangs up on callers without a certificate that it believes" if HUNG_UP in details else ""
    return CoordinatorUnavailableError(f"coordinator {target}: {status.name.lower()}: {details}{hint}")


def error_from_exception(target: str, error: BaseException) -> KvxferError:
    """The exception for whatever a gRPC call raised."""
    if isinstance(error, KvxferError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return error_from_status(target, error.code(), error.details() or "", _code_in(error.trailing_metadata()))
    if isinstance(error, TimeoutError):
        return CoordinatorUnavailableError(f"coordinator {target} did not answer in time")
    return CoordinatorUnavailableError(f"coordinator {target}: {type(error).__name__}: {error}")


def _code_in(trailing: Any) -> str | None:
    """The stable code in a call's trailing metadata, if the coordinator put one there."""
    return next((value for key, value in trailing or () if key == CODE_KEY and isinstance(value, str)), None)


async def raise_status(target: str, call: Any) -> NoReturn:
    """Raise the error with which a finished (or failing) streaming call ended."""
    try:
        async with asyncio.timeout(CONNECT_S):
            status, details, trailing = await call.code(), await call.details(), await call.trailing_metadata()
    except TimeoutError as error:
        raise error_from_exception(target, error) from None
    if status is grpc.StatusCode.OK:
        raise CoordinatorUnavailableError(f"coordinator {target} ended the stream")
    raise error_from_status(target, status, details or "", _code_in(trailing))


async def both_ways(send: Coroutine[Any, Any, None], receive: Coroutine[Any, Any, None]) -> None:
    """Run both halves of a stream until the receiving one ends; its error is the one that knows the reason.

    A sender that failed gives the receiver RECEIVER_SAYS_S to name the reason before its own error counts.
    """
    sender, receiver = asyncio.create_task(send), asyncio.create_task(receive)
    try:
        await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
        if sender.done() and not receiver.done():
            has_failed = sender.exception() is not None
            await asyncio.wait((receiver,), timeout=RECEIVER_SAYS_S if has_failed else None)
        await (receiver if receiver.done() else sender)
    finally:
        sender.cancel()
        receiver.cancel()
        await asyncio.gather(sender, receiver, return_exceptions=True)


def tell(callback: Callable[[Argument], None] | None, value: Argument) -> None:
    """Call an owner's callback; what it raises goes to the loop's exception handler, never into the connection."""
    if callback is None:
        return
    try:
        callback(value)
    except Exception as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"a callback of the coordinator client raised: {error!r}", "exception": error}
        )


class ReconnectBackoff:
    """Waits that double from ``first_s`` to ``max_s``, each drawn evenly between half of it and the whole."""

    def __init__(self, source: random.Random, *, first_s: float = 0.1, max_s: float = 1.0) -> None:
        """``max_s`` stays below the time in which a restarted coordinator expects all members back."""
        self._source = source
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self._spread_s = 0.0

    def spread(self, spread_s: float) -> None:
        """From now on a wait that would be shorter is drawn between 0 and ``spread_s`` instead, so that all who wait
        spread over that time."""
        self._spread_s = spread_s

    def next_s(self) -> float:
        whole_s = self._next_s
        self._next_s = min(whole_s * 2, self._max_s)
        if self._spread_s > whole_s:
            return self._spread_s * self._source.random()
        return whole_s * (0.5 + 0.5 * self._source.random())

    def reset(self) -> None:
        self._next_s = self._first_s
