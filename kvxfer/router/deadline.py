"""How long a request may take: until its answer begins, without progress after that, and as a whole where that is
asked.

Decides when a request is looked at; `policy.silence` decides when its time is up. It must never know workers or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvxfer.errors import DeadlineExceededError
from kvxfer.policy.silence import Progress
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.core import RouterCore

LOOKS = 10
"""Looks at the progress in the time that a silence may last: a chunk of a stream sets no timer."""


@contextlib.asynccontextmanager
async def time_limit(core: RouterCore, arrived_s: float, answer: ClientAnswer) -> AsyncIterator[None]:
    """Ends the block when the request's time is up: raises DeadlineExceededError, which names the option."""
    options, loop = core.options, asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    progress = Progress(arrived_s, limit_s=options.request_timeout_s, total_s=options.total_timeout_s)

    def look() -> None:
        nonlocal timer
        now_s = core.now()
        # An answer that has begun without a byte yet has begun all the same.
        due_s = progress.look(answer.progress + 1 if answer.is_begun else 0, now_s) - now_s
        if not clock.expired():
            clock.reschedule(loop.time() + due_s)
            timer = loop.call_later(options.request_timeout_s / LOOKS, look)

    try:
        async with asyncio.timeout(None) as clock:
            look()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()
    except TimeoutError:
        if not clock.expired():
            raise
        if progress.is_total(core.now()):
            raise DeadlineExceededError(f"total_timeout_s {options.total_timeout_s:g} passed") from None
        what = "without progress of the answer" if answer.is_begun else "before the answer began"
        raise DeadlineExceededError(f"request_timeout_s {options.request_timeout_s:g} passed {what}") from None
