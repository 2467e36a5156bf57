"""The agent of a worker process and the thread whose event loop it runs on. An engine's worker has no event loop of
its own. Its forward thread may wait for this loop only inside :meth:`Agent.progress`, 5 ms at most. Decides the order
of starting and stopping; must never know a request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kvxfer.agent import Agent
from kvxfer.errors import ClosedError, DeadlineExceededError

log = logging.getLogger("kvxfer.connectors")

START_S = 60.0
STOP_S = 5.0


class Runtime:
    """Runs ``agent`` from :meth:`start` to :meth:`stop`, and ``serve`` (a coroutine function) beside it."""

    def __init__(self, agent: Agent, serve: Callable[[], Awaitable[None]]) -> None:
        self.agent = agent
        self._serve = serve
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvxfer", daemon=True)

    def start(self) -> None:
        """Return once the agent is known to its peers. Raises what entering the agent raises."""
        self._thread.start()
        if not self._started.wait(START_S):
            raise DeadlineExceededError(f"the kvxfer agent did not start within {START_S:g} s")
        if self._failure is not None:
            raise self._failure

    def check(self) -> None:
        """Raise ClosedError if the agent has ended by itself, because a wait for it would never end."""
        if self._failure is not None:
            raise ClosedError(f"the kvxfer agent broke, and this engine with it: {self._failure!r}")

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call ``function`` on the loop, soon. From any thread. Does nothing once the agent has ended."""
        loop = self._loop
        if loop is None:
            raise ClosedError("the kvxfer agent is not started")
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("a call after the end: %s", function)

    def stop(self) -> None:
        """End the agent; waits at most STOP_S. May be called twice, and without a start."""
        if self._loop is None or self._stopping is None:
            return
        self.call(self._stopping.set)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if self._started.is_set():
                log.exception("the kvxfer agent broke")
            self._failure = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        async with self.agent:
            self._loop = asyncio.get_running_loop()
            serving = asyncio.ensure_future(self._serve())
            self._started.set()
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            has_broken = serving.done() and not self._stopping.is_set()
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            if serving.done() and not serving.cancelled() and serving.exception() is not None:
                raise serving.exception()  # type: ignore[misc]
            if has_broken:
                raise ClosedError("the agent closed by itself")


async def every(period_s: float) -> AsyncIterator[None]:
    """Yield now, and then every ``period_s``."""
    while True:
        yield
        await asyncio.sleep(period_s)
