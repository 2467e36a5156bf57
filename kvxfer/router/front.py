"""The door of the hot routes: which requests come in, and what is done when the request is over.

Decides admission (key, bounds), turns a request into an `Inbound`, and ends every request with one count and one log
line. It must never know how a request is served, nor where the workers come from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvxfer.errors import ClosedError, KvxferError
from kvxfer.openai.errors import error_body, status_for
from kvxfer.policy.admit import Admission, AdmitOptions, admit, refusal
from kvxfer.router import headers
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.apis import Api, api_of
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.dispatch import Dispatcher
from kvxfer.router.inbound import Inbound
from kvxfer.router.metrics import RequestOutcome
from kvxfer.router.record import RequestRecord
from kvxfer.serving.exchange import ClientExchange, ClientGoneError, ExchangeHandler

log = logging.getLogger("kvxfer.router")

SCAN_INLINE_BYTES = 256 << 10
"""Longer bodies are scanned in another thread, so that the event loop serves others meanwhile."""


class Door:
    """Counts the requests inside; ``drain`` lets no more in, and ends those that are left after a while."""

    def __init__(self, options: AdmitOptions) -> None:
        self._options = options
        self._idle = asyncio.Event()
        self._idle.set()
        self._inside: set[asyncio.Task[Any]] = set()
        self.inflight = 0
        self.is_draining = False
        self._show: Callable[[int], None] | None = None
        self._elsewhere: Callable[[], int] | None = None

    def share(self, show: Callable[[int], None], elsewhere: Callable[[], int]) -> None:
        """One bound for several processes: ``show`` is called with the count of this one, ``elsewhere`` gives that of
        the others."""
        self._show, self._elsewhere = show, elsewhere

    def check_open(self) -> None:
        """Raise OverloadedError where no request comes in any more, however few are inside."""
        if self.is_draining:
            raise refusal(Admission.DRAINING, self._options)

    def enter(self) -> None:
        """Count one more request, with its body. Raises OverloadedError unless it may come in."""
        inflight = self.inflight if self._elsewhere is None else self.inflight + self._elsewhere()
        verdict = admit(inflight, is_draining=self.is_draining, options=self._options)
        if verdict is not Admission.ADMITTED:
            raise refusal(verdict, self._options)
        self.inflight += 1
        if self._show is not None:
            self._show(self.inflight)
        task = asyncio.current_task()
        assert task is not None
        self._inside.add(task)
        self._idle.clear()

    def leave(self) -> None:
        self.inflight -= 1
        if self._show is not None:
            self._show(self.inflight)
        task = asyncio.current_task()
        assert task is not None
        self._inside.discard(task)
        if not self.inflight:
            self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Let no request in, wait up to ``grace_s`` for those inside, then end them."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("ending requests that outlived the shutdown grace", extra={"requests": self.inflight})
        self.end()
        await self._idle.wait()

    def end(self) -> None:
        """End all that is inside: each client is told."""
        self.is_draining = True
        for task in tuple(self._inside):
            task.cancel()


class Front:
    """Finds and runs the handler of a hot route."""

    def __init__(self, core: RouterCore, keys: ApiKeys, door: Door) -> None:
        self._core = core
        self._keys = keys
        self._door = door
        self._dispatcher = Dispatcher(core)
        self._handlers: dict[str, ExchangeHandler] = {}

    def find(self, method: str, path: str) -> ExchangeHandler | None:
        """The handler of ``POST`` to a route of an inference API; None for everything else."""
        if method != "POST":
            return None
        handler = self._handlers.get(path)
        if handler is None and (api := api_of(path)) is not None:
            handler = self._handlers[path] = self._handler(api)
        return handler

    def _handler(self, api: Api) -> ExchangeHandler:
        async def handle(exchange: ClientExchange) -> None:
            await self._serve(api, exchange)

        return handle

    async def _serve(self, api: Api, exchange: ClientExchange) -> None:
        core = self._core
        received = exchange.header(b"x-request-id")
        request_id = headers.request_id(None if received is None else received.decode("latin-1"))
        record = RequestRecord(api.path, request_id, core.now())
        answer = ClientAnswer(exchange, request_id, api.style)
        outcome = RequestOutcome.DISCONNECTED
        is_inside = False
        try:
            authorization = exchange.header(b"authorization")
            self._keys.check(None if authorization is None else authorization.decode("latin-1"))
            self._door.check_open()
            body = await exchange.read_body()
            self._door.enter()  # before the body is looked at
            is_inside = True
            record.prompt_bytes = len(body)
            inbound = await self._inbound(api, body, exchange, record)
            record.is_stream = inbound.stream
            outcome = await self._dispatcher.serve(inbound, answer, record)
        except ClientGoneError:
            pass
        except KvxferError as error:
            outcome = _outcome(error)
            record.code = error.code
            answer.fail(status_for(error), error_body(error))
        except asyncio.CancelledError:
            outcome = RequestOutcome.STOPPED
            closed = ClosedError("the router is stopping")
            record.code = closed.code
            await answer.give_up(status_for(closed), error_body(closed, retryable=True))
        except Exception as error:
            log.exception("request failed in the router")
            outcome = RequestOutcome.FAILED
            record.code = KvxferError.code
            answer.fail(status_for(error), error_body(error))
        finally:
            if is_inside:
                self._door.leave()
            record.finish(outcome, answer.status, answer.bytes_written, now_s=core.now(), metrics=core.metrics)

    async def _inbound(self, api: Api, body: bytes, exchange: ClientExchange, record: RequestRecord) -> Inbound:
        """Raises RequestError for a body that is no request."""
        leg_headers = headers.leg_header_pairs(
            exchange.headers,
            request_id=record.request_id,
            forwards_authorization=self._core.options.forward_authorization,
            passed=self._core.passed_headers,
        )

        def read() -> Inbound:
            return Inbound.read(
                api, body, leg_headers=leg_headers, request_id=record.request_id, arrived_s=record.arrived_s
            )

        return read() if len(body) <= SCAN_INLINE_BYTES else await asyncio.to_thread(read)


def _outcome(error: BaseException) -> RequestOutcome:
    status = status_for(error)
    if 400 <= status < 500:
        return RequestOutcome.CLIENT_ERROR
    return RequestOutcome.UNAVAILABLE if status == 503 else RequestOutcome.FAILED
