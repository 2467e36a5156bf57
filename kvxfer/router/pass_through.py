"""Requests for paths that the router does not know: passed to one worker of a pool as they are, and its answer back.

Decides which worker, and whether to try again: only while the client got nothing, and where the method may be repeated
or the worker cannot have the request. It must never look into a body.
"""

from __future__ import annotations

import dataclasses
import logging
import random

from kvxfer.errors import DeadlineExceededError, NoWorkerError
from kvxfer.openai.errors import RequestError, error_body, status_for
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.candidates import Candidate, is_placeable
from kvxfer.policy.scores import LEAST_LOADED
from kvxfer.router import failure, headers
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.core import RouterCore
from kvxfer.router.deadline import time_limit
from kvxfer.router.failure import Failure
from kvxfer.router.fleet.entry import WorkerClaim
from kvxfer.router.fleet.patience import patience
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.interrupts import InterruptedWithReason, Interrupts
from kvxfer.router.legs import UNPROCESSED_MAX
from kvxfer.router.metrics import RequestOutcome
from kvxfer.router.pass_rules import PassRule, is_read_alike, read_rules
from kvxfer.router.record import RequestRecord
from kvxfer.router.upstream import UpstreamError, UpstreamPhase, UpstreamResponse, UpstreamUnprocessedError
from kvxfer.serving.exchange import ClientExchange, Headers
from kvxfer.types import AgentRef

log = logging.getLogger("kvxfer.router")

IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
"""Methods that may be repeated (RFC 9110, section 9.2.2)."""
REFUSED_METHODS = frozenset({"CONNECT", "TRACE"})
_UNSENT = (UpstreamPhase.QUEUE, UpstreamPhase.CONNECT)
_WHAT = "chosen"


class PassedFailed(Exception):
    """Leaves a try of which the client got nothing. It never leaves this file."""

    def __init__(self, failed: Failure, *, is_repeatable: bool) -> None:
        super().__init__(failed.code)
        self.failure = failed
        self.is_repeatable = is_repeatable


@dataclasses.dataclass(frozen=True)
class _Passed:
    """One request, whole."""

    rule: PassRule
    exchange: ClientExchange
    body: bytes
    headers: Headers
    answer: ClientAnswer
    record: RequestRecord
    ref: AgentRef | None


class PassThrough:
    """Belongs to one event loop."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._rules = read_rules(core.options.pass_through)

    def rule_of(self, path: str) -> PassRule | None:
        """The rule for a path, which is percent-decoded; None for a path that does not pass through."""
        return next((rule for rule in self._rules if rule.matches(path)), None)

    async def serve(
        self,
        rule: PassRule,
        exchange: ClientExchange,
        body: bytes,
        answer: ClientAnswer,
        record: RequestRecord,
        ref: AgentRef | None = None,
    ) -> RequestOutcome:
        """Answer one request; at ``ref`` and no other worker, if it is given. Raises RequestError for one that is not
        passed on, and NoWorkerError."""
        _check(exchange)
        options = self._core.options
        passed_headers = headers.passed_header_pairs(
            exchange.headers,
            request_id=record.request_id,
            forwards_authorization=options.forward_authorization,
            passed=self._core.passed_headers,
            trace=record.traceparent,
            credentials=self._core.worker_key.headers,
        )
        record.trace_id = headers.trace_id_in(passed_headers)
        passed = _Passed(rule, exchange, body, passed_headers, answer, record, ref)
        interrupts: Interrupts[bool] = Interrupts()
        answer.on_client_gone(lambda: interrupts.interrupt(True))
        try:
            async with time_limit(self._core, record.arrived_s, answer):
                return await interrupts.run(self._try(passed))
        except InterruptedWithReason:
            return RequestOutcome.DISCONNECTED
        except DeadlineExceededError as error:
            record.code = error.code
            if answer.is_started:
                exchange.abort()
            else:
                await answer.give_up(status_for(error), error_body(error))
            return RequestOutcome.TIMED_OUT
        finally:
            answer.on_client_gone(None)
            answer.unthrottle()

    async def _try(self, passed: _Passed) -> RequestOutcome:
        core, record, failed = self._core, passed.record, set[str]()
        core.retries.earn()
        chosen = self._choose(passed, failed)
        if chosen is None:
            raise NoWorkerError(f"no worker of {passed.rule.pool!a} takes requests now")
        while True:
            record.attempts += 1
            try:
                return await self._pass(passed, core.workers.worker(chosen.member.ref), _part_of(chosen))
            except PassedFailed as error:
                last = error
            failed.add(chosen.agent_id)
            chosen = self._choose(passed, failed)
            if not last.is_repeatable or chosen is None or record.attempts >= core.options.attempts_max:
                break
            if not core.retries.take(core.now()):
                core.metrics.retry_refused()
                break
            core.metrics.retried(last.failure.kind.value)
        record.code = last.failure.code
        passed.answer.fail(last.failure.status, last.failure.body)
        is_busy = last.failure.status == failure.UNAVAILABLE
        return RequestOutcome.UNAVAILABLE if is_busy else RequestOutcome.FAILED

    def _choose(self, passed: _Passed, failed: set[str]) -> Candidate | None:
        """The worker of the pool that has the least to do, without those of ``failed``. One that is asked for by name
        is taken also while it gets no new work."""
        known, rule = self._core.workers.candidates(), passed.rule
        if passed.ref is not None:
            return next((one for one in known if one.member.ref == passed.ref and one.agent_id not in failed), None)
        usable = [one for one in known if _is_in(one, rule.pool) and one.agent_id not in failed and is_placeable(one)]
        costs = LEAST_LOADED.decode
        return min(usable, key=lambda one: (one.is_last_choice, costs(one), random.random()), default=None)

    async def _pass(self, passed: _Passed, worker: Worker, part: Part) -> RequestOutcome:
        """Raises PassedFailed while the client got nothing."""
        with self._core.workers.claim(worker.ref, part, passed.record.own_id) as claim:
            try:
                response = await self._ask(passed, worker, claim)
            except UpstreamError as error:
                is_unsent = error.phase in _UNSENT or isinstance(error, UpstreamUnprocessedError)
                is_repeatable = is_unsent or passed.exchange.method in IDEMPOTENT
                raise PassedFailed(
                    self._failed(passed.record, claim, part, error), is_repeatable=is_repeatable
                ) from None
            async with response:
                if not 200 <= response.status < 600:
                    no_status = failure.malformed(_WHAT, f"status {response.status}")
                    claim.failed(no_status.kind.value)
                    raise PassedFailed(no_status, is_repeatable=passed.exchange.method in IDEMPOTENT)
                if response.status < failure.INTERNAL:
                    claim.succeeded()
                return await self._pipe(passed, response, worker, claim, part)

    async def _ask(self, passed: _Passed, worker: Worker, claim: WorkerClaim) -> UpstreamResponse:
        exchange = passed.exchange
        target = exchange.raw_target.decode("latin-1")
        rank = () if worker.dp_rank is None else ((headers.DATA_PARALLEL_RANK.encode(), b"%d" % worker.dp_rank),)
        body = [passed.body] if passed.body else []
        shown = (*passed.headers, *rank, *self._core.leg_headers(worker))
        pool, deadlines = self._core.workers.pool(worker.ref), self._core.decode_deadlines
        waits = patience(self._core.workers, claim, self._core.options.token_timeout_s)
        for is_last in (*(False for _ in range(UNPROCESSED_MAX - 1)), True):
            try:
                return await pool.request(exchange.method, target, shown, body, deadlines, patience=waits)
            except UpstreamUnprocessedError:
                if is_last:
                    raise
        raise AssertionError("unreachable")

    async def _pipe(
        self, passed: _Passed, response: UpstreamResponse, worker: Worker, claim: WorkerClaim, part: Part
    ) -> RequestOutcome:
        answer, record = passed.answer, passed.record
        more = (headers.ATTEMPT_BYTES, b"%d" % record.attempts)
        answer.start(response.status, [*headers.answered_header_pairs(response.headers), more])
        record.first_byte_s = self._core.now()

        def write(piece: bytes) -> None:
            answer.bytes_written += len(piece)
            answer.write(piece)

        answer.throttle(response.pause, response.resume)
        try:
            await response.pipe(write)
        except UpstreamError as error:
            record.code = self._failed(record, claim, part, error).code
            passed.exchange.abort()  # nothing else says that bytes of an unknown kind are not whole
            return RequestOutcome.BROKEN_STREAM
        answer.end()
        if response.status >= failure.INTERNAL:
            return RequestOutcome.UNAVAILABLE if response.status == failure.UNAVAILABLE else RequestOutcome.FAILED
        return RequestOutcome.CLIENT_ERROR if response.status >= 400 else RequestOutcome.OK

    def _failed(self, record: RequestRecord, claim: WorkerClaim, part: Part, error: UpstreamError) -> Failure:
        failed = failure.from_upstream(_WHAT, error)
        self._core.metrics.leg_failed(part.value, failed.kind.value)
        claim.failed(failed.kind.value)
        what = {"request_id": record.request_id, "agent_id": claim.ref.agent_id, "kind": failed.kind.value}
        log.warning("a request that passed through failed", extra=what)
        return failed


def _check(exchange: ClientExchange) -> None:
    """Raise RequestError for a request that is not passed on: an engine may take its path for another one."""
    if exchange.method in REFUSED_METHODS:
        raise RequestError(f"{exchange.method} does not pass through", status=405)
    if not is_read_alike(exchange.raw_target.partition(b"?")[0], exchange.path):
        raise RequestError(
            "a path that passes through has no segments . and .., no empty ones and no encoded slash, and is of text "
            "without control characters and without % # ? \\"
        )


def _is_in(candidate: Candidate, pool: str) -> bool:
    role = candidate.member.info.role
    if pool == "engine":
        return candidate.is_alone
    if pool == "prefill":
        return role.can_prefill and not candidate.is_alone
    if pool == "decode":
        return role.can_decode and not candidate.is_alone
    return candidate.serves(pool)


def _part_of(candidate: Candidate) -> Part:
    return Part.DECODE if candidate.member.info.role.can_decode else Part.PREFILL
