"""The ASGI end of a request: runs it beside the client's own connection, and ends it when either is over.

Three things can end a request: it is done, the client went away, the server stops. (HTTP servers also call it a
disconnect when the whole answer was sent: then the work is only being cleaned up, and is waited for.) It must never
know what the request is about. Nothing leaves here as an exception: the client gets a whole answer or a whole error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvxfer.errors import ClosedError
from kvxfer.openai.errors import error_body, status_for
from kvxfer.router.answer import Answer
from kvxfer.router.metrics import Outcome
from kvxfer.router.tasks import cancel_all, finish

log = logging.getLogger("kvxfer.router")

Work = Callable[[Answer], Awaitable[Outcome]]


class Relay(Response):
    """A response whose bytes come from ``work``; ``ended`` is told how it went, exactly once."""

    def __init__(self, work: Work, *, stop: asyncio.Event, ended: Callable[[Outcome], None]) -> None:
        super().__init__()
        self._work = work
        self._stop = stop
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send)
        outcome = Outcome.DISCONNECTED
        work = asyncio.create_task(self._guarded(answer))
        left = asyncio.create_task(_wait_disconnect(receive))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, left, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if answer.is_ended:
                await asyncio.wait({work})
            if work.done():
                outcome = work.result()
            elif not left.done():
                await finish(cancel_all({work}))
                outcome = Outcome.STOPPED
                await _say_stopping(answer)
        finally:
            try:
                await finish(cancel_all({work, left, stopped}))
            finally:
                self._ended(outcome)

    async def _guarded(self, answer: Answer) -> Outcome:
        try:
            return await self._work(answer)
        except Exception as error:
            log.exception("request failed in the router")
            await answer.fail(status_for(error), error_body(error))
            return Outcome.FAILED


async def _say_stopping(answer: Answer) -> None:
    error = ClosedError("the router is stopping")
    await answer.give_up(status_for(error), error_body(error, retryable=True))


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
