"""Numbers of the upstream client: bounds of a pool, deadlines of a request, counters.

It decides the default values, and nothing else. It must never know a connection.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable

from kvxfer.errors import InvalidArgumentError

Patience = Callable[[float], float]
"""Gets for how many seconds the body has been silent, and says how many more it may be; 0 gives the request up."""


class UpstreamPhase(enum.StrEnum):
    """What a request was doing when it failed. The value is a metric label."""

    QUEUE = "queue"
    CONNECT = "connect"
    SEND = "send"
    FIRST_BYTE = "first_byte"
    BODY = "body"
    WHOLE = "whole"


def _check_positive(values: object) -> None:
    for field in dataclasses.fields(values):  # type: ignore[arg-type]
        if not getattr(values, field.name) > 0:
            raise InvalidArgumentError(f"{field.name} must be more than 0, not {getattr(values, field.name)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamDeadlines:
    """Seconds for each phase of one request; ``math.inf`` is no deadline.

    The pool looks at them every ``UpstreamLimits.tick_s``: a deadline passes never early, and at most two ticks late.
    """

    queue_s: float = 5.0
    """Until a connection is free."""
    connect_s: float = 3.0
    send_s: float = 30.0
    """Until the kernel has taken the whole request but for the transport's own buffer (64 KiB)."""
    first_byte_s: float = 300.0
    """From then on until the whole head of the answer is there. An interim answer (1xx) does not renew it."""
    between_chunks_s: float = 60.0
    """Without a byte of the body, or without what the consumer counts in place of bytes. It stands still while the
    consumer has paused the answer. Where the request came with `Patience`, that is asked first when half of it has
    passed."""
    whole_s: float = 3600.0
    """From the call of ``request`` until the last byte of the answer, the queue included."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLimits:
    connections_max: int = 1024
    waiting_max: int = 4096
    """Requests that wait for a connection; one more is refused at once."""
    idle_s: float = 4.0
    """How long an idle connection is kept. uvicorn, which most engines run under, closes after 5 s: we close first."""
    tick_s: float = 0.05
    head_bytes_max: int = 65536
    """Of an answer, its interim answers included."""
    headers_max: int = 128
    interim_max: int = 8
    silent_bytes_max: int = 16384
    """Bytes of framing (chunk sizes, extensions, trailers) in a row that bring no byte of the body.

    Reads are counted that bring none at all, so that framing beside a body in one read goes uncounted. Nothing of it
    is kept.
    """
    buffer_bytes_max: int = 262144
    """Body bytes that wait for a slow consumer; one read of the socket (up to 256 KiB) may come on top."""
    send_slice_bytes: int = 262144
    """A longer request is given to the transport in slices of this size, each when the transport has room."""

    def __post_init__(self) -> None:
        _check_positive(self)


class UpstreamCounters:
    """Plain numbers of one pool. ``open`` are established connections: ``idle`` ones and those of ``in_flight``."""

    __slots__ = (
        "aborted",
        "completed",
        "connected",
        "failed",
        "heard_s",
        "idle",
        "in_flight",
        "open",
        "requests",
        "reused",
        "waiting",
    )

    def __init__(self) -> None:
        self.open = 0
        self.idle = 0
        self.in_flight = 0
        self.waiting = 0
        self.requests = 0
        self.connected = 0
        self.reused = 0
        self.completed = 0
        self.aborted = 0
        self.heard_s = -math.inf
        """When some connection had some of an answer (no keep-alive, where these are told apart), or the end of one, by
        the loop's clock and within a tick."""
        self.failed: dict[UpstreamPhase, int] = dict.fromkeys(UpstreamPhase, 0)
