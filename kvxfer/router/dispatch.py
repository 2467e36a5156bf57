"""Serves one request: gives it to a pair of workers, and tries again where that is safe.

Decides how often and where; one try is an `Attempt`. A retry never mixes two transfers: it is a new transfer id, sent
only after both legs of the old one were closed. A finished prefill that another decode worker can use is handed to it.
It must never know HTTP servers: the answer takes bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import secrets
from collections.abc import Callable

from kvxfer.errors import DeadlineExceededError, DoesNotFitError, NoWorkerError
from kvxfer.openai.errors import RequestError, error_body, status_for
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.backoff import Backoff
from kvxfer.policy.capacity import Need
from kvxfer.policy.chooser import Choice, Prompt
from kvxfer.policy.disagg import CHARS_PER_TOKEN, DisaggOptions, PrefillAt, decide_prefill
from kvxfer.policy.place import Placement, PlaceReason, Sizes, place
from kvxfer.router import failure
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.attempt import Attempt
from kvxfer.router.core import RouterCore
from kvxfer.router.deadline import time_limit
from kvxfer.router.dialects import Handover, dialect
from kvxfer.router.failure import Failure
from kvxfer.router.inbound import Inbound
from kvxfer.router.keepalive import keeping_alive
from kvxfer.router.metrics import RequestOutcome
from kvxfer.router.prompt_keys import THREAD_BYTES
from kvxfer.router.record import RequestRecord
from kvxfer.router.responses import PREVIOUS, keeper_of, previous
from kvxfer.types import AgentRef

RETRY_BACKOFF = Backoff(base_s=0.05, cap_s=1.0)
PREFILL_TRIES = 2
"""After so many failures of which the last was P's, D computes the prompt itself, where it may."""


class Dispatcher:
    """Serves requests over the workers it is given; belongs to one event loop."""

    def __init__(
        self,
        core: RouterCore,
        *,
        draw: Callable[[], float] = random.random,
        tie_break: Callable[[], int] = lambda: secrets.randbits(62),
    ) -> None:
        self._core = core
        self._draw = draw
        self._tie_break = tie_break
        self._disagg = DisaggOptions(core.options.min_remote_prefill_tokens)

    async def serve(self, inbound: Inbound, answer: ClientAnswer, record: RequestRecord) -> RequestOutcome:
        """Answer one request. Cancelling it ends both legs at once; it returns only when both are closed."""
        try:
            async with time_limit(self._core, inbound.arrived_s, answer):
                with self._keeping_alive(inbound, answer, record):
                    return await self._try(inbound, answer, record)
        except DeadlineExceededError as error:
            await answer.give_up(status_for(error), error_body(error))
            return RequestOutcome.TIMED_OUT
        except (RequestError, DoesNotFitError) as error:
            answer.fail(status_for(error), error_body(error))
            record.code = error.code
            return RequestOutcome.CLIENT_ERROR
        except NoWorkerError as error:
            record.code = error.code
            answer.fail(status_for(error), error_body(error))
            return RequestOutcome.UNAVAILABLE

    def _keeping_alive(
        self, inbound: Inbound, answer: ClientAnswer, record: RequestRecord
    ) -> contextlib.AbstractContextManager[None]:
        every_s = self._core.options.keepalive_s
        if not inbound.stream or not every_s:
            return contextlib.nullcontext()
        return keeping_alive(every_s, lambda: answer.bytes_sent, lambda: answer.keep_alive(record.head()))

    async def _try(self, inbound: Inbound, answer: ClientAnswer, record: RequestRecord) -> RequestOutcome:
        inbound = self._with_model(inbound)
        record.model = inbound.model
        core = self._core
        course = _Course(*inbound.needs(), await self._prompt(inbound, record), keeper=self._keeper(inbound, record))
        core.retries.earn()
        attempt: Attempt | None = None
        try:
            while course.last is None or self._may_try_again(course, inbound):
                try:
                    placement = self._place(inbound, course, record)
                except NoWorkerError:
                    if course.last is None or course.last.is_of_size:
                        raise
                    break
                except DoesNotFitError as error:
                    if course.last is None:
                        raise _request_error(error, inbound) from None
                    break
                if course.last is not None and not await self._begin_retry(course, placement):
                    break
                core.metrics.placed(placement.reason.value)
                record.placement = placement
                record.attempts += 1
                if placement.prefill is None or course.prefiller != placement.prefill.ref:
                    course.handover = None
                timeout_s = core.options.request_timeout_s - (core.now() - inbound.arrived_s)
                attempt = Attempt(
                    core,
                    inbound,
                    answer,
                    placement,
                    record,
                    choice=self._begun(course, placement),
                    timeout_s=max(0.001, round(timeout_s, 3)),
                    handover=course.handover,
                )
                ended = await attempt.run()
                if isinstance(ended, RequestOutcome):
                    return ended
                course.failed(ended, attempt, placement)
                if ended.is_final:
                    break
        finally:
            if attempt is not None:
                attempt.forgo()
        last = course.last
        assert last is not None
        record.code = last.code
        answer.fail(last.status, last.body)
        if last.is_final or last.is_of_size:
            return RequestOutcome.CLIENT_ERROR
        return RequestOutcome.UNAVAILABLE if last.status == failure.UNAVAILABLE else RequestOutcome.FAILED

    async def _prompt(self, inbound: Inbound, record: RequestRecord) -> Prompt:
        """What the policy knows the prompt by. That of a large body is found beside the loop."""
        tokens, is_exact = inbound.prompt_tokens()
        size = (float(tokens) if is_exact else 0.0, float(tokens * CHARS_PER_TOKEN))
        keys, is_heard = self._core.prompt_keys, inbound.stream
        if keys is None or not inbound.is_one_sequence or not inbound.api.generates:
            return Prompt(inbound.model, *size, is_heard=is_heard)
        tenant = record.owner if self._core.options.part_prefixes else b""
        if len(inbound.body) <= THREAD_BYTES:
            chain = keys.keys_of(inbound, tenant=tenant)
        else:
            chain = await asyncio.to_thread(keys.keys_of, inbound, tenant=tenant)
        return Prompt(inbound.model, *size, chain, is_heard=is_heard)

    def _begun(self, course: _Course, placement: Placement) -> Choice:
        """The policy hears of the choice before another is made."""
        workers, prefill = self._core.workers, placement.prefill
        source = None if prefill is None else workers.candidate(prefill.ref)
        destination = workers.candidate(placement.decode.ref)
        return self._core.chooser.chosen(course.prompt, placement, source, destination, self._core.now())

    def _keeper(self, inbound: Inbound, record: RequestRecord) -> AgentRef | None:
        """The only worker that can answer, where the request goes on from a Response. Raises RequestError."""
        before, workers = previous(inbound), self._core.workers
        if not before:
            return None
        keeper = keeper_of(before, record.owner, self._core.responses, workers, param=PREVIOUS)
        if any(one.member.ref == keeper and not one.serves(inbound.model) for one in workers.candidates()):
            raise RequestError(
                f"model: the worker that keeps the response does not serve {inbound.model!r}", param="model"
            )
        return keeper

    async def _begin_retry(self, course: _Course, placement: Placement) -> bool:
        """Wait as long as a worker that failed this request is to be left alone. False where no retry is left."""
        assert course.last is not None
        if not course.last_is_of_size and not self._core.retries.take(self._core.now()):
            self._core.metrics.retry_refused()
            return False
        self._core.metrics.retried(course.last.kind.value)
        if course.avoided & {m.ref.agent_id for m in (placement.prefill, placement.decode) if m is not None}:
            await asyncio.sleep(RETRY_BACKOFF.delay_s(max(1, course.failures), random=self._draw()))
        return True

    def _may_try_again(self, course: _Course, inbound: Inbound) -> bool:
        """A failure for size is not counted: that worker is not asked again. And where only P failed, D may still
        compute the prompt."""
        return (
            course.failures < self._core.options.attempts_max
            or course.last_is_of_size
            or self._goes_alone(course, inbound)
        )

    def _goes_alone(self, course: _Course, inbound: Inbound) -> bool:
        """Whether D is to compute the prompt since P failed often enough, or for the last time; and some D can."""
        tries = min(PREFILL_TRIES, self._core.options.attempts_max)
        allows = self._core.options.allows_local_prefill
        if not allows or course.last_failed_at is not Part.PREFILL or course.failures < tries:
            return False
        known = (c for c in self._core.workers.candidates() if c.serves(inbound.model))
        return any(c.computes_alone for c in known if c.member.info.role.can_decode)

    def _with_model(self, inbound: Inbound) -> Inbound:
        models = self._core.workers.models()
        if not inbound.model:
            if len(models) == 1:
                return dataclasses.replace(inbound, model=models[0])
            raise RequestError(
                f"model: must be given, as there is {', '.join(models) or 'no model'} here", param="model"
            )
        if models and inbound.model not in models:
            raise RequestError(
                f"model: {inbound.model!r} is not served here; there is {', '.join(models)}",
                param="model",
                status=404,
                error_code="model_not_found",
            )
        return inbound

    def _place(self, inbound: Inbound, course: _Course, record: RequestRecord) -> Placement:
        if course.keeper is not None:
            record.alone_for = b"field:" + PREVIOUS.encode()
            return self._choose_for_one(inbound, course, PREVIOUS)
        tokens, is_exact = inbound.prompt_tokens()
        wanted = decide_prefill(tokens, self._disagg, is_exact=is_exact)
        goes_alone = self._goes_alone(course, inbound)
        splits = inbound.api.generates and wanted.at is PrefillAt.REMOTE and not goes_alone
        placement = self._choose(inbound, course, splits=splits)
        if placement.prefill is not None:
            decoder = self._core.workers.worker(placement.decode.ref)
            field = dialect(decoder.dialect).refuses_split(inbound)
            if field is not None:
                placement = self._choose_for_one(inbound, course, field)
                record.alone_for = b"field:" + field.encode()
        was_lost = course.last_failed_at is Part.PREFILL and splits and placement.prefill is None
        if goes_alone or was_lost:
            agent_id = placement.decode.ref.agent_id
            if not self._core.may_recompute(agent_id):
                self._core.metrics.recompute_refused(agent_id)
                raise NoWorkerError("the prefill worker was lost, and this decode worker has computed enough prompts")
            self._core.metrics.recomputed(agent_id)
        if goes_alone:
            return dataclasses.replace(placement, reason=PlaceReason.PREFILL_EJECTED)
        return placement

    def _choose_for_one(self, inbound: Inbound, course: _Course, field: str) -> Placement:
        """For a request that two workers cannot share. Raises RequestError where none may answer it alone."""
        placement = self._choose(inbound, course, splits=False)
        if placement.prefill is None:
            return placement
        why = "no worker here computes a prompt for itself alone"
        if not self._core.options.allows_local_prefill:
            why = "local_prefill is off, so that no decode worker may compute the prompt itself"
        raise RequestError(
            f"{field}: a prefill worker and a decode worker cannot share this request, and {why}", param=field
        )

    def _choose(self, inbound: Inbound, course: _Course, *, splits: bool) -> Placement:
        workers = self._core.workers
        candidates = workers.candidates()
        if course.keeper is not None:  # all others that decode would not know the Response
            candidates = tuple(
                one for one in candidates if one.member.ref == course.keeper or not one.member.info.role.can_decode
            )
        return place(
            candidates,
            model=inbound.model,
            tie_break=self._tie_break(),
            scores=self._core.chooser.scores(course.prompt, self._core.now()),
            sizes=course.sizes(),
            wants_remote_prefill=splits,
            allows_local_prefill=self._core.options.allows_local_prefill,
            generates=inbound.api.generates,
            excluded=frozenset(course.excluded),
            avoided=frozenset(course.avoided),
            preferred=course.prefiller,
            ejected_pairs=workers.ejected_pairs(),
        )


@dataclasses.dataclass
class _Course:
    """What became of one request so far. ``failures`` are those that count against ``attempts_max``."""

    need: Need
    likely: Need
    prompt: Prompt
    keeper: AgentRef | None = None
    """The only one that can answer, as it keeps the Response that the request goes on from."""
    failures: int = 0
    last: Failure | None = None
    last_failed_at: Part | None = None
    """Which part failed last; None where the failure was one for size."""
    prefiller: AgentRef | None = None
    """The one that computed this prompt, if any did: it has the KV, or at least the prefix."""
    handover: Handover | None = None
    excluded: set[str] = dataclasses.field(default_factory=set)
    avoided: set[str] = dataclasses.field(default_factory=set)
    too_small: set[tuple[Part, str]] = dataclasses.field(default_factory=set)

    @property
    def last_is_of_size(self) -> bool:
        return self.last is not None and self.last.is_of_size

    def failed(self, ended: Failure, attempt: Attempt, placement: Placement) -> None:
        self.last = ended
        self.avoided |= attempt.avoided
        self.excluded |= attempt.excluded
        self.too_small |= attempt.too_small
        self.failures += not ended.is_of_size
        self.last_failed_at = None if ended.is_of_size else attempt.failed_part
        source = placement.prefill
        is_well = attempt.has_prefilled and attempt.failed_part is Part.DECODE
        if source is not None and is_well and source.ref.agent_id not in attempt.avoided:
            self.prefiller = source.ref
            self.handover = attempt.handover if attempt.keeps_prefill else None
        else:
            self.prefiller = self.handover = None
        if ended.prompt_tokens is not None:
            self.need = dataclasses.replace(self.need, prompt_tokens=ended.prompt_tokens)
            self.likely = dataclasses.replace(self.likely, prompt_tokens=ended.prompt_tokens)

    def sizes(self) -> Sizes:
        return Sizes(
            self.need,
            self.likely,
            too_small_to_prefill=frozenset(name for part, name in self.too_small if part is Part.PREFILL),
            too_small_to_decode=frozenset(name for part, name in self.too_small if part is Part.DECODE),
        )


def _request_error(error: DoesNotFitError, inbound: Inbound) -> DoesNotFitError:
    """The same under the name that the field has in the client's body."""
    field = inbound.prompt_field if error.field == "prompt" else inbound.token_limit_field or inbound.prompt_field
    return DoesNotFitError(f"{field}: {error}", field=field, prompt_tokens=error.prompt_tokens)
