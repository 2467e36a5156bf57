"""``drive``: the native driver's entry, in the command's process. Starts the sending processes and hears their records.

Decides how many processes send, when they begin together, and what a run is called that did not end by itself. Every
planned request yields exactly one record, whatever becomes of the processes. It must never know what is good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Protocol

from kvxfer.errors import InvalidArgumentError
from kvxfer.load.drive import control
from kvxfer.load.drive.answer import DRIVER_LOST, STOPPED
from kvxfer.load.drive.control import ControlLine, ProcessUse
from kvxfer.load.drive.endpoint import LoadEndpoint, find
from kvxfer.load.drive.process import run_process
from kvxfer.load.drive.schedule import SharePlan, due_times, process_count, shares
from kvxfer.load.options import DriveOptions, TargetOptions
from kvxfer.load.record import NOT_SENT, MeasuredRequest
from kvxfer.workload.request import Workload, WorkloadRequest

AHEAD_BYTES = 256 << 20
"""Bodies made ahead, all processes together."""
BEGIN_AFTER_S = 0.05
"""From the moment all processes are ready to the beginning of the run."""
STOP_S = 10.0
"""How long a process may take to tell the rest after it was told to stop."""
LOOK_S = 0.1

COMPLETE, INTERRUPTED, UNREACHED = "complete", "interrupted", "unreachable"


class StopFlag(Protocol):
    """A threading.Event, or what looks like one."""

    def is_set(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class DriveProgress:
    """How far a run is."""

    planned: int
    sent: int
    """As the processes said at most 0.3 s ago."""
    ended: int
    failed: int
    """Of those that have ended, the ones never sent among them."""
    elapsed_s: float
    """Since the beginning of the run; 0 while bodies are made."""
    span_s: float
    """When the last request is due, as far as it is known before."""

    @property
    def in_flight(self) -> int:
        return max(0, self.sent - self.ended)


@dataclasses.dataclass
class DriveResult:
    """What a run took. The records went to ``on_record``."""

    began_unix_s: float
    ended: str
    """``complete``; ``interrupted``; ``driver_lost``: a sending process died; ``unreachable``: nothing was sent."""
    message: str = ""
    """One sentence, where it is not complete."""
    processes: list[ProcessUse] = dataclasses.field(default_factory=list)
    """Of those that ended by themselves."""

    @property
    def cpu_s(self) -> float:
        """Of all sending processes, between the beginning and the end of the run."""
        return sum(use.cpu_s for use in self.processes)


@dataclasses.dataclass
class _Child:
    process: BaseProcess
    plan: SharePlan
    line: ControlLine
    left: dict[int, WorkloadRequest]
    is_ready: bool = False
    has_ended: bool = False
    sent: int = 0
    unsent: int = 0
    """Requests that it left without a record, since it was told to stop."""


def drive(
    workload: Workload,
    body: Callable[[WorkloadRequest], bytes],
    target: TargetOptions,
    options: DriveOptions,
    *,
    run: str,
    warmup: int = 0,
    id_prefix: str = "",
    on_record: Callable[[MeasuredRequest], None],
    on_progress: Callable[[DriveProgress], None] | None = None,
    stop: StopFlag | None = None,
) -> DriveResult:
    """Send ``workload`` and tell each request's record as it ends, in no order.

    ``body`` makes a request's JSON; it goes to other processes (it must be importable there) and should be quick.
    The first ``warmup`` requests are marked so. ``id_prefix`` begins each request's id; empty: random, so that no
    server takes two runs' requests for one. Ctrl-C, where nothing else handles it, ends the run as ``stop`` does:
    nothing more is sent, and what is in flight is given up. What ``on_record`` or ``on_progress`` raises ends the run
    and is raised.

    Raises PeerGoneError where nothing takes a connection, ConfigError for a key or certificates that cannot be read,
    and InvalidArgumentError for a workload without requests.
    """
    if not workload.requests:
        raise InvalidArgumentError("the workload has no requests")
    endpoint = find(target)
    processes = process_count(workload, options.processes, len(os.sched_getaffinity(0)))
    started = _Run(workload, on_record, on_progress, stop)
    with hearing_interrupts(started.interrupt):
        try:
            for place, requests in enumerate(shares(workload, processes)):
                share = options.connections_max // processes + (place < options.connections_max % processes)
                plan = SharePlan(
                    process=place,
                    run=run,
                    id_prefix=id_prefix or f"{run or 'load'}-{secrets.token_hex(4)}",
                    requests=requests,
                    mode=workload.mode,
                    warmup=warmup,
                    span_s=workload.span_s,
                    timeout_s=options.timeout_s,
                    drain_s=options.drain_s,
                    connections_max=max(1, share),
                    ahead_bytes=AHEAD_BYTES // processes,
                )
                started.start(plan, body, endpoint)
            return started.hear()
        finally:
            started.close()


@contextlib.contextmanager
def hearing_interrupts(interrupt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls ``interrupt``, where it would else raise KeyboardInterrupt in this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda _number, _frame: interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Run:
    """The processes of one run, as the command's process sees them."""

    def __init__(
        self,
        workload: Workload,
        on_record: Callable[[MeasuredRequest], None],
        on_progress: Callable[[DriveProgress], None] | None,
        stop: StopFlag | None,
    ) -> None:
        self._workload = workload
        self._on_record, self._on_progress, self._stop = on_record, on_progress, stop
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._interrupts = 0
        self._began_s: float | None = None
        self._stopped_s: float | None = None
        self._result = DriveResult(0.0, COMPLETE)
        self._ended = self._failed = 0
        self._was_sent = False

    def interrupt(self) -> None:
        self._interrupts += 1

    def start(self, plan: SharePlan, body: Callable[[WorkloadRequest], bytes], endpoint: LoadEndpoint) -> None:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=run_process, args=(plan, body, endpoint, theirs), name=f"load-{plan.process}", daemon=True
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child begins with it blocked
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        child = _Child(process, plan, ControlLine(ours), {request.number: request for request in plan.requests})
        self._children.append(child)
        self._selector.register(child.line, selectors.EVENT_READ, child)

    def hear(self) -> DriveResult:
        """Until each request has its record."""
        while self._selector.get_map():
            for key, _ in self._selector.select(LOOK_S):
                self._hear(key.data)
            if self._began_s is None and all(child.is_ready for child in self._children):
                self._begin()
            if self._interrupts or (self._stop is not None and self._stop.is_set()):
                self._end(INTERRUPTED, "the run was interrupted")
            if self._stopped_s is not None:
                is_over = self._interrupts > 1 or time.monotonic() - self._stopped_s > STOP_S
                for child in self._children:
                    if is_over and child.line.is_open:
                        child.process.kill()
            self._tell_progress()
        if self._result.ended == COMPLETE and not self._was_sent:
            self._result.ended, self._result.message = UNREACHED, "no request could be sent"
        return self._result

    def close(self) -> None:
        """No process is left."""
        self._selector.close()
        for child in self._children:
            child.line.close()
        for child in self._children:
            child.process.join(2.0)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.process.close()

    def _begin(self) -> None:
        self._began_s = time.monotonic() + BEGIN_AFTER_S
        self._result.began_unix_s = time.time() + BEGIN_AFTER_S
        for child in self._children:
            child.line.say(control.BEGIN, repr(self._began_s).encode())
            child.line.flush()

    def _end(self, ended: str, message: str) -> None:
        """Have all processes stop; the first reason counts."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
            self._result.ended, self._result.message = ended, message
            self._result.began_unix_s = self._result.began_unix_s or time.time()
            for child in self._children:
                child.line.say(control.STOP)
                child.line.flush()

    def _hear(self, child: _Child) -> None:
        for kind, text in child.line.heard():
            if kind == control.RECORD:
                self._tell(child, MeasuredRequest.from_json(text))
            elif kind == control.PROGRESS:
                child.sent = int(text)
            elif kind == control.UNSENT:
                child.unsent = int(text)
            elif kind == control.READY:
                child.is_ready = True
            elif kind == control.ENDED:
                child.has_ended = True
                self._result.processes.append(ProcessUse(**json.loads(text)))
            elif kind == control.FAILED:
                self._end(DRIVER_LOST, f"a sending process failed: {text.decode(errors='replace')}")
        if not child.line.is_open:
            self._selector.unregister(child.line)
            self._lost(child)

    def _lost(self, child: _Child) -> None:
        """The process is gone: what it did not tell was not sent, where it said so of as many, and else is lost."""
        if not child.has_ended:
            which = f"{child.plan.process} (pid {child.process.pid})"
            self._end(DRIVER_LOST, f"sending process {which} ended before its requests")
        is_unsent = child.has_ended and child.unsent == len(child.left)
        error, message = (NOT_SENT, STOPPED) if is_unsent else (DRIVER_LOST, "its sending process ended")
        now_s = 0.0 if self._began_s is None else max(0.0, time.monotonic() - self._began_s)
        for due_s, request in due_times(child.left.values(), child.plan.mode, now_s):
            record = child.plan.record(request, due_s)
            record.error, record.message = error, message
            self._tell(child, record)

    def _tell(self, child: _Child, record: MeasuredRequest) -> None:
        if child.left.pop(record.number, None) is None:
            return
        self._ended += 1
        self._failed += bool(record.error)
        self._was_sent = self._was_sent or record.sent_s is not None
        self._on_record(record)

    def _tell_progress(self) -> None:
        if self._on_progress is not None:
            elapsed_s = 0.0 if self._began_s is None else max(0.0, time.monotonic() - self._began_s)
            sent = sum(child.sent for child in self._children)
            planned, span_s = len(self._workload.requests), self._workload.span_s
            self._on_progress(DriveProgress(planned, sent, self._ended, self._failed, elapsed_s, span_s))
