"""Which headers cross the router: the request id and the trace are kept or made, everything else is named here.

Decides header values only; it never knows which worker they go to.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping

from kvxfer.errors import ConfigError
from kvxfer.observe import next_traceparent, traceparent_of

REQUEST_ID = "x-request-id"
PREFILL = "x-kvxfer-prefill"
PREFILL_REASON = "x-kvxfer-prefill-reason"
ATTEMPT = "x-kvxfer-attempt"
ACCOUNT = "x-kvxfer-account"
RETRY_AFTER = "retry-after"
DATA_PARALLEL_RANK = "x-data-parallel-rank"
"""vLLM's: which of the engines behind one HTTP address takes the request."""

PREFILL_BYTES = PREFILL.encode()
PREFILL_REASON_BYTES = PREFILL_REASON.encode()
ATTEMPT_BYTES = ATTEMPT.encode()
ACCOUNT_BYTES = ACCOUNT.encode()
ASKS_FOR_ACCOUNT = (ACCOUNT_BYTES, b"1")

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_TRACESTATE_CHARS_MAX = 512
_AUTHORIZATION_CHARS_MAX = 8192
"""With the others it stays below the 16 KiB that a worker reads of all headers."""


def request_id(received: str | None) -> str:
    """The client's request id if it is 1 to 128 visible ASCII characters, else a new one."""
    if received is not None and _REQUEST_ID.fullmatch(received):
        return received
    return f"req-{secrets.token_hex(16)}"


def leg_headers(
    received: Mapping[str, str], *, request_id: str, forwards_authorization: bool, trace: str | None = None
) -> dict[str, str]:
    """Headers that both legs get: the same request id and trace; the client's credentials only where asked to. No other
    header of the client goes to a worker, and none of a worker's to the client. ``trace`` is the router's own
    ``traceparent``, where it traces; it belongs to the client's trace, if that is valid.
    """
    headers = {
        "content-type": "application/json",
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",
        REQUEST_ID: request_id,
    }
    traceparent = traceparent_of(received.get("traceparent"))
    if traceparent is not None:
        headers["traceparent"] = trace or traceparent
        tracestate = received.get("tracestate", "")
        if 0 < len(tracestate) <= _TRACESTATE_CHARS_MAX and tracestate.isascii():
            headers["tracestate"] = tracestate
    else:
        headers["traceparent"] = trace or next_traceparent(None)
    authorization = received.get("authorization", "")
    if forwards_authorization and authorization.isascii() and 0 < len(authorization) <= _AUTHORIZATION_CHARS_MAX:
        headers["authorization"] = authorization
    return headers


LegHeaders = tuple[tuple[bytes, bytes], ...]

API_KEY = b"x-api-key"
"""Anthropic's: another place of the key that ``Authorization`` has elsewhere."""
_KEPT = {b"traceparent", b"tracestate", b"authorization", REQUEST_ID.encode(), b"accept", b"accept-encoding"}
_OF_THE_CONNECTION = frozenset(
    {
        *(b"connection", b"content-length", b"content-type", b"cookie", b"expect", b"host", b"keep-alive", b"te"),
        *(b"proxy-authorization", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_ROUTING = frozenset(
    {
        *(DATA_PARALLEL_RANK.encode(), b"x-dp-rank", b"x-prefill-dp-rank", b"x-data-parallel-host-port"),
        *(b"x-prefiller-host-port", b"x-encoder-hosts-ports"),
    }
)
_ROUTING_PREFIXES = (b"x-override-", b"x-dynamo-", b"x-smg-", b"x-kvxfer-", b"___")
"""SGLang (entrypoints/request_headers.py), Dynamo and others route by headers that begin so."""
_PASSED_BYTES_MAX = 4096
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")


def check_passed(names: Iterable[str]) -> frozenset[bytes]:
    """The names of a client's headers that go to the workers beside those that always do. Raises ConfigError for one
    that may not: by some a client would choose the worker, others belong to a connection or are handled by name here.
    """
    checked = set()
    for name in names:
        lower = name.lower().encode("utf-8", "surrogatepass")
        if _NAME.fullmatch(lower) is None:
            raise ConfigError(f"forward_header: {name!r:.80} is no name of a header")
        if lower in _KEPT | _OF_THE_CONNECTION | _ROUTING or lower.startswith(_ROUTING_PREFIXES):
            raise ConfigError(f"forward_header: {name!r:.80} is not for clients to pass on")
        checked.add(lower)
    return frozenset(checked)


def leg_header_pairs(
    received: Iterable[tuple[bytes, bytes]],
    *,
    request_id: str,
    forwards_authorization: bool,
    passed: Collection[bytes] = (),
    trace: str | None = None,
    credentials: LegHeaders = (),
) -> LegHeaders:
    """As :func:`leg_headers`, in the bytes of the wire, and with those headers of the client that ``passed``
    (``check_passed``) names. ``received`` has lower-case names; of a repeated header the first counts. ``credentials``
    are the router's own: never there where clients' go on, so that one without any does not get the router's.
    """
    known: dict[bytes, bytes] = {}
    for name, value in received:
        if name == API_KEY and forwards_authorization:
            name, value = b"authorization", b"Bearer " + value
        if (name in _KEPT or name in passed) and _VALUE.fullmatch(value):
            known.setdefault(name, value)
    kept = {name.decode("ascii"): value.decode("latin-1") for name, value in known.items() if name in _KEPT}
    made = leg_headers(kept, request_id=request_id, forwards_authorization=forwards_authorization, trace=trace)
    pairs = [(name.encode("ascii"), value.encode("latin-1")) for name, value in made.items()]
    left = _PASSED_BYTES_MAX
    for name, value in known.items():
        if name in passed and len(name) + len(value) <= left:
            left -= len(name) + len(value)
            pairs.append((name, value))
    return tuple(pairs) if forwards_authorization else (*pairs, *credentials)


_ANSWERED = frozenset(
    {
        *(b"content-type", b"content-disposition", b"content-encoding", b"content-language", b"content-range"),
        *(b"accept-ranges", b"cache-control", b"etag", b"last-modified", b"retry-after", b"allow"),
    }
)
"""Of a worker's answer to a request that passed through. A client learns no address and gets no cookie of a worker."""
_MEDIA_BYTES_MAX = 1024


def passed_header_pairs(
    received: Iterable[tuple[bytes, bytes]],
    *,
    request_id: str,
    forwards_authorization: bool,
    passed: Collection[bytes] = (),
    trace: str | None = None,
    credentials: LegHeaders = (),
) -> LegHeaders:
    """As :func:`leg_header_pairs`, for a request that passes through: with the client's own ``content-type`` and
    ``accept``, which the router knows nothing of.
    """
    own = tuple(received)
    made = leg_header_pairs(
        own,
        request_id=request_id,
        forwards_authorization=forwards_authorization,
        passed=passed,
        trace=trace,
        credentials=credentials,
    )
    pairs = [pair for pair in made if pair[0] not in (b"content-type", b"accept")]
    for wanted in (b"content-type", b"accept"):
        value = next((value for name, value in own if name == wanted), b"")
        if 0 < len(value) <= _MEDIA_BYTES_MAX and _VALUE.fullmatch(value):
            pairs.append((wanted, value))
    return tuple(pairs)


def answered_header_pairs(received: Iterable[tuple[bytes, bytes]]) -> LegHeaders:
    """Those of a worker's answer that its client gets; of a repeated header the first counts."""
    known: dict[bytes, bytes] = {}
    for name, value in received:
        lower = name.lower()
        if lower in _ANSWERED and _VALUE.fullmatch(value):
            known.setdefault(lower, value)
    return tuple(known.items())


def trace_id_in(pairs: LegHeaders) -> str:
    """The id of the trace that the legs belong to."""
    return next((value[3:35].decode("ascii") for name, value in pairs if name == b"traceparent"), "")
