"""A request as it is planned, before anything was sent.

Decides what a workload says of a request, and nothing of how it is sent. A session is a conversation: its turns are in
order, and a turn never begins before the one before it has ended. The dispatch mode decides from when on it may begin.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence

from kvxfer.errors import InvalidArgumentError

TOKENS_MAX = 1 << 24
"""Of one prompt, and of one answer."""
REQUESTS_MAX = 10_000_000


class DispatchMode(enum.Enum):
    """When the later turns of a session are due. Which of the two is used can change which policy wins, so every
    result names it."""

    TIMESTAMP = "timestamp"
    """At the time that the trace says, whatever became of the turn before. A turn that is due while the one before it
    still runs is sent: the load does not depend on the answers."""
    THINK = "think"
    """When the turn before has ended, and the user's think time is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. Times in seconds, lengths in tokens. Raises InvalidArgumentError for a value out of range."""

    number: int
    """Its place in the workload, from 0."""
    prompt_tokens: int
    output_tokens: int
    due_s: float | None
    """After the beginning of the workload; None: ``think_s`` after the end of the turn before."""
    think_s: float = 0.0
    session: int | None = None
    """None: it is a session of its own."""
    turn: int = 0
    """Of its session, from 0."""
    hash_ids: tuple[int, ...] = ()
    """One for each ``Workload.hash_tokens`` tokens of the prompt, the last for what is left. Two prompts with the same
    ids up to a place have the same tokens up to there. Empty: the prompt shares nothing with any other."""
    text: str | None = None
    """The prompt, where it is text. Its number of tokens is then an estimate."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= TOKENS_MAX:
                raise InvalidArgumentError(f"request {self.number}: {name} must be 1 to {TOKENS_MAX}, not {value}")
        for name in ("due_s", "think_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidArgumentError(f"request {self.number}: {name} must be 0 or more seconds, not {value}")
        if self.due_s is None and self.turn == 0:
            raise InvalidArgumentError(f"request {self.number}: the first turn of a session needs a due time")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order of their due times; a turn without one stands after the turn before it."""

    name: str
    requests: Sequence[WorkloadRequest]
    hash_tokens: int = 512
    """How many tokens one hash id stands for."""
    mode: DispatchMode = DispatchMode.TIMESTAMP
    source: str = ""
    """Where it comes from and its licence, in words; empty where it was made up."""

    @property
    def span_s(self) -> float:
        """When the last request with a due time is due."""
        return max((request.due_s for request in self.requests if request.due_s is not None), default=0.0)

    @property
    def has_sessions(self) -> bool:
        return any(request.turn for request in self.requests)

    def renumbered(self, requests: Iterable[WorkloadRequest]) -> Workload:
        """The same workload with these requests, numbered anew in their order."""
        numbered = [dataclasses.replace(request, number=number) for number, request in enumerate(requests)]
        return dataclasses.replace(self, requests=numbered)
