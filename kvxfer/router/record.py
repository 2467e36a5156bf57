"""What became of one request, for its log line, the metrics and its spans. Decides nothing."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from typing import Any

from kvxfer.openai.transfer_params import Part
from kvxfer.policy.place import Placement
from kvxfer.router import headers
from kvxfer.router.account import RequestAccount
from kvxfer.router.history import TEXT_MAX, Decision, History
from kvxfer.router.inbound import Inbound
from kvxfer.router.metrics import RequestOutcome, RouterMetrics
from kvxfer.router.responses import MARKS as RESPONSE_MARKS
from kvxfer.router.responses import ResponseSeen
from kvxfer.router.tracing import EndedRequest, RequestTrace, Tracer
from kvxfer.router.usage import MARKS as USAGE_MARKS
from kvxfer.router.usage import UsageSeen
from kvxfer.types import AgentRef

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
    key_name: str = ""
    """Of the holder of the client's API key, never the key."""
    names_workers: bool = True
    """Whether its client is told which workers served it."""
    usage: UsageSeen | None = None
    """Where the answer's own account of its tokens is noted; None: it is not asked for."""
    owner: bytes = b""
    """By which requests of one holder of API keys are known; empty where no key is asked for."""
    response: ResponseSeen | None = None
    """Where the id of the answer is noted; None: no engine keeps it."""
    trace_id: str = ""
    """Of the trace that both legs belong to; empty where the request ended before that was known."""
    traceparent: str | None = None
    """The router's own, where it traces."""
    trace: RequestTrace | None = None
    """None where neither its spans are exported nor its client asks for its account."""
    account: RequestAccount | None = None
    """Where its client asks for it."""
    own_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    """By which its failures count once. The router's own, of all its processes: clients may give many requests one
    ``request_id``."""

    @property
    def prefill_at(self) -> str:
        """Where the prompt is computed, as far as the last placement says."""
        return "local" if self.placement is None or self.placement.prefill is None else "remote"

    def head(self) -> list[tuple[bytes, bytes]]:
        """What the answer's head says of the last placement; nothing before the first."""
        if self.placement is None:
            return []
        return [
            (headers.PREFILL_BYTES, self.prefill_at.encode()),
            (headers.PREFILL_REASON_BYTES, self.alone_for or self.placement.reason.value.encode()),
            (headers.ATTEMPT_BYTES, b"%d" % self.attempts),
        ]

    @property
    def marks(self) -> tuple[bytes, ...]:
        """One of these is in every event that is to be looked at for this request."""
        usage = () if self.usage is None else USAGE_MARKS
        return usage if self.response is None else (*usage, *RESPONSE_MARKS)

    def note(self, content: bytes, ref: AgentRef) -> None:
        """Look at a whole answer of ``ref``, or the data of an event."""
        if self.usage is not None:
            self.usage.note(content)
        if self.response is not None:
            self.response.note(content, ref)

    def told_name(self, agent_id: str, part: Part) -> str:
        """What its client is told of the worker that had this part: its name, or the part's where names are hidden."""
        return agent_id if self.names_workers else part.value

    def looked_at(self, inbound: Inbound) -> None:
        """Its body is a request."""
        self.is_stream = inbound.stream
        if self.trace is not None and inbound.token_limit is not None:
            self.trace.token_limit = inbound.token_limit[1]

    def finish(
        self,
        outcome: RequestOutcome,
        status: int,
        answer_bytes: int,
        *,
        now_s: float,
        metrics: RouterMetrics,
        history: History,
        tracer: Tracer | None = None,
    ) -> None:
        """Count the request, remember it, write its line, and have its spans exported."""
        seconds = now_s - self.arrived_s
        metrics.ended(self.route, outcome, seconds)
        metrics.carried(self.route, self.prompt_bytes, answer_bytes)
        history.ended(self._decision(outcome, status, now_s))
        if self.trace is not None and tracer is not None and self.trace.is_sampled:
            tracer.export(EndedRequest(self.trace, self, outcome.value, status, answer_bytes, now_s))
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
            "stream": self.is_stream,
            "prompt_bytes": self.prompt_bytes,
            "answer_bytes": answer_bytes,
        }
        if self.trace_id:
            fields["trace_id"] = self.trace_id
        if self.first_byte_s is not None:
            fields["ttft_s"] = round(self.first_byte_s - self.arrived_s, 4)
        if self.placement is not None:
            prefill = self.placement.prefill
            fields["prefill"] = None if prefill is None else prefill.ref.agent_id
            fields["decode"] = self.placement.decode.ref.agent_id
            fields["reason"] = self.alone_for.decode() or self.placement.reason.value
        if self.code:
            fields["code"] = self.code
        if self.key_name:
            fields["key"] = self.key_name
        if self.account is not None:
            fields["account"] = self.account.values()
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
