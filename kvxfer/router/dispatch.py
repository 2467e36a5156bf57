"""Serves one request: admits it to a pair of workers, and tries again where that is safe.

Decides how often and where; one try is an `Attempt`. A retry never mixes two transfers: it is a new transfer id, sent
only after both legs of the old one were closed. It must never know HTTP servers: the answer takes bytes.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable

from kvxfer.errors import DeadlineExceeded, NoWorker
from kvxfer.openai.errors import RequestError, error_body, status_for
from kvxfer.policy.backoff import Backoff
from kvxfer.policy.disagg import DisaggOptions, PrefillAt, decide_prefill
from kvxfer.policy.place import Placement, place
from kvxfer.router import failure
from kvxfer.router.answer import Answer
from kvxfer.router.attempt import Attempt, Room
from kvxfer.router.failure import Failure
from kvxfer.router.inbound import Inbound
from kvxfer.router.metrics import Outcome

RETRY_BACKOFF = Backoff(base_s=0.05, cap_s=1.0)


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
            error = DeadlineExceeded(f"request_timeout_s {self._room.options.request_timeout_s:g} passed")
            await answer.give_up(status_for(error), error_body(error))
            return Outcome.TIMED_OUT
        except RequestError as error:
            await answer.fail(status_for(error), error_body(error))
            return Outcome.CLIENT_ERROR
        except NoWorker as error:
            await answer.fail(status_for(error), error_body(error))
            return Outcome.UNAVAILABLE

    async def _try(self, inbound: Inbound, answer: Answer) -> Outcome:
        self._check_model(inbound.parsed.model)
        excluded: set[str] = set()
        avoided: set[str] = set()
        last: Failure | None = None
        for number in range(1, self._room.options.attempts_max + 1):
            try:
                placement = self._place(inbound, excluded, avoided)
            except NoWorker:
                if last is None:
                    raise
                break
            if last is not None:
                self._room.metrics.retries.labels(last.kind.value).inc()
                if avoided & {m.ref.agent_id for m in (placement.prefill, placement.decode) if m is not None}:
                    await asyncio.sleep(RETRY_BACKOFF.delay_s(number - 1, random=self._draw()))
            self._room.metrics.placements.labels(placement.reason.value).inc()
            attempt = Attempt(self._room, inbound, answer, placement, number)
            ended = await attempt.run()
            if isinstance(ended, Outcome):
                return ended
            last = ended
            if last.is_final:
                break
            avoided |= attempt.avoided
            excluded |= attempt.excluded
        assert last is not None
        await answer.fail(last.status, last.body)
        if last.is_final:
            return Outcome.CLIENT_ERROR
        return Outcome.UNAVAILABLE if last.status == failure.UNAVAILABLE else Outcome.FAILED

    def _check_model(self, model: str) -> None:
        models = self._room.workers.models()
        if models and model not in models:
            raise RequestError(
                f"model: {model!r} is not served here; there is {', '.join(models)}",
                param="model",
                error_code="model_not_found",
            )

    def _place(self, inbound: Inbound, excluded: set[str], avoided: set[str]) -> Placement:
        tokens, is_exact = inbound.prompt_tokens()
        wanted = decide_prefill(tokens, self._disagg, is_exact=is_exact)
        return place(
            self._room.workers.candidates(),
            model=inbound.parsed.model,
            tie_break=self._tie_break(),
            wants_remote_prefill=wanted.at is PrefillAt.REMOTE,
            allows_local_prefill=self._room.options.allows_local_prefill,
            excluded=frozenset(excluded),
            avoided=frozenset(avoided),
        )
