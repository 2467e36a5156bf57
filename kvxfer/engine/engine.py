"""The engine: a thread that computes, and the calls that reach it from the event loop.

It decides how requests go in and events come out between the two, and how the thread ends. It must never know what a
step does (that is the executor's) nor of HTTP; nothing that takes long runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from kvxfer.engine.executor import Executor
from kvxfer.engine.generation import Generation
from kvxfer.engine.remote import AgentLike, BlockExchange
from kvxfer.engine.request import Event, Leg, Request, Sequence
from kvxfer.errors import ClosedError, KvxferError, TransferCancelledError

_log = logging.getLogger(__name__)

T = TypeVar("T")

PULSE_S = 1.0
"""How often an engine gives a heartbeat that waits for bodies to be read, or for blocks for what was accepted."""
DRAIN_S = 5.0
"""How long a stopping engine waits for its pulls to drain."""


class Engine:
    """Continuous batching over one model and one pool, on a thread of its own.

    Methods are called on the loop that called :meth:`start`, which owns the agent too. Without an ``agent`` only LOCAL
    requests are taken.
    """

    def __init__(self, executor: Executor, *, agent: AgentLike | None = None, agent_pool: Any = None) -> None:
        self.executor = executor
        self.failure: BaseException | None = None
        """Why the engine thread died, if it did."""
        self.failed = asyncio.Event()
        self._agent = agent
        self._agent_pool = agent_pool
        self._exchange: BlockExchange | None = None
        self._arrived = self._read = self._round = 0
        """Bodies that reached this worker and that were read, and how many had when the queue was taken in last."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvxfer-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stepped = asyncio.Event()
        self._is_accepting = False

    def __repr__(self) -> str:
        return f"<Engine {self.executor.model.name!r} {self.executor.scheduler!r}>"

    @property
    def is_accepting(self) -> bool:
        """Whether :meth:`submit` takes requests."""
        return self._is_accepting and self.failure is None

    def start(self) -> None:
        """Start the engine thread."""
        self._loop = asyncio.get_running_loop()
        if self._agent is not None:
            self._exchange = BlockExchange(self._agent, self._agent_pool, self._loop, self._inbox.put)
            self.executor.join(self._exchange)
        self._is_accepting = True
        self._thread.start()

    def submit(self, request: Request) -> Generation:
        """Take a request in. Raises ClosedError when stopping; every other error comes out of the generation."""
        if not self.is_accepting:
            raise ClosedError(
                "this worker is shutting down" if self.failure is None else "this worker's engine has failed"
            )
        sequence = Sequence(request, submitted_s=time.monotonic())
        generation = Generation(sequence, self._abort_soon)
        self._inbox.put(self._intake_of(sequence, generation))
        return generation

    def _intake_of(self, sequence: Sequence, generation: Generation) -> Callable[[], None]:
        """What the engine thread does with a new request. Its reader, which may be early, is told at once that it is
        here."""
        remote = sequence.request.remote
        if self._exchange is not None and remote is not None and sequence.request.leg is Leg.PREFILL:
            try:
                self._exchange.expect(remote)
            except KvxferError as error:
                return functools.partial(self.executor.refuse, sequence, error, generation)
        return functools.partial(self.executor.add, sequence, generation)

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, let the running finish for ``grace_s``, abort the rest, and end the thread."""
        self._is_accepting = False
        await self._wait_empty(grace_s)
        self._inbox.put(functools.partial(self.executor.abort_all, ClosedError("this worker is shutting down")))
        await self._wait_empty(DRAIN_S)
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, DRAIN_S)
        await asyncio.sleep(0)

    async def ask(self, question: Callable[[], T]) -> T:
        """What ``question`` returns, called on the engine thread between two steps. Raises ClosedError once that
        ended."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(value: T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(cast("T", value))

        def run() -> None:
            try:
                value = question()
            except Exception as error:
                loop.call_soon_threadsafe(tell, None, error)
            else:
                loop.call_soon_threadsafe(tell, value, None)

        self._inbox.put(run)
        while not answer.done():
            await asyncio.wait({answer}, timeout=PULSE_S)
            if not answer.done() and not self._thread.is_alive():
                raise ClosedError("this worker's engine has ended")
        return answer.result()

    def call(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the engine thread, between two steps. From any thread."""
        self._inbox.put(command)

    def _abort_soon(self, sequence: Sequence) -> None:
        error = TransferCancelledError("the client went away")
        self._inbox.put(functools.partial(self.executor.abort, sequence, error))

    async def _wait_empty(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and not (self._inbox.empty() and self.executor.scheduler.is_empty):
            self._stepped.clear()
            try:
                await asyncio.wait_for(self._stepped.wait(), end_s - time.monotonic())
            except TimeoutError:
                return

    def _run(self) -> None:
        try:
            has_work = False
            while self._take_commands(has_work):
                self._pulse(has_work=True)
                has_work = self.executor.step()
                self._deliver()
                if not self._is_accepting:
                    self._on_loop(self._stepped.set)
        except BaseException as error:
            _log.exception("the engine thread failed")
            self.failure = error
            self.executor.fail_owners(KvxferError(f"the engine failed: {error!r}"))
            self._on_loop(self.failed.set)
        self._deliver()
        self._on_loop(self._stepped.set)

    def _take_commands(self, has_work: bool) -> bool:
        """Run what came in, waiting for it when there is nothing to compute; False at the end."""
        if not has_work and self._inbox.empty():
            self._pulse(has_work=self.executor.scheduler.has_waiting)
        while True:
            try:
                command = self._inbox.get(block=not has_work, timeout=None if has_work else self._wait_s())
            except queue.Empty:
                self._deliver()
                return True
            if command is None:
                return False
            command()
            has_work = True

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """A body has reached this worker, and is read until it is submitted or refused: as long as that takes, no
        reader is told that a prompt is unknown here."""
        self._arrived += 1
        self._inbox.put(lambda: None)  # an idle engine said that it has nothing to do
        try:
            yield
        finally:
            self._read += 1

    def _pulse(self, *, has_work: bool) -> None:
        if self._exchange is None:
            return
        took_in = self._read >= self._round  # bodies are read one after another, in the order in which they came
        if took_in:
            self._round = self._arrived
        self._exchange.pulse(has_work=has_work or self._arrived != self._read, took_in=took_in)

    def _wait_s(self) -> float | None:
        wait_s = self.executor.wait_s()
        owes_pulses = self._arrived != self._read or self.executor.scheduler.has_waiting
        return min(PULSE_S, PULSE_S if wait_s is None else wait_s) if owes_pulses else wait_s

    def _deliver(self) -> None:
        events = self.executor.take_events()
        if events:
            self._on_loop(functools.partial(_put, events))

    def _on_loop(self, call: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)


def _put(events: list[tuple[Generation, Event]]) -> None:
    for generation, event in events:
        generation.put(event)
