"""Conversations: made-up ones, and when the later turns of any are due.

Decides what a turn's prompt begins with, and what the two dispatch modes mean. Knows nothing of files and of sending.

A session is one growing row of tokens. The prompt of turn k is its beginning: the prompt of turn k-1, as many tokens as
were planned for the answer to it, and the new message. A server's own answer has other tokens than those planned, so a
prefix cache finds the prompt of the turn before, and not its answer.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError
from kvxfer.workload.request import TOKENS_MAX, DispatchMode, Workload, WorkloadRequest
from kvxfer.workload.seeds import Stream, stream

Counts = npt.NDArray[np.int64]
HASH_TOKENS = 512
"""Of made-up requests that share no prefix beyond their session, and of Mooncake's traces."""
HASH_TOKENS_MIN = 64
IDS_MAX = 20_000_000
"""Of all made-up requests together: more would fill the memory."""


@dataclasses.dataclass(frozen=True)
class MadeUp:
    """Made-up requests: lengths in tokens, times in seconds. Raises InvalidArgumentError for a value out of range."""

    prompt_tokens: int = 512
    """On average: of a whole first prompt. A later turn adds as many, less ``shared_prefix_tokens``."""
    output_tokens: int = 64
    length_spread: float = 0.0
    """Lengths are uniform within +- this share of the mean, in whole tokens."""
    shared_prefix_tokens: int = 0
    """All prompts begin with the same tokens, so many; a drawn prompt is longer than that by at least one token."""
    turns: int = 1
    think_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.length_spread < 1:
            raise InvalidArgumentError(f"length_spread must be 0 or more and below 1, not {self.length_spread}")
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens:
            raise InvalidArgumentError("shared_prefix_tokens must be 0 or more, and less than prompt_tokens")
        if self.turns < 1 or self.prompt_tokens < 1 or self.output_tokens < 1 or not self.think_s >= 0:
            raise InvalidArgumentError("turns, prompt_tokens and output_tokens must be above 0, think_s 0 or more")

    @property
    def hash_tokens(self) -> int:
        """A divisor of the shared prefix, so that a prompt shares exactly that, as near to 512 as there is one."""
        shared = self.shared_prefix_tokens
        if not shared:
            return HASH_TOKENS
        fitting = [size for size in range(min(shared, HASH_TOKENS), 0, -1) if shared % size == 0]
        return fitting[0] if fitting[0] >= HASH_TOKENS_MIN else shared

    def requests(self, begins_s: Sequence[float] | npt.NDArray[np.float64], count: int, seed: int) -> SessionRequests:
        """``count`` requests of sessions that begin at these times; a turn is due ``think_s`` after the turn before it
        was, as if answers took no time. The last sessions are shorter where ``count`` asks for it.

        Raises InvalidArgumentError where a session's prompt grows beyond TOKENS_MAX, or there are too many hash ids.
        """
        draw = stream(seed, "lengths")
        prompts, outputs = (
            self._lengths(self.prompt_tokens, count, draw),
            self._lengths(self.output_tokens, count, draw),
        )
        prompts = np.maximum(prompts, self.shared_prefix_tokens + 1)
        made: list[WorkloadRequest] = []
        shared_ids = tuple(range(self.shared_prefix_tokens // self.hash_tokens))
        next_id, number, ids_left = len(shared_ids), 0, IDS_MAX
        has_ids = self.turns > 1 or bool(shared_ids)
        for session, begin_s in enumerate(begins_s):
            length, ids = 0, shared_ids
            for turn in range(min(self.turns, count - number)):
                added = int(prompts[number]) - (self.shared_prefix_tokens if turn else 0)
                length += added
                if has_ids:
                    new = max(0, -(-length // self.hash_tokens) - len(ids))
                    ids = (*ids, *range(next_id, next_id + new))
                    next_id += new
                    ids_left -= len(ids)
                    if ids_left < 0:
                        raise InvalidArgumentError(
                            f"the prompts have more than {IDS_MAX} blocks of {self.hash_tokens} tokens: a shared "
                            f"prefix of a multiple of {HASH_TOKENS} tokens has fewer"
                        )
                if length > TOKENS_MAX:
                    raise InvalidArgumentError(f"the prompt of turn {turn} has more than {TOKENS_MAX} tokens")
                made.append(
                    WorkloadRequest(
                        number,
                        length,
                        int(outputs[number]),
                        float(begin_s) + turn * self.think_s,
                        think_s=self.think_s if turn else 0.0,
                        session=session if self.turns > 1 else None,
                        turn=turn,
                        hash_ids=ids,
                    )
                )
                length += int(outputs[number])
                number += 1
        return in_order(made)

    def _lengths(self, mean: int, count: int, draw: Stream) -> Counts:
        spread = int(mean * self.length_spread)
        return np.maximum(draw.integers(mean - spread, mean + spread, count, endpoint=True), 1)


SessionRequests = list[WorkloadRequest]
"""In order, numbered, every one with a due time and with the think time before it."""


def in_order(requests: Iterable[WorkloadRequest]) -> SessionRequests:
    """In the order of their due times, and numbered so. Turns that are due at once stay in their order."""
    ordered = sorted(requests, key=lambda request: (request.due_s or 0.0, request.turn))
    return [
        request if request.number == number else dataclasses.replace(request, number=number)
        for number, request in enumerate(ordered)
    ]


def grouped(
    requests: Iterable[WorkloadRequest], delays_s: Sequence[float | None], took_s: Sequence[float | None] = ()
) -> SessionRequests:
    """The requests of a trace with turns, due times and think times, in the order of their due times.

    ``delays_s`` has for each request the think time that the trace gives, or None; ``took_s`` how long the answer took
    in the trace, where it says so. A turn's think time is that delay. Where there is none it is the difference of both
    turns' due times, less ``took_s`` of the turn before; what is not known is not subtracted, so a session is then
    slower than it was by the time that its answers take. A turn without a due time (None) is due its think time after
    the turn before it was, as if the answer took no time. Of a session's rows the earlier is the earlier turn.
    """
    sessions: defaultdict[tuple[str, int], list[tuple[WorkloadRequest, float | None, float]]] = defaultdict(list)
    for place, request in enumerate(requests):
        took = took_s[place] if place < len(took_s) else None
        key = ("alone", place) if request.session is None else ("session", request.session)
        sessions[key].append((request, delays_s[place], took or 0.0))
    made: list[WorkloadRequest] = []
    for rows in sessions.values():
        if len(rows) == 1:
            only = rows[0][0]
            made.append(dataclasses.replace(only, think_s=0.0, turn=0) if only.think_s or only.turn else only)
            continue
        if all(request.due_s is not None for request, _, _ in rows):
            rows.sort(key=lambda row: row[0].due_s or 0.0)
        before, took = None, 0.0
        for turn, (request, delay, took_now) in enumerate(rows):
            due, think = request.due_s, 0.0
            if before is not None:
                if delay is not None:
                    think = delay
                elif due is not None:
                    think = max(0.0, due - before - took)
                due = max(before, before + think if due is None else due)
            made.append(dataclasses.replace(request, due_s=due, think_s=think, turn=turn))
            before, took = due, took_now
    return in_order(made)


def with_mode(workload: Workload, mode: DispatchMode) -> Workload:
    """The same workload in that mode. ``THINK`` takes the due times of later turns away, and keeps their think times.
    ``TIMESTAMP`` gives turns without a due time that of the turn before and the think time, as if answers took no time.
    The order stays: a turn stands after the turn before it.
    """
    if mode is workload.mode and (mode is DispatchMode.THINK or all(r.due_s is not None for r in workload.requests)):
        return workload
    if mode is DispatchMode.THINK:
        without = [dataclasses.replace(one, due_s=None) if one.turn else one for one in workload.requests]
        return dataclasses.replace(workload, requests=without, mode=mode)
    requests: list[WorkloadRequest] = []
    before: dict[int | None, float] = {}
    for request in workload.requests:
        due = request.due_s
        if due is None:
            due = before.get(request.session, 0.0) + request.think_s
            request = dataclasses.replace(request, due_s=due)
        before[request.session] = due
        requests.append(request)
    return dataclasses.replace(workload, requests=in_order(requests), mode=mode)


def moved(requests: Sequence[WorkloadRequest], begins_s: npt.NDArray[np.float64]) -> SessionRequests:
    """The same sessions, begun at these times in turn; later turns keep their distance from the first one's due time.

    Sessions beyond the last of ``begins_s`` are left out.
    """
    begins: dict[tuple[str, int], tuple[float, float]] = {}
    made: list[WorkloadRequest] = []
    for place, request in enumerate(requests):
        key = ("alone", place) if request.session is None else ("session", request.session)
        due = request.due_s or 0.0
        if key not in begins:
            begins[key] = (due, float(begins_s[len(begins)]) if len(begins) < len(begins_s) else float("nan"))
        was, now = begins[key]
        if now == now:
            made.append(dataclasses.replace(request, due_s=now + (due - was)))
    return in_order(made)


def sessions_in(requests: Iterable[WorkloadRequest]) -> int:
    """How many there are; a request without a session is one of its own."""
    return sum(1 for request in requests if request.turn == 0)
