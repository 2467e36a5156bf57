"""What became of one request, for its log line and the metrics. Decides nothing."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from kvxfer.policy.place import Placement
from kvxfer.router.history import TEXT_MAX, Decision, History
from kvxfer.router.metrics import RequestOutcome, RouterMetrics

log = logging.getLogger("kvxfer.router.request")

FAILURES = frozenset(
    (RequestOutcome.UNAVAILABLE, RequestOutcome.FAILED, RequestOutcome.BROKEN_STREAM, RequestOutcome.TIMED_OUT)
)
"""Outcomes that are neither the client's doing nor an operator's."""


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes on; times are of the router's monotonic clock, in seconds."""

    route: str
    request_id: str
    arrived_s: float
    model: str = ""
    is_stream: bool = False
    prompt_bytes: int = 0
    placement: Placement | None = None
    attempts: int = 0
    alone_for: bytes = b""
    """The field for which one worker had to do it alone, as the answer's header says it."""
    first_byte_s: float | None = None
    """When the first event with some of the answer went out."""
    code: str = ""
    """Of the error that the client got."""

    def finish(
        self,
        outcome: RequestOutcome,
        status: int,
        answer_bytes: int,
        *,
        now_s: float,
        metrics: RouterMetrics,
        history: History,
    ) -> None:
        """Count the request, remember it, and write its line."""
        seconds = now_s - self.arrived_s
        metrics.ended(self.route, outcome, seconds)
        history.ended(self._decision(outcome, status, now_s))
        if not log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "route": self.route,
            "model": self.model,
            "outcome": outcome.value,
            "status": status,
            "seconds": round(seconds, 4),
            "attempts": self.attempts,
            "prompt_bytes": self.prompt_bytes,
            "answer_bytes": answer_bytes,
        }
        if self.first_byte_s is not None:
            fields["ttft_s"] = round(self.first_byte_s - self.arrived_s, 4)
        if self.placement is not None:
            prefill = self.placement.prefill
            fields["prefill"] = None if prefill is None else prefill.ref.agent_id
            fields["decode"] = self.placement.decode.ref.agent_id
            fields["reason"] = self.alone_for.decode() or self.placement.reason.value
        if self.code:
            fields["code"] = self.code
        log.info("request", extra=fields)

    def _decision(self, outcome: RequestOutcome, status: int, now_s: float) -> Decision:
        placement, first_byte_s = self.placement, self.first_byte_s
        prefill = None if placement is None else placement.prefill
        return Decision(
            ended_s=now_s,
            route=self.route,
            model=self.model[:TEXT_MAX],
            is_stream=self.is_stream,
            prefill="" if prefill is None else prefill.ref.agent_id,
            decode="" if placement is None else placement.decode.ref.agent_id,
            reason=self.alone_for.decode() or ("" if placement is None else placement.reason.value),
            outcome=outcome.value,
            is_failure=outcome in FAILURES,
            status=status,
            ttft_s=None if first_byte_s is None else first_byte_s - self.arrived_s,
            duration_s=now_s - self.arrived_s,
            attempts=self.attempts,
            code=self.code[:TEXT_MAX],
        )
