"""One attempt at a request: one pair of workers, one transfer id, and the legs in the order that the dialect says.

Decides when the attempt is over:

- a 4xx of either leg is the client's own and ends it, and one that only says that the worker is too small lets the
  dispatcher try a larger one;
- D failing before anything was sent to the client ends it; the dispatcher may try again;
- P failing ends it where D cannot do without P. Where D notices by itself and computes the prompt (kvxfer's agents do),
  P's failure is recorded and left to D; only a P that never had the request, or refused it, ends the attempt even then,
  because it granted nothing and D would wait in vain;
- D failing in the middle of a stream ends the stream with one well-formed error event.

It must never choose workers. When :meth:`Attempt.run` returns or is cancelled, both legs are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

from kvxfer.openai.sse import CONTENT_TYPE, Event
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.chooser import Choice
from kvxfer.policy.place import Placement
from kvxfer.router import failure
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.core import RouterCore
from kvxfer.router.dialects import Handover, HandoverError, Leg, Order, Pair, Prefilled, dialect
from kvxfer.router.failure import Failure, FailureKind, LegFailed
from kvxfer.router.fleet.entry import WorkerClaim
from kvxfer.router.fleet.patience import patience
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.held import HeldPrefill
from kvxfer.router.inbound import Inbound
from kvxfer.router.interrupts import ClientLeft, InterruptedWithReason, Interrupts
from kvxfer.router.legs import calling, forgo, is_array, is_object, kind_of, log_failed, read
from kvxfer.router.merge import MARKS, Merger
from kvxfer.router.metrics import RequestOutcome
from kvxfer.router.record import RequestRecord
from kvxfer.router.stream_relay import StreamRelay
from kvxfer.router.tasks import cancel_all, finish
from kvxfer.router.tracing import AttemptTrace
from kvxfer.types import TransferId

PREFILL_ANSWER_WAIT_S = 0.5
"""How long the end of an answer waits for P's own words, once: they were sent before D could have the last block."""
LOST_PREFILLER_WAIT_S = 0.1
"""How long an error of D's waits for that of a P that is gone."""
OUTLIVES_S = 4.0
"""A dead worker is noticed within 3 s; one that is there after this has only hung up."""


class Attempt:
    """``avoided`` and ``excluded`` name the agents that the next attempt should take last, or not at all; ``too_small``
    those that cannot hold their part of the request. ``failed_part`` is the part whose failure :meth:`run` returned.
    ``handover`` is what a finished prefill gave, for another decode worker."""

    def __init__(
        self,
        core: RouterCore,
        inbound: Inbound,
        answer: ClientAnswer,
        placement: Placement,
        record: RequestRecord,
        *,
        timeout_s: float,
        choice: Choice,
        handover: Handover | None = None,
    ) -> None:
        self._core = core
        self._inbound = inbound
        self._answer = answer
        self._placement = placement
        self._choice = choice
        self._record = record
        self._number = record.attempts
        self._decode = core.workers.worker(placement.decode.ref)
        self._prefill = None if placement.prefill is None else core.workers.worker(placement.prefill.ref)
        self._dialect = dialect(self._decode.dialect)
        self._pair = Pair(
            prefill=self._prefill,
            decode=self._decode,
            transfer_id=TransferId(secrets.token_bytes(16)),
            attempt=record.attempts,
            room=secrets.randbits(63),
            timeout_s=timeout_s,
        )
        self._for_prefill = self._for_decode = inbound
        """The request as each leg carries it: in a trace, each names a span of its own."""
        self._trace: AttemptTrace | None = None
        if record.trace is not None:
            reason = placement.reason.value
            self._trace = trace = record.trace.attempt(self._pair, self._dialect.name, reason, core.now())
            trace.was_handed_over = handover is not None
            if record.trace.is_sampled:
                self._for_prefill = inbound.traced(record.trace.traceparent(trace.prefill_id))
                self._for_decode = inbound.traced(record.trace.traceparent(trace.decode_id))
        self.handover = handover
        self._claims: dict[Part, WorkerClaim] = {}
        self._held = HeldPrefill(core.workers, None if self._prefill is None else self._prefill.ref)
        self._was_handed_over = handover is not None
        self._is_decode_reached = False
        self._decode_has_failed = False
        self._prefill_task: asyncio.Task[Prefilled | Failure] | None = None
        self._prefill_end: Prefilled | Failure | None = None
        self._is_prefill_heard = False
        self._interrupts: Interrupts[Failure | ClientLeft] = Interrupts()
        self._timer: asyncio.TimerHandle | None = None
        self._relay: StreamRelay | None = None
        self._unwatch: list[Callable[[], None]] = []
        self._merger = Merger(self._decode.dialect, has_source=self._prefill is not None)
        self.avoided: set[str] = set()
        self.excluded: set[str] = set()
        self.too_small: set[tuple[Part, str]] = set()
        self.failed_part = Part.DECODE

    async def run(self) -> RequestOutcome | Failure:
        """To the client's last byte, or to a Failure before its first."""
        self._claim(Part.DECODE, self._decode)
        interrupts = self._interrupts
        self._watch(self._decode, lambda: interrupts.interrupt(failure.gone(Part.DECODE)))
        self._answer.on_client_gone(lambda: interrupts.interrupt(ClientLeft()))
        try:
            return await interrupts.run(self._run_legs())
        except LegFailed as failed:
            return self._failed(failed.failure)
        except InterruptedWithReason:
            reason = interrupts.reason
            if isinstance(reason, Failure):
                return self._failed(reason)
            return RequestOutcome.DISCONNECTED
        finally:
            self._answer.count_relayed()
            if self._prefill is not None and self._merger.account:
                self._core.history.transferred(self._prefill.agent_id, self._decode.agent_id, self._merger.account)
            self._choice.over(self._core.now())
            self._answer.on_client_gone(None)
            self._answer.unthrottle()
            self._release(Part.DECODE)
            self._held.end()
            if self._timer is not None:
                self._timer.cancel()
            for unwatch in self._unwatch:
                unwatch()
            self._hear_workers(is_over=True)
            if self._prefill_task is not None and not self._prefill_task.done():
                await finish(cancel_all({self._prefill_task}))
            self._release(Part.PREFILL)

    @property
    def has_prefilled(self) -> bool:
        """Whether P computed the prompt, as far as P said."""
        ended = self._prefill_outcome()
        return self.handover is not None or (ended is not None and not isinstance(ended, Failure))

    @property
    def keeps_prefill(self) -> bool:
        """Whether what P computed can be given to another decode worker."""
        return self._dialect.keeps_prefill

    def forgo(self) -> None:
        """Give P's blocks back where its prefill is done and no decode worker was told of it: in the background."""
        if self.handover is not None and not self._is_decode_reached:
            self._give_back(self.handover)

    def _give_back(self, handover: Handover) -> None:
        leg = self._dialect.forgo_leg(self._for_decode, self._pair, handover)
        if leg is not None:
            forgo(self._core, self._decode, leg)

    def _forgo_late(self, answer: bytes) -> None:
        """P was done at the moment in which it was given up: its blocks are given back as if D had been next."""
        with contextlib.suppress(HandoverError):
            self._give_back(self._dialect.handover(answer))

    async def _run_legs(self) -> RequestOutcome:
        leg = await self._decode_leg()
        try:
            return await self._run_decode(leg)
        except LegFailed as failed:
            if failed.failure.kind is FailureKind.ERROR:
                await self._hear_lost_prefiller()
            raise

    async def _hear_lost_prefiller(self) -> None:
        """D may have failed because P is gone, and noticed it first. P's own leg fails within moments then, which ends
        the attempt (``_on_prefill_end``)."""
        task = self._prefill_task
        if task is not None and not (task.done() or self._dialect.recovers or self._answer.is_begun):
            self._decode_has_failed = True
            await asyncio.wait({task}, timeout=LOST_PREFILLER_WAIT_S)

    async def _decode_leg(self) -> Leg:
        """What D is sent, once everything that it needs is there; the prefill leg runs from now on, or is done."""
        if self._prefill is None:
            return self._dialect.alone_leg(self._for_decode, self._decode)
        self._core.workers.pair_started(self._prefill.ref, self._decode.ref)
        if self.handover is None:
            self._claim(Part.PREFILL, self._prefill)
        await self._learn_engine_name(self._prefill)
        if self._dialect.order is Order.TOGETHER:
            self._prefill_task = self._start_prefill(self._prefill)
            return self._dialect.decode_leg(self._for_decode, self._pair, None)
        if self.handover is None:
            self._watch(self._prefill, self._prefiller_gone)
            self._prefill_end = ended = await self._run_prefill(self._prefill)
            if isinstance(ended, Failure):
                self.failed_part = Part.PREFILL
                raise LegFailed(ended)
        if self._was_handed_over:
            self._choice.handed_on(self._core.now())
        self._held.begin()
        self._release(Part.PREFILL)
        return self._dialect.decode_leg(self._for_decode, self._pair, self.handover)

    async def _learn_engine_name(self, worker: Worker) -> None:
        """Learn what P's engine calls itself, where D must be told. Raises LegFailed."""
        url = self._dialect.discovery_url(worker)
        if url is None:
            return
        try:
            engine_id = await self._core.engine_names.engine_id(worker, url, self._dialect)
        except HandoverError as error:
            failed = failure.of_handover(error)
            self._note(Part.PREFILL, worker, failed)
            self.failed_part = Part.PREFILL
            raise LegFailed(failed) from None
        self._pair = dataclasses.replace(self._pair, prefill_engine_id=engine_id)

    # The decode leg.

    async def _run_decode(self, leg: Leg) -> RequestOutcome:
        core, inbound = self._core, self._inbound
        deadlines, waits = core.whole_deadlines, None
        if inbound.stream:
            deadlines = core.decode_deadlines
            waits = patience(core.workers, self._claims[Part.DECODE], core.options.token_timeout_s)
        if self._trace is not None:
            self._trace.decode_sent_s = core.now()
        async with calling(core, self._decode, leg, deadlines, Part.DECODE, patience=waits) as response:
            self._is_decode_reached = True
            if not inbound.stream:
                content = await read(response, core.options.max_answer_bytes, Part.DECODE)
                if not is_object(content) and not (self._inbound.may_get_array and is_array(content)):
                    failed = failure.malformed(Part.DECODE, "not a JSON object")
                    if not inbound.api.generates and b"json" not in kind_of(response):
                        failed = dataclasses.replace(failed, kind=FailureKind.REFUSED)  # it was asked for, as bytes
                    raise LegFailed(failed)
                self._claims[Part.DECODE].succeeded()
                return await self._answer_whole(content)
            if not kind_of(response).startswith(CONTENT_TYPE.encode()):
                raise LegFailed(failure.malformed(Part.DECODE, "not an event stream"))
            relay = StreamRelay(
                inbound.api.style,
                event_bytes_max=core.options.max_answer_bytes,
                open=lambda: self._answer.open_stream(self._record.head()),
                begin=self._begin_stream,
                write=self._answer.write,
                write_chunks=self._answer.chunk_writer,
                edit=self._edit,
                edit_marks=(*MARKS, *self._record.marks),
                before_end=bytes if self._answer.account is None else self._tell_account,
            )
            self._relay = relay
            self._answer.relayed, self._answer.heard = lambda: relay.bytes_passed, lambda: relay.bytes_heard
            self._answer.throttle(response.pause, response.resume)
            with failure.of_upstream(Part.DECODE):
                await response.pipe(relay.feed, relay.take, self._answer.heard)
            if relay.is_waiting:
                await self._hear_prefill()
                relay.go_on(at_last=True)
            relay.end()
        if not relay.is_whole:  # the worker ended it with an error event
            self._answer.write(self._answer.account_comment() + inbound.api.style.LAST)
        self._answer.end()
        if relay.error is None:
            self._choice.answered(self._core.now())
            return RequestOutcome.OK
        self._note(Part.DECODE, self._decode, relay.error)
        return RequestOutcome.BROKEN_STREAM

    def _begin_stream(self) -> None:
        self._held.end()
        self._claims[Part.DECODE].succeeded()
        self._pair_worked()
        self._record.first_byte_s = now_s = self._core.now()
        self._core.first_token(self._choice, now_s)
        self._core.metrics.first_byte(self._record.prefill_at, now_s - self._inbound.arrived_s)
        self._core.history.first_byte(now_s, now_s - self._inbound.arrived_s)
        self._answer.begin_stream(self._record.head())

    def _edit(self, event: Event) -> bytes | None:
        """The event with what the router adds. P's own words are waited for, once, by the stream's end."""
        if self._record.response is not None and self._record.response.begins(event.data, self._decode.ref):
            return event.raw
        if self._awaits_prefill:
            return None
        self._record.note(event.data, self._decode.ref)
        return self._merger.event(event, self._account(), self._prefilled())

    @property
    def _awaits_prefill(self) -> bool:
        return self._prefill_task is not None and not self._prefill_task.done() and not self._is_prefill_heard

    def _tell_account(self) -> bytes | None:
        if self._awaits_prefill:
            return None
        self._hear_workers()
        return self._answer.account_comment()

    def _hear_workers(self, *, is_over: bool = False) -> None:
        if self._trace is not None:
            self._trace.heard(self._prefilled(), self._merger.own, self._merger.usage)
            if is_over:
                self._trace.end(self._core.now())

    async def _answer_whole(self, content: bytes) -> RequestOutcome:
        self._record.note(content, self._decode.ref)
        if self._merger.is_concerned(content) or self._answer.account is not None:
            await self._hear_prefill()
            content = self._merger.body(content, self._account(), self._prefilled())
        self._hear_workers()
        self._choice.answered(self._core.now())
        self._answer.json(200, content, self._record.head())
        self._pair_worked()
        return RequestOutcome.OK

    def _pair_worked(self) -> None:
        if self._prefill is not None:
            self._core.workers.pair_succeeded(self._prefill.ref, self._decode.ref)

    def _failed(self, ended: Failure) -> RequestOutcome | Failure:
        """The attempt is over. Where the client has some of the answer already, the stream is ended here."""
        if self.failed_part is Part.DECODE:
            self._note(Part.DECODE, self._decode, ended)
        if not self._answer.is_begun:
            return ended
        if self._relay is not None and self._relay.is_waiting:
            self._relay.go_on(at_last=True)
        self._hear_workers()
        self._answer.fail(ended.status, ended.body)
        return RequestOutcome.BROKEN_STREAM

    # The prefill leg.

    def _start_prefill(self, worker: Worker) -> asyncio.Task[Prefilled | Failure]:
        task = asyncio.create_task(self._run_prefill(worker))

        def ended(task: asyncio.Task[Prefilled | Failure]) -> None:
            if not task.cancelled() and task.exception() is None and not isinstance(task.result(), Failure):
                self._held.begin()
            self._release(Part.PREFILL)
            if not task.cancelled() and task.exception() is None:
                self._on_prefill_end(task.result())

        task.add_done_callback(ended)
        return task

    async def _run_prefill(self, worker: Worker) -> Prefilled | Failure:
        try:
            answer = await self._call_prefill(worker, self._dialect.prefill_leg(self._for_prefill, self._pair))
            if self._dialect.order is Order.PREFILL_FIRST:
                self.handover = self._dialect.handover(answer)
        except LegFailed as failed:
            ended = failed.failure
        except HandoverError as error:
            ended = failure.of_handover(error)
        else:
            self._claims[Part.PREFILL].succeeded()
            said = self._dialect.prefilled(answer)
            self._core.prefilled(self._choice, said.prompt_tokens, said.cached_tokens)
            return said
        self._note(Part.PREFILL, worker, ended)
        return ended

    async def _call_prefill(self, worker: Worker, leg: Leg) -> bytes:
        deadlines, trace = self._core.whole_deadlines, self._trace
        if trace is not None:
            trace.prefill_sent_s = self._core.now()
        late = self._forgo_late if self._dialect.keeps_prefill else None
        async with calling(self._core, worker, leg, deadlines, Part.PREFILL, late) as response:
            answer = await read(response, self._core.options.max_answer_bytes, Part.PREFILL)
        if trace is not None:
            trace.prefill_ended_s = self._core.now()
        return answer

    def _prefiller_gone(self) -> None:
        if self.handover is None and self._prefill is not None:
            self.failed_part = Part.PREFILL
            gone = failure.gone(Part.PREFILL)
            self._note(Part.PREFILL, self._prefill, gone)
            self._interrupts.interrupt(gone)

    def _on_prefill_end(self, ended: Prefilled | Failure) -> None:
        self._prefill_end = ended
        if not isinstance(ended, Failure) or self._answer.is_begun:
            return
        if self._decode_has_failed and not ended.is_of_gone:
            return
        if self._ends_attempt(ended):
            self.failed_part = Part.PREFILL
            self._interrupts.interrupt(ended)
        elif ended.kind is FailureKind.UNREAD and self._timer is None and self._prefill is not None:
            # A P that is up when a dead one would be known to be has hung up without the request: D, which sees P's
            # agent alive, would wait for a grant that never comes.
            self._timer = asyncio.get_running_loop().call_later(OUTLIVES_S, self._prefiller_outlives, ended)
            self._watch(self._prefill, self._timer.cancel)

    def _prefiller_outlives(self, ended: Failure) -> None:
        if not self._answer.is_begun:
            self.failed_part = Part.PREFILL
            self._interrupts.interrupt(ended)

    def _ends_attempt(self, ended: Failure) -> bool:
        """Whether P's failure ends the attempt although D still waits."""
        if ended.is_final or ended.is_of_size or ended.status == failure.UNAVAILABLE:
            return True
        if ended.is_unsent:
            return True  # P has not got the request, and its agent, which is up, would have D wait for a grant
        return not self._dialect.recovers or self._core.options.on_prefill_failure == "redispatch"

    # What both legs share.

    def _claim(self, part: Part, worker: Worker) -> None:
        """At once after the placement, so that a worker that is to be tried by one request gets no second. What becomes
        of the leg is told to the claim, which is released after that."""
        self._claims[part] = self._core.workers.claim(worker.ref, part, self._record.own_id)

    def _release(self, part: Part) -> None:
        claim = self._claims.get(part)
        if claim is not None:
            claim.release()

    def _watch(self, worker: Worker, call: Callable[[], None]) -> None:
        self._unwatch.append(self._core.workers.watch(worker.ref, call))

    def _note(self, part: Part, worker: Worker, ended: Failure) -> None:
        self._core.metrics.leg_failed(part.value, ended.kind.value)
        if self._trace is not None:
            self._trace.failed(part, ended, self._core.now())
        log_failed(self._inbound.request_id, self._pair, part, worker, ended)
        if ended.is_final:
            return
        agent_id, workers = worker.agent_id, self._core.workers
        if ended.is_of_size:  # it answered, and well: what cannot be computed there cannot be decoded there either
            self._claims[part].succeeded()
            self.too_small |= {(part, agent_id), (Part.DECODE, agent_id)}
            return
        source = self._prefill
        if part is Part.DECODE and source is not None and ended.is_unexplained:
            # Perhaps P let D down: where P's work can be handed on, another D that fails so too says that it did.
            # The table of pairs says whether it counts against one end.
            workers.pair_failed(source.ref, worker.ref, self._record.own_id)
            is_to_be_handed_on = self.handover is not None and not self._was_handed_over
            self.avoided |= {agent_id} if is_to_be_handed_on else {agent_id, source.agent_id}
            return
        self._claims[part].failed(ended.kind.value)
        (self.avoided if ended.is_retryable else self.excluded).add(agent_id)

    async def _hear_prefill(self) -> None:
        """Give P's answer, if it is still under way, its time; once."""
        if self._prefill_task is not None and not self._is_prefill_heard:
            self._is_prefill_heard = True
            if not self._prefill_task.done():
                await asyncio.wait({self._prefill_task}, timeout=PREFILL_ANSWER_WAIT_S)

    def _prefilled(self) -> Prefilled | None:
        ended = self._prefill_outcome()
        return None if isinstance(ended, Failure) else ended

    def _prefill_outcome(self) -> Prefilled | Failure | None:
        task = self._prefill_task
        if self._prefill_end is None and task is not None and task.done() and not task.cancelled():
            with contextlib.suppress(Exception):
                return task.result()
        return self._prefill_end

    def _account(self) -> dict[str, Any]:
        """What the router adds to D's account: the pair, the attempt, and P's own words if it has spoken."""
        named, prefill = self._record.told_name, self._prefill
        account: dict[str, Any] = {
            "attempt": self._number,
            "prefill_agent": None if prefill is None else named(prefill.agent_id, Part.PREFILL),
            "decode_agent": named(self._decode.agent_id, Part.DECODE),
        }
        ended = self._prefill_outcome()
        if isinstance(ended, Failure):
            account["prefill_failure"] = ended.code
        elif ended is not None:
            account |= ended.account()
        return account
