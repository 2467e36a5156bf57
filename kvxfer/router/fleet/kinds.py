"""What a failure between the router and one engine says of that engine: the kinds of ``policy.health``, by the upstream
client's errors. It must never know a request."""

from __future__ import annotations

import errno

from kvxfer.router.upstream import (
    UpstreamAbortedError,
    UpstreamBusyError,
    UpstreamClosedError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamPhase,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN})
"""A connection that fails so failed for want of something in this process or on this host."""
_LATE = {
    UpstreamPhase.QUEUE: "exhausted",
    UpstreamPhase.CONNECT: "connect_timeout",
    UpstreamPhase.WHOLE: "overran",
}


def failure_kind(error: UpstreamError) -> str:
    """The kind of failure, one of ``policy.health.BLAMES``."""
    if isinstance(error, UpstreamConnectError):
        number = getattr(error.__cause__, "errno", None)
        if number in EXHAUSTED:
            return "exhausted"
        return "connect_timeout" if number == errno.ETIMEDOUT else "unreachable"
    if isinstance(error, UpstreamTimeoutError):
        return _LATE.get(error.phase, "hung")
    if isinstance(error, UpstreamBusyError):
        return "exhausted"
    if isinstance(error, UpstreamProtocolError):
        return "malformed"
    if isinstance(error, UpstreamAbortedError) or error.phase is UpstreamPhase.QUEUE:
        return "gone"
    if isinstance(error, UpstreamClosedError):
        return "lost" if error.phase is UpstreamPhase.BODY else "unread"
    return "lost"
