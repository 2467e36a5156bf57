"""When the silence of a stream, or of a whole request, has lasted too long.

Decides whether a silent stream is given up. Its own silence is no evidence against a worker: a parser of tool calls
holds a long argument back while the engine computes at full speed. So a silence beyond the limit is judged by what else
is known of the worker. Time comes in as an argument; it must never know a clock, a socket, or what a stream carries.
"""

from __future__ import annotations

import dataclasses

LOOKS = 4
"""Looks at a silent stream in the time of one limit, once the limit has passed."""
LOOK_MAX_S = 5.0


@dataclasses.dataclass(frozen=True)
class WorkerSigns:
    """What is known of a silent stream's worker, beside that stream. Times are in seconds, of any clock."""

    heard_s: float
    """When it last sent some of another answer, or the end of one. Minus infinity: never."""
    worked_s: float
    """When its own count of generated tokens was last seen to grow. Minus infinity: never."""
    counts_tokens: bool
    """Whether it has such a count."""
    is_out: bool
    """Whether it fails its probes, or its other requests (`policy.health`)."""
    others: int
    """Other requests in flight there, and those that failed there in a row: the first of several silent streams that is
    given up does not leave the last one alone."""


def is_dead_silence(signs: WorkerSigns, *, now_s: float, limit_s: float) -> bool:
    """Whether a stream that has been silent for ``limit_s`` is given up.

    Not while the worker sends something else, or counts tokens: then it works, and this stream's silence is its own. A
    worker that fails its probes, one that counts no token more, and one of which every stream is silent, has stopped.
    Of a worker that counts nothing and has no other request nothing is known but that it answers its probes: it goes
    on, until the request's own limit.
    """
    if signs.is_out:
        return True
    if now_s - max(signs.heard_s, signs.worked_s) < limit_s:
        return False
    return signs.counts_tokens or signs.others > 0


def is_to_be_asked(signs: WorkerSigns, *, now_s: float, limit_s: float) -> bool:
    """Whether a worker is to be asked how it is, because a stream is silent and nothing else was heard for half of the
    limit: so that its answer is there when the limit has passed."""
    return now_s - max(signs.heard_s, signs.worked_s) >= limit_s / 2


def look_again_s(limit_s: float) -> float:
    """How long after one look the next one is due."""
    return min(LOOK_MAX_S, limit_s / LOOKS)


class Progress:
    """Of one request: it may take ``limit_s`` until its answer begins, then each silence may, and ``total_s`` in all;
    0 is no bound. What has progressed is a count that only grows while there is progress."""

    def __init__(self, begun_s: float, *, limit_s: float, total_s: float = 0.0) -> None:
        self._limit_s = limit_s
        self._end_s = begun_s + total_s if total_s else float("inf")
        self._since_s = begun_s
        self._seen = 0

    def look(self, count: int, now_s: float) -> float:
        """The count now. Returns when the request's time is up unless there is progress until then."""
        if count != self._seen:
            self._seen, self._since_s = count, now_s
        return min(self._end_s, self._since_s + self._limit_s)

    def is_total(self, now_s: float) -> bool:
        """Whether it is the bound of the whole that has passed."""
        return now_s >= self._end_s
