"""What every request of one router works with: settings, workers, metrics, budgets, background work.

Decides nothing of its own; it must never know one request.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvxfer.openai.chains import SECRET_BYTES, Secret
from kvxfer.policy.budget import Budget
from kvxfer.policy.chooser import Choice, Chooser, Policy
from kvxfer.router.engine_names import EngineNames
from kvxfer.router.fleet.worker import Worker
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.headers import check_passed
from kvxfer.router.history import History
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.prompt_keys import PromptKeys
from kvxfer.router.responses import KeptResponses
from kvxfer.router.tasks import cancel_all
from kvxfer.router.tracing import Tracer
from kvxfer.router.upstream import UpstreamDeadlines
from kvxfer.router.worker_key import Headers, WorkerKey, leg_headers
from kvxfer.serving.leg_keys import LegKeyFile

RECOMPUTES_MAX = 4096
"""Decode workers whose budgets are kept; the oldest one is forgotten first."""


class RouterCore:
    """Belongs to one event loop."""

    def __init__(
        self,
        options: RouterOptions,
        workers: Workers,
        metrics: RouterMetrics,
        *,
        tracer: Tracer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.workers = workers
        self.metrics = metrics
        self.tracer = tracer
        """None where no spans are exported."""
        self.history = History()
        self.now = now
        self.chooser = Chooser(Policy(options.policy), weighs_alone=options.min_remote_prefill_tokens < 0)
        workers.on_left = self.chooser.forget
        self.prompt_keys = PromptKeys(Secret(os.urandom(SECRET_BYTES))) if self.chooser.learns else None
        """Where the policy knows prompts by their keys. The secret is this process's own."""
        self.retries = Budget(share=options.retry_share, floor_per_s=options.retry_floor_per_s)
        """Of all requests: each earns ``retry_share`` of a retry."""
        self.recomputes: dict[str, Budget] = {}
        """By decode worker: how often it may compute a prompt itself because P was lost."""
        common = {"connect_s": options.connect_timeout_s, "send_s": options.send_timeout_s, "whole_s": math.inf}
        self.decode_deadlines = UpstreamDeadlines(
            first_byte_s=options.first_byte_timeout_s, between_chunks_s=options.token_timeout_s, **common
        )
        """Of a stream. The request's own deadline bounds the whole."""
        self.whole_deadlines = UpstreamDeadlines(
            first_byte_s=options.first_byte_timeout_s, between_chunks_s=options.first_byte_timeout_s, **common
        )
        """Of an answer without a stream, whose first byte comes when all of it is computed."""
        self.passed_headers = check_passed(options.forward_header)
        self.worker_key = WorkerKey()
        """What legs show to workers, where the client's own credentials end here."""
        self.leg_keys = LegKeyFile()
        """What legs show to workers for which the coordinator names no key."""
        self.engine_names = EngineNames(workers.make_pool)
        self.responses = KeptResponses()
        """Which worker keeps which Response."""
        self.describe_process: Callable[[], dict[str, Any]] = dict
        """What ``/live`` says of this process, where the router has several."""
        self._background: set[asyncio.Task[Any]] = set()

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the requests; the router's stop waits for it, or ends it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def leg_headers(self, worker: Worker) -> Headers:
        """By which ``worker`` knows that a request comes from one of its routers."""
        return leg_headers(worker, self.leg_keys)

    def prefilled(self, choice: Choice, tokens: int | None, cached: int | None) -> None:
        """P is done, and says so much of the prompt and of its cache."""
        choice.prefilled(self.now(), tokens=tokens, cached=cached)
        if tokens and cached is not None:
            self.metrics.cached(tokens, choice.presumed, cached)

    def first_token(self, choice: Choice, now_s: float) -> None:
        """D began its answer."""
        choice.first_token(now_s)
        if choice.predicted_s is not None:
            self.metrics.estimated(choice.predicted_s, now_s - choice.began_s)

    def may_recompute(self, agent_id: str) -> bool:
        """Whether this decode worker may once more compute a prompt whose P was lost; counts it where it may."""
        budget = self.recomputes.get(agent_id)
        if budget is None:
            while len(self.recomputes) >= RECOMPUTES_MAX:
                del self.recomputes[next(iter(self.recomputes))]
            budget = self.recomputes[agent_id] = Budget(share=0.0, floor_per_s=self.options.recompute_per_s)
        return budget.take(self.now())

    async def aclose(self) -> None:
        await cancel_all(tuple(self._background))
