"""The loop of one sending process: sends each request when it is due, whatever became of others.

Decides which connection carries a request, when one is given up, and what is done in idle time: making bodies, dialing
ahead, telling records. It must never know how bodies are made, or what is good. One thread, one epoll; the collector of
cycles is off while it runs.
"""

from __future__ import annotations

import collections
import errno
import json
import math
import os
import resource
import select
import ssl
import time
from collections.abc import Callable

from kvxfer.errors import KvxferError
from kvxfer.load.drive import control
from kvxfer.load.drive.answer import NOT_FINISHED, STOPPED, TIMEOUT, UNREACHABLE
from kvxfer.load.drive.control import ControlLine, ProcessUse
from kvxfer.load.drive.endpoint import LoadEndpoint
from kvxfer.load.drive.schedule import BodyStore, Schedule, SharePlan
from kvxfer.load.drive.timer import WakeTimer
from kvxfer.load.drive.wires import RECEIVE_BYTES, SentRequest, Wire, WireState
from kvxfer.load.record import NO_BODY, NOT_SENT, TOO_MANY_CONNECTIONS, MeasuredRequest
from kvxfer.workload.request import WorkloadRequest

EVENTS_MAX = 4
"""Handled before the next look at what is due: a whole answer takes about 0.15 ms."""
DIAL_AHEAD_S, DIAL_EACH_S = 0.1, 0.01
"""How long before a request is due there is a connection for it, and how often that is looked at."""
PREPARE_S = 10.0
"""Bodies are made for at most so long before the run begins."""
IDLE_S = 0.0005
"""A shorter time before the next request is due is not used for anything else."""
DIALS_MAX = 8
"""In one go: about 0.3 ms."""
TELL_S = 0.05
TELL_AT_ONCE = 16
"""Records that are told in one go: about 0.3 ms."""
PROGRESS_S = 0.25
LATE_WAKEUP_S = 0.001
LONGEST_WAIT_S = 1.0


class Sender:
    """Sends one share. ``run`` returns when each of its requests has its record."""

    def __init__(
        self, plan: SharePlan, body: Callable[[WorkloadRequest], bytes], endpoint: LoadEndpoint, line: ControlLine
    ) -> None:
        self.epoll = select.epoll()
        self.began_s = math.inf
        self._plan = plan
        self._body = body
        self._endpoint = endpoint
        self._context: ssl.SSLContext | None = endpoint.context()
        self._line = line
        self._schedule = Schedule(plan.requests, plan.mode)
        known = self._schedule.known()
        self._bodies = BodyStore(self._payload, known, self._schedule.unknown(), bytes_max=plan.ahead_bytes)
        self._ahead = collections.deque(due_s for due_s, _ in known)
        """Due times for which no connection was dialed yet."""
        self._buffer = bytearray(RECEIVE_BYTES)
        self._wires: dict[int, Wire] = {}
        self._idle: list[Wire] = []
        self._dialing: list[Wire] = []
        """Ahead of requests. Of both lists some are no longer what the list says."""
        self._flying: dict[int, SentRequest] = {}
        self._deadlines: collections.deque[tuple[float, int]] = collections.deque()
        """(when it was begun, number) in order; some have ended."""
        self._untold: collections.deque[MeasuredRequest] = collections.deque()
        self._latest_due_s = plan.span_s
        self._sent = self._unsent = self._wakeups_late = self._stamps_late = 0
        self._worst_wakeup_s = self._worst_stamp_s = self._told_s = self._progress_s = self._dial_s = 0.0
        self._line_events = select.EPOLLIN
        self._is_stopped = False
        self._timer = WakeTimer()
        self.epoll.register(line.fileno(), select.EPOLLIN)
        self.epoll.register(self._timer.fileno(), select.EPOLLIN)

    # Before and after.

    def prepare(self) -> bool:
        """Make bodies, say that it is ready, and wait for the beginning. False: there will be none."""
        until_s = time.monotonic() + PREPARE_S
        while time.monotonic() < until_s and not self._is_stopped and self._make_one():
            self._hear()
        self._line.say(control.READY)
        while self.began_s == math.inf and self._line.is_open and not self._is_stopped:
            self._line.flush()
            self._watch_line()
            self.epoll.poll(1.0)
            self._hear()
        if self._is_stopped and self.began_s == math.inf:
            self.began_s = time.monotonic()
        return self._line.is_open

    def run(self, priority: str = "") -> None:
        """Until all is told, or the command's process is gone. ``priority`` is what the system gave this process."""
        cpu_s = _cpu_s()
        while self._line.is_open and not self._is_over():
            now_s = self._now()
            while self._schedule.due_s <= now_s and not self._is_stopped:
                self._dispatch()
                now_s = self._now()
            self._give_up(now_s)
            if self._ahead and now_s >= self._dial_s:
                self._dial_ahead(now_s)
            self._wait(now_s)
        use = ProcessUse(
            self._plan.process,
            os.getpid(),
            round(_cpu_s() - cpu_s, 6),
            self._sent,
            self._wakeups_late,
            round(self._worst_wakeup_s, 6),
            self._bodies.late,
            self._stamps_late,
            round(self._worst_stamp_s, 6),
            priority,
        )
        while self._untold:
            self._tell()
        self._line.say(control.PROGRESS, b"%d" % self._sent)
        self._line.say(control.UNSENT, b"%d" % self._unsent)
        self._line.say(control.ENDED, json.dumps(use.__dict__).encode())
        while self._line.has_unsent:
            self._line.flush()
            select.select([], [self._line], [], 1.0) if self._line.is_open else None

    def _is_over(self) -> bool:
        return not self._flying and (self._is_stopped or (self._schedule.due_s == math.inf))

    def _now(self) -> float:
        return time.monotonic() - self.began_s

    # Sending.

    def _payload(self, request: WorkloadRequest) -> bytes:
        body = self._body(request)
        head = f"x-request-id: {self._plan.request_id(request.number)}\r\ncontent-length: {len(body)}\r\n\r\n"
        return b"".join((self._endpoint.head, head.encode(), body))

    def _dispatch(self) -> None:
        """The next request is due."""
        due_s, request = self._schedule.take()
        self._latest_due_s = max(self._latest_due_s, due_s)
        record = self._plan.record(request, due_s)
        try:
            payload = self._bodies.take(request)
        except Exception as error:  # whatever the maker of bodies raises, the request has its record
            sent = SentRequest(record, b"", self._now())
            sent.reader.fail(NO_BODY, _words(error), self._now())
            self._flying[record.number] = sent
            self.wire_ended(sent, self._now())
            return
        sent = SentRequest(record, payload, self._now())
        self._flying[record.number] = sent
        self._deadlines.append((sent.begun_s, record.number))
        following = self._schedule.next_turn(request.number)
        if following is not None:
            self._bodies.expect(sent.begun_s + following.think_s, following)
        self._carry(sent)
        self._sent += 1

    def _carry(self, sent: SentRequest, *, anew: bool = False) -> None:
        """Over an idle connection, else one that is being dialed, else a new one."""
        if not anew:
            while self._idle:
                wire = self._idle.pop()
                if wire.can_carry:
                    wire.send(sent)
                    return
            while self._dialing:
                wire = self._dialing.pop()
                if wire.can_carry and wire.state is not WireState.IDLE:
                    wire.send(sent)
                    return
        failure = self._dial(sent)
        if failure is not None:
            if failure[0] == UNREACHABLE:
                sent.note_begun(self._now())
            sent.reader.fail(*failure, self._now())
            self.wire_ended(sent, self._now())

    def _dial(self, sent: SentRequest | None) -> tuple[str, str] | None:
        """A new connection, for a request or ahead of one; (error, message) where there can be none."""
        if len(self._wires) >= self._plan.connections_max:
            return TOO_MANY_CONNECTIONS, f"{self._plan.connections_max} connections are open"
        try:
            wire = Wire(self, self._endpoint, self._context, self._buffer)
        except OSError as error:
            is_full = error.errno in _FULL
            return (TOO_MANY_CONNECTIONS if is_full else UNREACHABLE), error.strerror or str(error)
        self._wires[wire.fd] = wire
        if sent is None:
            self._dialing.append(wire)
        else:
            wire.send(sent)
        return None

    def _dial_ahead(self, now_s: float) -> None:
        """One connection for each request that is due soon, idle ones counted."""
        ahead = self._ahead
        self._dial_s = now_s + DIAL_EACH_S
        while ahead and ahead[0] <= now_s:
            ahead.popleft()
        soon = 0
        for due_s in ahead:
            if due_s > now_s + DIAL_AHEAD_S:
                break
            soon += 1
        free = len(self._wires) - len(self._flying)
        for _ in range(min(soon - free, DIALS_MAX)):
            self._dial(None)

    # What connections tell.

    def wire_ready(self, wire: Wire) -> None:
        self._idle.append(wire)

    def wire_closed(self, wire: Wire) -> None:
        self._wires.pop(wire.fd, None)

    def wire_retries(self, request: SentRequest) -> None:
        self._carry(request, anew=True)

    def wire_ended(self, request: SentRequest, now_s: float) -> None:
        record = request.record
        request.wire = None
        request.payload = b""
        del self._flying[record.number]
        request.reader.fill(record, now_s)
        self._untold.append(record)
        for due_s, left in self._schedule.ended(record.number, now_s, is_good=not record.error):
            self._leave(left, due_s, f"request {record.number} of its session failed")

    def _leave(self, request: WorkloadRequest, due_s: float, message: str) -> None:
        """It is never sent."""
        record = self._plan.record(request, due_s)
        record.error, record.message = NOT_SENT, message
        self._untold.append(record)

    # Giving up.

    def _give_up(self, now_s: float) -> None:
        """What takes longer than it may."""
        while self._deadlines:
            begun_s, number = self._deadlines[0]
            sent = self._flying.get(number)
            if sent is not None and now_s - begun_s < self._plan.timeout_s:
                break
            self._deadlines.popleft()
            if sent is not None:
                self._abandon(sent, TIMEOUT, f"no whole answer within {self._plan.timeout_s:g} s", now_s)
        if self._schedule.due_s == math.inf and now_s > self._latest_due_s + self._plan.drain_s:
            self._stop(NOT_FINISHED, f"no whole answer {self._plan.drain_s:g} s after the last was due")

    def _abandon(self, sent: SentRequest, error: str, message: str, now_s: float) -> None:
        if sent.wire is not None:
            sent.wire.close()
        sent.reader.fail(error, message, now_s)
        self.wire_ended(sent, now_s)

    def _stop(self, error: str, message: str) -> None:
        """Nothing more is sent, and nothing more is waited for."""
        self._is_stopped = True
        now_s = self._now()
        for due_s, request in self._schedule.drop(now_s):
            self._leave(request, due_s, message)
        self._abandon_all(error, message, now_s)

    def _obey_stop(self) -> None:
        """The same, where the command's process makes the records of what was never sent: there can be millions."""
        self._is_stopped = True
        own, unsent = self._schedule.clear()
        self._unsent += unsent
        for due_s, request in own:
            self._leave(request, due_s, STOPPED)
        self._abandon_all(NOT_FINISHED, STOPPED, self._now())

    def _abandon_all(self, error: str, message: str, now_s: float) -> None:
        for sent in list(self._flying.values()):
            self._abandon(sent, error, message, now_s)

    # Waiting.

    def _wait(self, now_s: float) -> None:
        """For events or for the next time; what else is to be done is done while there is time."""
        until_s = self._schedule.due_s
        if until_s - now_s > IDLE_S:
            is_busy = False
            if self._untold and (now_s - self._told_s > TELL_S or len(self._untold) > TELL_AT_ONCE):
                self._told_s = now_s
                self._tell()
                is_busy = bool(self._untold)
            elif now_s - self._progress_s > PROGRESS_S:
                self._progress_s = now_s
                self._line.say(control.PROGRESS, b"%d" % self._sent)
                self._line.flush()
                self._watch_line()
            else:
                wanted = self._bodies.wanted
                if wanted is not None and now_s + 2 * self._bodies.seconds(wanted) + IDLE_S < until_s:
                    if self._handle(self.epoll.poll(0, EVENTS_MAX)):
                        return
                    self._make_one()
                    self._stamp_late(self._now() - now_s)
                    return
            if is_busy:
                self._handle(self.epoll.poll(0, EVENTS_MAX))
                return
        until_s = min(until_s, self._next_chore_s(now_s))
        if until_s <= self._now():
            self._handle(self.epoll.poll(0, EVENTS_MAX))
        else:
            self._timer.wake_by(self.began_s + until_s)
            self._handle(self.epoll.poll(LONGEST_WAIT_S, EVENTS_MAX))

    def _stamp_late(self, spent_s: float) -> None:
        """What came while a body was made is noted that much too late at most."""
        events = self.epoll.poll(0, EVENTS_MAX)
        if events:
            self._stamps_late += len(events)
            self._worst_stamp_s = max(self._worst_stamp_s, spent_s)
            self._handle(events)

    def _next_chore_s(self, now_s: float) -> float:
        """When something is to be done besides sending."""
        until_s = self._progress_s + PROGRESS_S
        if self._untold:
            until_s = min(until_s, self._told_s + TELL_S)
        if self._deadlines:
            until_s = min(until_s, self._deadlines[0][0] + self._plan.timeout_s)
        if self._ahead:
            until_s = min(until_s, max(self._ahead[0] - DIAL_AHEAD_S, self._dial_s))
        return max(until_s, now_s + IDLE_S)

    def _handle(self, events: list[tuple[int, int]]) -> bool:
        for fd, event in events:
            wire = self._wires.get(fd)
            if wire is not None:
                wire.ready(event)
            elif fd == self._timer.fileno():
                late_s = self._timer.woke()
                if late_s > LATE_WAKEUP_S:
                    self._wakeups_late += 1
                    self._worst_wakeup_s = max(self._worst_wakeup_s, late_s)
            elif fd == self._line.fileno():
                self._hear()
        return bool(events)

    def _hear(self) -> None:
        for kind, text in self._line.heard():
            if kind == control.BEGIN:
                self.began_s = float(text)
            elif kind == control.STOP:
                if self.began_s == math.inf:
                    self.began_s = time.monotonic()
                self._obey_stop()
        self._line.flush()
        self._watch_line()

    def _watch_line(self) -> None:
        """Whether the socket has room is asked only while something is left to say."""
        events = select.EPOLLIN | (select.EPOLLOUT if self._line.has_unsent else 0)
        if events != self._line_events:
            self._line_events = events
            self.epoll.modify(self._line.fileno(), events)

    def _make_one(self) -> bool:
        """One body, ahead of its time; False where none is wanted."""
        request = self._bodies.wanted
        if request is None:
            return False
        began_s = time.monotonic()
        try:
            self._bodies.prepare()
        except Exception:  # it is made again, and told, when it is due
            return True
        self._bodies.spent(request, time.monotonic() - began_s)
        return True

    def _tell(self) -> None:
        for _ in range(min(len(self._untold), TELL_AT_ONCE)):
            self._line.say(control.RECORD, self._untold.popleft().to_json().encode())
        self._line.flush()
        self._watch_line()


_FULL = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, KvxferError) else f"{type(error).__name__}: {error}"


def _cpu_s() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime
