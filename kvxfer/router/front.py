"""The door of the hot routes: which requests come in, and what is done when the request is over.

Decides admission (key, bounds), turns a request into an `Inbound`, and ends every request with one count and one log
line. It must never know how a request is served, nor where the workers come from.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from kvxfer.errors import ClosedError, KvxferError
from kvxfer.openai.errors import RequestError, error_body, status_for
from kvxfer.policy.admit import Admission, AdmitOptions, admit, refusal
from kvxfer.router import headers
from kvxfer.router.account import RequestAccount
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.apis import Api, StreamStyle, api_of
from kvxfer.router.apis.openai_style import OPENAI
from kvxfer.router.apis.responses_style import RESPONSES
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.cors import PREFLIGHT, Cors
from kvxfer.router.dispatch import Dispatcher
from kvxfer.router.inbound import Inbound
from kvxfer.router.keyed import UNKEYED, KeyedRequest, RateLimitedError
from kvxfer.router.metrics import RequestOutcome
from kvxfer.router.pass_rules import PassRule
from kvxfer.router.pass_through import PassThrough
from kvxfer.router.record import RequestRecord
from kvxfer.router.responses import METHODS, PATH, RULE, ResponseSeen, is_stored, keeper_of
from kvxfer.router.tracing import RequestTrace
from kvxfer.serving.exchange import ClientExchange, ClientGoneError, ExchangeHandler

log = logging.getLogger("kvxfer.router")

Work = Callable[[KeyedRequest, bytes, ClientAnswer, RequestRecord], Awaitable[RequestOutcome]]
"""What is done with a request that came in: whose it is, its body, its answer, its record."""

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

    @property
    def inflight_everywhere(self) -> int:
        """Of all processes that share the bound."""
        return self.inflight if self._elsewhere is None else self.inflight + self._elsewhere()

    def check_open(self) -> None:
        """Raise OverloadedError where no request comes in any more, however few are inside."""
        if self.is_draining:
            raise refusal(Admission.DRAINING, self._options)

    def enter(self) -> None:
        """Count one more request, with its body. Raises OverloadedError unless it may come in."""
        verdict = admit(self.inflight_everywhere, is_draining=self.is_draining, options=self._options)
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
    """Finds and runs the handler of a hot route, or of a path that passes through."""

    def __init__(self, core: RouterCore, keys: ApiKeys, door: Door, cors: Cors | None = None) -> None:
        self._core = core
        self._cors = cors
        self._keys = keys
        self._door = door
        self._dispatcher = Dispatcher(core)
        self._pass_through = PassThrough(core)
        self._handlers: dict[str, ExchangeHandler] = {}

    def find(self, method: str, path: str) -> ExchangeHandler | None:
        """The handler of ``POST`` to a route of an inference API, or of any method to a path that passes through; None
        for everything else."""
        if method == "POST":
            handler = self._handlers.get(path)
            if handler is not None:
                return handler
            api = api_of(path)
            if api is not None:
                handler = self._handlers[path] = self._handler(api)
                return handler
        asked = PATH.fullmatch(path)
        if asked is not None and method in METHODS[asked[2] or ""]:
            return self._of_response(asked[1])
        rule = self._pass_through.rule_of(path)
        return None if rule is None else self._passing(rule)

    def _of_response(self, response_id: str) -> ExchangeHandler:
        async def handle(exchange: ClientExchange) -> None:
            async def pass_on(
                keyed: KeyedRequest, body: bytes, answer: ClientAnswer, record: RequestRecord
            ) -> RequestOutcome:
                core = self._core
                ref = keeper_of(response_id, record.owner, core.responses, core.workers)
                worker, allowed = core.workers.worker(ref), keyed.models
                served = (worker.member.info.model, *worker.aliases)
                usable = (name for name in served if allowed is None or name in allowed)
                keyed.admit_unread(len(body), next(usable, served[0]))
                return await self._pass_through.serve(RULE, exchange, body, answer, record, ref)

            await self._serve(RULE.prefix, RESPONSES, exchange, pass_on)

        return handle

    def _handler(self, api: Api) -> ExchangeHandler:
        async def handle(exchange: ClientExchange) -> None:
            async def dispatch(
                keyed: KeyedRequest, body: bytes, answer: ClientAnswer, record: RequestRecord
            ) -> RequestOutcome:
                inbound = await self._inbound(api, body, exchange, record)
                record.looked_at(inbound)
                if is_stored(inbound):
                    record.response = ResponseSeen(self._core.responses, record.owner)
                inbound = keyed.admit(inbound, self._core.workers.models())
                return await self._dispatcher.serve(inbound, answer, record)

            await self._serve(api.path, api.style, exchange, dispatch)

        return handle

    def _passing(self, rule: PassRule) -> ExchangeHandler:
        async def handle(exchange: ClientExchange) -> None:
            if exchange.method == "OPTIONS" and self._cors is not None:
                origin, method, wanted = map(exchange.header, PREFLIGHT)
                told = self._cors.preflight_headers(origin, method, wanted)
                if told is not None:  # a page cannot put a key into it
                    exchange.respond(204, told, b"")
                    return

            async def pass_on(
                keyed: KeyedRequest, body: bytes, answer: ClientAnswer, record: RequestRecord
            ) -> RequestOutcome:
                keyed.admit_unread(len(body), rule.model)
                return await self._pass_through.serve(rule, exchange, body, answer, record)

            await self._serve(rule.prefix, OPENAI, exchange, pass_on)

        return handle

    async def _serve(self, route: str, style: StreamStyle, exchange: ClientExchange, work: Work) -> None:
        core = self._core
        received = exchange.header(b"x-request-id")
        request_id = headers.request_id(None if received is None else received.decode("latin-1"))
        record = RequestRecord(route, request_id, core.now())
        cors = () if self._cors is None else self._cors.answer_headers(exchange.header(b"origin"))
        answer = ClientAnswer(exchange, request_id, style, common=cors)
        outcome = RequestOutcome.DISCONNECTED
        is_inside = False
        keyed = UNKEYED
        try:
            keyed = self._keys.enter_shown(exchange.headers)
            record.owner = keyed.owner
            record.names_workers = keyed.models is None
            if keyed.name:
                record.key_name, record.usage = keyed.name, keyed.usage
                core.metrics.key_began(keyed.name)
            self._door.check_open()
            self._begin_trace(exchange, record)
            if headers.ASKS_FOR_ACCOUNT in exchange.headers and core.options.accounts:
                answer.account = record.account = self._account(record)
            body = await exchange.read_body()
            self._door.enter()  # before the body is looked at
            is_inside = True
            record.prompt_bytes = len(body)
            outcome = await work(keyed, body, answer, record)
        except ClientGoneError:
            pass
        except KvxferError as error:
            outcome = _outcome(error)
            record.code = error.error_code if isinstance(error, RequestError) else error.code
            if isinstance(error, RateLimitedError):
                record.key_name = error.key_name
                answer.retry_after_s = error.retry_after_s
                core.metrics.key_limited(error.key_name, error.limit.value)
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
            tokens = keyed.end(record, status=answer.status, answer_bytes=answer.bytes_written)
            if keyed.name:
                core.metrics.key_ended(keyed.name, outcome, tokens)
            record.finish(
                outcome,
                answer.status,
                answer.bytes_written,
                now_s=core.now(),
                metrics=core.metrics,
                history=core.history,
                tracer=core.tracer,
            )

    def _begin_trace(self, exchange: ClientExchange, record: RequestRecord) -> None:
        tracer = self._core.tracer
        if tracer is None:
            return
        begun = tracer.begin(exchange.header(b"traceparent"), record.arrived_s)
        record.trace_id = begun.trace_id
        if begun.is_sampled:
            record.trace = begun
            record.traceparent = begun.traceparent()
        else:
            record.traceparent = begun.traceparent(begun.parent_id)

    def _account(self, record: RequestRecord) -> RequestAccount:
        if record.trace is None:
            record.trace = RequestTrace.for_account(record.arrived_s)
        return RequestAccount(record, record.trace, self._core.now)

    async def _inbound(self, api: Api, body: bytes, exchange: ClientExchange, record: RequestRecord) -> Inbound:
        """Raises RequestError for a body that is no request."""
        leg_headers = headers.leg_header_pairs(
            exchange.headers,
            request_id=record.request_id,
            forwards_authorization=self._core.options.forward_authorization,
            passed=self._core.passed_headers,
            trace=record.traceparent,
            credentials=self._core.worker_key.headers,
        )
        record.trace_id = headers.trace_id_in(leg_headers)

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
