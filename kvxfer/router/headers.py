"""Which headers cross the router: the request id and the trace are kept or made, everything else is named here.

Decides header values only; it never knows which worker they go to.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from kvxfer.observe import is_traceparent, next_traceparent

REQUEST_ID = "x-request-id"
PREFILL = "x-kvxfer-prefill"
PREFILL_REASON = "x-kvxfer-prefill-reason"
ATTEMPT = "x-kvxfer-attempt"
RETRY_AFTER = "retry-after"
DATA_PARALLEL_RANK = "x-data-parallel-rank"
"""vLLM's: which of the engines behind one HTTP address takes the request."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_TRACESTATE_CHARS_MAX = 512
_AUTHORIZATION_CHARS_MAX = 8192
"""With the others it stays below the 16 KiB that a worker reads of all headers."""


def request_id(received: str | None) -> str:
    """The client's request id if it is 1 to 128 visible ASCII characters, else a new one."""
    if received is not None and _REQUEST_ID.fullmatch(received):
        return received
    return f"req-{secrets.token_hex(16)}"


def leg_headers(received: Mapping[str, str], *, request_id: str, forwards_authorization: bool) -> dict[str, str]:
    """Headers that both legs get: the same request id and trace; the client's credentials only where asked to. No other
    header of the client goes to a worker, and none of a worker's to the client.
    """
    headers = {
        "content-type": "application/json",
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",
        REQUEST_ID: request_id,
    }
    traceparent = received.get("traceparent", "")
    if is_traceparent(traceparent):
        headers["traceparent"] = traceparent
        tracestate = received.get("tracestate", "")
        if 0 < len(tracestate) <= _TRACESTATE_CHARS_MAX and tracestate.isascii():
            headers["tracestate"] = tracestate
    else:
        headers["traceparent"] = next_traceparent(None)
    authorization = received.get("authorization", "")
    if forwards_authorization and authorization.isascii() and 0 < len(authorization) <= _AUTHORIZATION_CHARS_MAX:
        headers["authorization"] = authorization
    return headers
