"""Which process sends which requests, and when each is due: decides order, and nothing of how a request is sent.

Pure: times go in, requests come out. A session stays in one process. Open loop: a request is due whatever became of
others, but for a turn that waits for the turn before it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvxfer.load.record import MeasuredRequest
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest

REQUESTS_PER_PROCESS_S = 500.0
"""Mean requests/s that one sending process is given."""


@dataclasses.dataclass(frozen=True)
class SharePlan:
    """What one sending process is told. Times in seconds after the beginning of the run."""

    process: int
    run: str
    id_prefix: str
    requests: Sequence[WorkloadRequest]
    mode: DispatchMode
    warmup: int
    """Requests with a number below are warm-up."""
    span_s: float
    """When the last request of the whole workload is due, as far as it is known."""
    timeout_s: float
    drain_s: float
    connections_max: int
    ahead_bytes: int
    """How much room bodies that were made ahead may take."""

    def request_id(self, number: int) -> str:
        return f"{self.id_prefix}-{number}"

    def record(self, request: WorkloadRequest, due_s: float) -> MeasuredRequest:
        """Of a request of which nothing is known but when it is due."""
        return MeasuredRequest(
            run=self.run,
            number=request.number,
            request_id=self.request_id(request.number),
            due_s=due_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens_asked=request.output_tokens,
            is_warmup=request.number < self.warmup,
            session=request.session,
            turn=request.turn,
            process=self.process,
        )


def process_count(workload: Workload, asked: int, processors: int) -> int:
    """``asked``, or one for each REQUESTS_PER_PROCESS_S of the mean rate and at most one for each processor; never more
    than there are sessions."""
    count = asked
    if not count:
        rate = len(workload.requests) / max(workload.span_s, 1.0)
        count = min(math.ceil(rate / REQUESTS_PER_PROCESS_S), processors)
    sessions = {
        (request.session, None if request.session is not None else request.number) for request in workload.requests
    }
    return max(1, min(count, len(sessions)))


def shares(workload: Workload, processes: int) -> list[list[WorkloadRequest]]:
    """The requests of each process, in the workload's order; sessions and single requests round robin."""
    found: list[list[WorkloadRequest]] = [[] for _ in range(processes)]
    places: dict[int, int] = {}
    turn = 0
    for request in workload.requests:
        place = None if request.session is None else places.get(request.session)
        if place is None:
            place, turn = turn % processes, turn + 1
            if request.session is not None:
                places[request.session] = place
        found[place].append(request)
    return found


def due_times(
    requests: Iterable[WorkloadRequest], mode: DispatchMode, now_s: float
) -> list[tuple[float, WorkloadRequest]]:
    """When requests that were never sent would have been due; they are in the workload's order. A turn that waits for
    the turn before it: its think time after that one, or after now, as if answers took no time."""
    found: list[tuple[float, WorkloadRequest]] = []
    before: dict[int, float] = {}
    for request in requests:
        due_s = request.due_s
        if due_s is None or (request.turn and mode is DispatchMode.THINK):
            earlier_s = now_s if request.session is None else before.get(request.session, now_s)
            due_s = max(earlier_s, now_s) + request.think_s
        if request.session is not None:
            before[request.session] = due_s
        found.append((due_s, request))
    return found


class Schedule:
    """What one process sends next. A turn that waits for the turn before it is due when that ended, plus its think
    time; where the turn before failed, it and all after it are never sent."""

    def __init__(self, requests: Sequence[WorkloadRequest], mode: DispatchMode) -> None:
        self._heap: list[tuple[float, int, WorkloadRequest]] = []
        self._next: dict[int, WorkloadRequest] = {}
        """By the number of a request: the turn that waits for its end."""
        sessions: dict[int, list[WorkloadRequest]] = {}
        for request in requests:
            if request.session is None:
                self._heap.append((request.due_s or 0.0, request.number, request))
            else:
                sessions.setdefault(request.session, []).append(request)
        for turns in sessions.values():
            turns.sort(key=lambda request: request.turn)
            for place, request in enumerate(turns):
                if place and (mode is DispatchMode.THINK or request.due_s is None):
                    self._next[turns[place - 1].number] = request
                else:
                    due_s = request.think_s if request.due_s is None else request.due_s
                    self._heap.append((due_s, request.number, request))
        heapq.heapify(self._heap)

    @property
    def due_s(self) -> float:
        """When the next request is due; infinite where none is."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def is_waiting(self) -> bool:
        """Whether turns are left that become due only by the end of others."""
        return bool(self._next)

    def take(self) -> tuple[float, WorkloadRequest]:
        """The next request and when it is due. Raises IndexError where none is left."""
        due_s, _, request = heapq.heappop(self._heap)
        return due_s, request

    def next_turn(self, number: int) -> WorkloadRequest | None:
        """The turn that waits for the end of request ``number``."""
        return self._next.get(number)

    def known(self) -> list[tuple[float, WorkloadRequest]]:
        """All requests whose due times are known, in their order."""
        return [(due_s, request) for due_s, _, request in sorted(self._heap, key=lambda entry: entry[:2])]

    def unknown(self) -> list[WorkloadRequest]:
        """All turns that wait for another, in the workload's order."""
        return sorted(self._next.values(), key=lambda request: request.number)

    def ended(self, number: int, end_s: float, *, is_good: bool) -> Iterator[tuple[float, WorkloadRequest]]:
        """Request ``number`` has ended. What is returned is never sent: turns of a broken session, each with the time
        at which it would have been due had each answer taken no time."""
        request = self._next.pop(number, None)
        if request is None:
            return
        if is_good:
            heapq.heappush(self._heap, (end_s + request.think_s, request.number, request))
            return
        yield from self._broken(request, end_s)

    def drop(self, now_s: float) -> Iterator[tuple[float, WorkloadRequest]]:
        """Give up all that is left, with due times as :meth:`ended` has them."""
        while self._heap:
            due_s, request = self.take()
            yield due_s, request
            waiting = self._next.pop(request.number, None)
            if waiting is not None:
                yield from self._broken(waiting, max(due_s, now_s))
        for number in list(self._next):
            waiting = self._next.pop(number, None)
            if waiting is not None:
                yield from self._broken(waiting, now_s)

    def clear(self) -> tuple[list[tuple[float, WorkloadRequest]], int]:
        """Give up all that is left, of which the workload says when it would have been due. Returns the turns of which
        it does not, since the turn before has ended, with their due times; and how many others there were."""
        own = [(due_s, request) for due_s, _, request in self._heap if request.turn and request.due_s != due_s]
        others = len(self._heap) + len(self._next) - len(own)
        self._heap.clear()
        self._next.clear()
        return own, others

    def _broken(self, request: WorkloadRequest | None, end_s: float) -> Iterator[tuple[float, WorkloadRequest]]:
        due_s = end_s
        while request is not None:
            due_s += request.think_s
            yield due_s, request
            request = self._next.pop(request.number, None)


class BodyStore:
    """Requests made ready before they are due: the earliest first, within a bound of bytes; then, within half of it,
    turns whose time is not known yet.

    ``make`` turns a request into the bytes that are sent; it takes time, so the caller says when there is some.
    """

    def __init__(
        self,
        make: Callable[[WorkloadRequest], bytes],
        known: Sequence[tuple[float, WorkloadRequest]],
        later: Sequence[WorkloadRequest] = (),
        *,
        bytes_max: int = 1 << 30,
    ) -> None:
        self._make = make
        self._bytes_max = bytes_max
        self._wanted = [(due_s, request.number, request) for due_s, request in known]
        heapq.heapify(self._wanted)
        self._later = collections.deque(later)
        self._made: dict[int, bytes] = {}
        self._is_over = set[int]()
        """Numbers that were made or taken, of requests that may still stand in ``_wanted`` or ``_later``."""
        self._tokens = 0
        self._seconds = 0.0
        self.bytes = 0
        self.late = 0
        """Requests that were due before their bytes were made."""

    @property
    def wanted(self) -> WorkloadRequest | None:
        """What is made next; None where there is nothing, or no room."""
        while self._wanted and self._wanted[0][1] in self._is_over:
            heapq.heappop(self._wanted)
        while self._later and self._later[0].number in self._is_over:
            self._later.popleft()
        if self._wanted:
            return self._wanted[0][2] if self.bytes < self._bytes_max else None
        return self._later[0] if self._later and self.bytes < self._bytes_max // 2 else None

    def expect(self, due_s: float, request: WorkloadRequest) -> None:
        """A turn will be due about then."""
        if request.number not in self._is_over:
            heapq.heappush(self._wanted, (due_s, request.number, request))

    def seconds(self, request: WorkloadRequest) -> float:
        """How long it will take to make this one, by those before."""
        return self._seconds / self._tokens * request.prompt_tokens if self._tokens else 0.0

    def spent(self, request: WorkloadRequest, seconds: float) -> None:
        self._tokens += request.prompt_tokens
        self._seconds += seconds

    def prepare(self) -> WorkloadRequest | None:
        """Make the next one; None where none is wanted. Raises whatever ``make`` raises; the request is then left to
        :meth:`take`."""
        request = self.wanted
        if request is not None:
            self._is_over.add(request.number)
            made = self._make(request)
            self._made[request.number] = made
            self.bytes += len(made)
        return request

    def take(self, request: WorkloadRequest) -> bytes:
        """Its bytes, made now where they were not. Raises whatever ``make`` raises."""
        made = self._made.pop(request.number, None)
        if made is None:
            self.late += 1
            self._is_over.add(request.number)
            return self._make(request)
        self.bytes -= len(made)
        return made
