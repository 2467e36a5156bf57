"""Serves one request: admits it to a pair of workers, and tries again where that is safe.

Decides how often and where; one try is an `Attempt`. A retry never mixes two transfers: it is a new transfer id, sent
only after both legs of the old one were closed. It must never know HTTP servers: the answer takes bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import secrets
from collections.abc import Callable

from kvxfer.errors import DeadlineExceededError, DoesNotFitError, NoWorkerError
from kvxfer.openai.errors import RequestError, error_body, status_for
from kvxfer.policy.backoff import Backoff
from kvxfer.policy.capacity import Need
from kvxfer.policy.disagg import DisaggOptions, PrefillAt, decide_prefill
from kvxfer.policy.place import Placement, PlaceReason, Sizes, place
from kvxfer.router import failure
from kvxfer.router.answer import Answer
from kvxfer.router.attempt import Attempt, Room
from kvxfer.router.failure import Failure
from kvxfer.router.inbound import Inbound
from kvxfer.router.metrics import Outcome
from kvxfer.router.workers import Part

RETRY_BACKOFF = Backoff(base_s=0.05, cap_s=1.0)
PREFILL_TRIES = 2
"""After so many failures of which the last was P's, D computes the prompt itself, where it may."""


class Dispatcher:
    """Serves requests over the workers it is given; lives on one event loop."""

    def __init__(
        self,
        room: Room,
        *,
        draw: Callable[[], float] = random.random,
        tie_break: Callable[[], int] = lambda: secrets.randbits(62),
    ) -> None:
        self._room = room
        self._draw = draw
        self._tie_break = tie_break
        self._disagg = DisaggOptions(room.options.min_remote_prefill_tokens)

    async def serve(self, inbound: Inbound, answer: Answer) -> Outcome:
        """Answer one request. Cancelling it ends both legs at once; it returns only when both are closed."""
        left_s = self._room.options.request_timeout_s - (self._room.now() - inbound.arrived_s)
        try:
            async with asyncio.timeout(left_s):
                return await self._try(inbound, answer)
        except TimeoutError:
            error = DeadlineExceededError(f"request_timeout_s {self._room.options.request_timeout_s:g} passed")
            await answer.give_up(status_for(error), error_body(error))
            return Outcome.TIMED_OUT
        except (RequestError, DoesNotFitError) as error:
            await answer.fail(status_for(error), error_body(error))
            return Outcome.CLIENT_ERROR
        except NoWorkerError as error:
            await answer.fail(status_for(error), error_body(error))
            return Outcome.UNAVAILABLE

    async def _try(self, inbound: Inbound, answer: Answer) -> Outcome:
        self._check_model(inbound.parsed.model)
        course = _Course(*inbound.needs())
        while course.last is None or self._may_try_again(course):
            try:
                placement = self._place(inbound, course)
            except NoWorkerError:
                if course.last is None or course.last.is_of_size:
                    raise
                break
            except DoesNotFitError as error:
                if course.last is None:
                    raise _request_error(error, inbound) from None
                break
            if course.last is not None:
                self._room.metrics.retries.labels(course.last.kind.value).inc()
                if course.avoided & {m.ref.agent_id for m in (placement.prefill, placement.decode) if m is not None}:
                    await asyncio.sleep(RETRY_BACKOFF.delay_s(max(1, course.failures), random=self._draw()))
            self._room.metrics.placements.labels(placement.reason.value).inc()
            course.attempts += 1
            attempt = Attempt(self._room, inbound, answer, placement, course.attempts)
            ended = await attempt.run()
            if isinstance(ended, Outcome):
                return ended
            course.failed(ended, attempt)
            if ended.is_final:
                break
        last = course.last
        assert last is not None
        await answer.fail(last.status, last.body)
        if last.is_final or last.is_of_size:
            return Outcome.CLIENT_ERROR
        return Outcome.UNAVAILABLE if last.status == failure.UNAVAILABLE else Outcome.FAILED

    def _may_try_again(self, course: _Course) -> bool:
        """A failure for size is not counted: that worker is not asked again. And where only P failed, D may still
        compute the prompt."""
        return course.failures < self._room.options.attempts_max or course.last_is_of_size or self._goes_alone(course)

    def _goes_alone(self, course: _Course) -> bool:
        """Whether D is to compute the prompt since P failed often enough, or for the last time."""
        tries = min(PREFILL_TRIES, self._room.options.attempts_max)
        allows = self._room.options.allows_local_prefill
        return allows and course.last_failed_at is Part.PREFILL and course.failures >= tries

    def _check_model(self, model: str) -> None:
        models = self._room.workers.models()
        if models and model not in models:
            raise RequestError(
                f"model: {model!r} is not served here; there is {', '.join(models)}",
                param="model",
                error_code="model_not_found",
            )

    def _place(self, inbound: Inbound, course: _Course) -> Placement:
        tokens, is_exact = inbound.prompt_tokens()
        wanted = decide_prefill(tokens, self._disagg, is_exact=is_exact)
        is_one = inbound.parsed.is_one_sequence  # one transfer id stands for one sequence
        if not is_one and not self._room.options.allows_local_prefill:
            raise RequestError(
                "several prompts or answers in one request need a decode worker that computes the prompt itself, and "
                "local_prefill is off: send them one by one"
            )
        goes_alone = self._goes_alone(course)
        placement = place(
            self._room.workers.candidates(),
            model=inbound.parsed.model,
            tie_break=self._tie_break(),
            sizes=course.sizes(),
            wants_remote_prefill=is_one and wanted.at is PrefillAt.REMOTE and not goes_alone,
            allows_local_prefill=self._room.options.allows_local_prefill,
            excluded=frozenset(course.excluded),
            avoided=frozenset(course.avoided),
        )
        return dataclasses.replace(placement, reason=PlaceReason.PREFILL_ASIDE) if goes_alone else placement


@dataclasses.dataclass
class _Course:
    """What became of one request so far. ``failures`` are those that count against ``attempts_max``."""

    need: Need
    likely: Need
    attempts: int = 0
    failures: int = 0
    last: Failure | None = None
    last_failed_at: Part | None = None
    """Whose failure the last one was; None where it was one for size."""
    excluded: set[str] = dataclasses.field(default_factory=set)
    avoided: set[str] = dataclasses.field(default_factory=set)
    too_small: set[tuple[Part, str]] = dataclasses.field(default_factory=set)

    @property
    def last_is_of_size(self) -> bool:
        return self.last is not None and self.last.is_of_size

    def failed(self, ended: Failure, attempt: Attempt) -> None:
        self.last = ended
        self.avoided |= attempt.avoided
        self.excluded |= attempt.excluded
        self.too_small |= attempt.too_small
        self.failures += not ended.is_of_size
        self.last_failed_at = None if ended.is_of_size else attempt.failed_part
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
