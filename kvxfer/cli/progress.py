"""Whether a starting process still makes progress: on a busy machine a start takes as long as it takes, and a process
that hangs does nothing. Decides when to give up; must never know what the process is.

The process shows that it is alive by bytes that it writes, and by processor time of its whole session, which has the
processes that it started too.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

POLL_S = 0.25
LEAST_SHARE = 1 / 60
"""A process that takes more of one processor than this works. One that only waits wakes up now and then, and takes
less."""
LONGEST = 10
"""A process that works and does not become ready is given up after so many times ``timeout_s``."""

T = TypeVar("T")


class StartProgress:
    """The start of one process. All times are seconds of one clock."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        """``timeout_s``: how long nothing may happen."""
        self._timeout_s = timeout_s
        self._began_s = self._alive_s = now_s
        self._bytes = 0
        self._processor_s = 0.0

    def see(self, written_bytes: int, processor_s: float, now_s: float) -> str | None:
        """Why the start is to be given up; ``None``: it goes on. ``written_bytes`` and ``processor_s``: of the process,
        since it began."""
        taken_s = processor_s - self._processor_s
        if written_bytes != self._bytes or taken_s > max(0.0, LEAST_SHARE * (now_s - self._alive_s)):
            self._bytes, self._processor_s, self._alive_s = written_bytes, max(processor_s, self._processor_s), now_s
        if now_s - self._alive_s >= self._timeout_s:
            return f"it did nothing for {self._timeout_s:g} s"
        if now_s - self._began_s >= LONGEST * self._timeout_s:
            return f"it was busy for {LONGEST * self._timeout_s:g} s"
        return None


def session_processor_s(session: int) -> float:
    """Processor time, in seconds, of the running processes of a session, and of ended children that they waited for; 0
    if the system has no ``/proc``."""
    ticks = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


async def wait_while_it_gets_on(
    ready: Awaitable[T], *, session: int, written_bytes: Callable[[], int], timeout_s: float
) -> T:
    """The result of ``ready``. Raises TimeoutError, with the reason in words, once the processes of ``session`` (the
    id of the process that leads it) do nothing for ``timeout_s``, or are busy for LONGEST times as long."""
    task = asyncio.ensure_future(ready)
    loop = asyncio.get_running_loop()
    progress = StartProgress(timeout_s, loop.time())
    try:
        while True:
            await asyncio.wait({task}, timeout=min(POLL_S, timeout_s))
            if task.done():
                return task.result()
            why = progress.see(written_bytes(), session_processor_s(session), loop.time())
            if why is not None:
                raise TimeoutError(why)
    finally:
        task.cancel()
