"""A timeout for the silence of peers that does not count the time in which this process itself did not run.

A process that was stopped, or got no processor, finds its peers' answers waiting when it runs again. It has to read
them before it may say that a peer was silent. Decides nothing else; must never know who is waited for, or why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

TURNS = 8
"""A timeout is so many timers in sequence. A timer that comes late counts as one that came in time."""


@contextlib.asynccontextmanager
async def timeout_while_running(seconds: float) -> AsyncIterator[None]:
    """As ``asyncio.timeout``, of ``seconds`` in which this event loop runs; at least so long by the clock. Raises
    TimeoutError.

    After a pause the loop has an eighth of the time to read what has come. On a loop that is late all the time the wait
    is longer, and ends after nine timers.
    """
    loop = asyncio.get_running_loop()
    turn_s = seconds / TURNS
    timer: asyncio.TimerHandle | None = None

    def arm(turns: int) -> None:
        nonlocal timer
        due_s = loop.time() + turn_s
        timer = loop.call_at(due_s, end_turn, turns, due_s)

    def end_turn(turns: int, due_s: float) -> None:
        is_late = loop.time() - due_s > turn_s
        if turns > 1 or (turns == 1 and is_late):
            arm(turns - 1)
        else:
            timeout.reschedule(loop.time())

    async with asyncio.timeout(None) as timeout:
        arm(TURNS)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
