"""The spans of one request, in OTLP's JSON encoding: route, and for each attempt queue, prefill, transfer and decode.

Decides names, kinds, attributes (OpenTelemetry's conventions for HTTP and GenAI, and ``kvxfer.``) and what is an error.
Times that engines measured are placed on the router's clock: no clock of another machine is read. Pure.

``transfer`` lies before D's first token. Its length is what D's account says; where D says nothing, all from P's answer
to the first token, which is an upper bound and is marked so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvxfer.router.dialects import LegWorker
from kvxfer.router.metrics import RequestOutcome
from kvxfer.router.tracing import TEXT_CHARS_MAX, AttemptTrace, EndedRequest, RequestTrace, told_count, told_seconds

Object = dict[str, Any]

INTERNAL, SERVER, CLIENT = 1, 2, 3
ERROR = 2
HAS_IS_REMOTE, IS_REMOTE = 0x100, 0x200
"""Bits of a span's flags: whether its parent is in another process."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
PROVIDERS = {"kvxfer": "kvxfer", "sglang": "sglang"}
"""By dialect; those of vLLM begin with its name, and of a plain engine the kind is not known."""
_NO_ERROR = frozenset({RequestOutcome.OK, RequestOutcome.CLIENT_ERROR, RequestOutcome.DISCONNECTED})


def spans_of(ended: EndedRequest) -> list[Object]:
    """The root span first."""
    trace, record = ended.trace, ended.record
    made = [_route(ended)]
    for number, attempt in enumerate(trace.attempts, 1):
        is_last = number == len(trace.attempts)
        first_s = record.first_byte_s if is_last else None
        made += _of_attempt(_Spans(ended, trace.span_id), number, attempt, first_s)
    return made


class _Spans:
    """Makes spans of one trace."""

    def __init__(self, ended: EndedRequest, parent_id: str) -> None:
        self.trace: RequestTrace = ended.trace
        self.operation = OPERATIONS.get(ended.record.route)
        self.model = ended.record.model
        self.parent_id = parent_id

    def make(
        self,
        name: str,
        kind: int,
        began_s: float,
        ended_s: float,
        attributes: Mapping[str, Any],
        *,
        span_id: str,
        parent_id: str,
        error: str = "",
        is_parent_remote: bool = False,
    ) -> Object:
        trace = self.trace
        values = {**attributes, "error.type": error} if error else attributes
        span: Object = {
            "traceId": trace.trace_id,
            "spanId": span_id,
            "flags": int(trace.flags, 16) | HAS_IS_REMOTE | (IS_REMOTE if is_parent_remote else 0),
            "name": name,
            "kind": kind,
            "startTimeUnixNano": self._unix_ns(began_s),
            "endTimeUnixNano": self._unix_ns(max(began_s, ended_s)),
            "attributes": [
                {"key": key, "value": value}
                for key, value in ((key, _value(given)) for key, given in values.items())
                if value is not None
            ],
        }
        if parent_id:
            span["parentSpanId"] = parent_id
        if error:
            span["status"] = {"code": ERROR, "message": error[:TEXT_CHARS_MAX]}
        return span

    def child(self, name: str, began_s: float, ended_s: float, attributes: Mapping[str, Any], parent_id: str) -> Object:
        """A span of something that happened in an engine and has no id of its own. Its id follows from its parent's."""
        span_id = f"{(int(parent_id, 16) ^ _SALTS[name]) or 1:016x}"
        return self.make(name, INTERNAL, began_s, ended_s, attributes, span_id=span_id, parent_id=parent_id)

    def of_model(self, dialect: str) -> Object:
        provider = "vllm" if dialect.startswith("vllm") else PROVIDERS.get(dialect)
        return {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": self.model or None,
        }

    def _unix_ns(self, at_s: float) -> str:
        return str(int((self.trace.begun_unix_s + (at_s - self.trace.begun_s)) * 1e6) * 1000)


_SALTS = {"queue": 0x5175657565, "transfer": 0x7472616E73666572}


def _route(ended: EndedRequest) -> Object:
    trace, record = ended.trace, ended.record
    spans = _Spans(ended, trace.parent_id)
    usage = trace.attempts[-1].usage if trace.attempts else {}
    placement = record.placement
    attributes = {
        **spans.of_model("kvxfer"),
        "http.request.method": "POST",
        "http.route": record.route,
        "url.path": record.route,
        "http.response.status_code": ended.status or None,
        "http.request.body.size": record.prompt_bytes,
        "http.response.body.size": ended.answer_bytes,
        "gen_ai.request.max_tokens": trace.token_limit,
        "gen_ai.usage.input_tokens": told_count(usage.get("prompt_tokens")),
        "gen_ai.usage.output_tokens": told_count(usage.get("completion_tokens")),
        "kvxfer.request_id": record.request_id,
        "kvxfer.outcome": ended.outcome,
        "kvxfer.code": record.code or None,
        "kvxfer.stream": record.is_stream,
        "kvxfer.attempts": record.attempts,
        "kvxfer.ttft_s": None if record.first_byte_s is None else record.first_byte_s - record.arrived_s,
        "kvxfer.prefill": None if placement is None else "local" if placement.prefill is None else "remote",
        "kvxfer.reason": None if placement is None else record.alone_for.decode() or placement.reason.value,
    }
    error = "" if ended.outcome in _NO_ERROR else record.code or ended.outcome
    return spans.make(
        "route",
        SERVER,
        record.arrived_s,
        ended.ended_s,
        attributes,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        error=error,
        is_parent_remote=bool(trace.parent_id),
    )


def _of_attempt(spans: _Spans, number: int, attempt: AttemptTrace, first_s: float | None) -> list[Object]:
    pair = attempt.pair
    common = {
        **spans.of_model(attempt.dialect),
        "kvxfer.attempt": number,
        "kvxfer.dialect": attempt.dialect,
        "kvxfer.transfer_id": str(pair.transfer_id),
    }
    over_s = attempt.decode_ended_s
    made: list[Object] = []
    if pair.prefill is not None and attempt.prefill_sent_s is not None:
        made += _prefill(spans, common, attempt, pair.prefill, attempt.prefill_sent_s)
    if attempt.decode_sent_s is None or over_s is None:
        return made
    account = attempt.account
    decode = {
        **common,
        **_where(pair.decode),
        "kvxfer.reason": attempt.reason,
        "kvxfer.first_byte_s": None if first_s is None else first_s - attempt.decode_sent_s,
        "kvxfer.prefill": account.get("prefill"),
        "kvxfer.transfer.failure": account.get("failure") or account.get("code"),
        "gen_ai.usage.input_tokens": told_count(attempt.usage.get("prompt_tokens")),
        "gen_ai.usage.output_tokens": told_count(attempt.usage.get("completion_tokens")),
    }
    made.append(
        spans.make(
            "decode",
            CLIENT,
            attempt.decode_sent_s,
            over_s,
            decode,
            span_id=attempt.decode_id,
            parent_id=spans.trace.span_id,
            error=attempt.decode_failure,
        )
    )
    if pair.prefill is not None and account.get("prefill") != "local":
        made += _transfer(spans, attempt, attempt.decode_sent_s, over_s, first_s)
    return made


def _prefill(spans: _Spans, common: Object, attempt: AttemptTrace, worker: LegWorker, sent_s: float) -> list[Object]:
    said = attempt.prefilled
    timings = {} if said is None else said.timings
    queue_s, compute_s = told_seconds(timings.get("queue_s")), told_seconds(timings.get("prefill_s"))
    is_over = attempt.prefill_ended_s is not None
    over_s = attempt.prefill_ended_s if attempt.prefill_ended_s is not None else attempt.decode_ended_s or sent_s
    attributes = {
        **common,
        **_where(worker),
        "kvxfer.prefill.queue_s": queue_s,
        "kvxfer.prefill.compute_s": compute_s,
        "kvxfer.prefill.cached_tokens": None if said is None else told_count(said.cached_tokens),
        "kvxfer.cancelled": None if is_over else True,
    }
    made = [
        spans.make(
            "prefill",
            CLIENT,
            sent_s,
            over_s,
            attributes,
            span_id=attempt.prefill_id,
            parent_id=spans.trace.span_id,
            error=attempt.prefill_failure,
        )
    ]
    if queue_s is not None:
        left_s = max(sent_s, over_s - (compute_s or 0.0))
        made.append(spans.child("queue", max(sent_s, left_s - queue_s), left_s, {}, attempt.prefill_id))
    return made


def _transfer(
    spans: _Spans, attempt: AttemptTrace, sent_s: float, over_s: float, first_s: float | None
) -> list[Object]:
    account = attempt.account
    took_s = _transfer_s(account)
    prefilled_s = attempt.prefill_ended_s if not attempt.prefill_failure else None
    from_s = max(sent_s, prefilled_s or sent_s)
    if took_s is None:
        if first_s is None:
            return []
        began_s, ended_s = min(from_s, first_s), first_s
    elif first_s is not None:
        began_s, ended_s = max(sent_s, first_s - took_s), first_s
    else:
        began_s, ended_s = from_s, min(over_s, from_s + took_s)
    attributes = {
        "kvxfer.transfer_id": str(attempt.pair.transfer_id),
        "kvxfer.transfer.is_upper_bound": took_s is None,
        "kvxfer.transfer.lane": account.get("lane"),
        "kvxfer.transfer.bytes": told_count(account.get("bytes_moved", account.get("bytes"))),
    }
    return [spans.child("transfer", began_s, ended_s, attributes, attempt.decode_id)]


def _transfer_s(account: Mapping[str, Any]) -> float | None:
    """Without the wait for P: of kvxfer's engine by phase, of vLLM's connector as one number."""
    seconds = account.get("seconds")
    if isinstance(seconds, dict):
        phases = [told_seconds(seconds.get(name)) for name in ("plan", "wire", "confirm")]
        known = [phase for phase in phases if phase is not None]
        return sum(known) if known else None
    return told_seconds(account.get("wire_seconds"))


def _where(worker: LegWorker) -> Object:
    url = urlsplit(worker.url)
    return {"server.address": url.hostname, "server.port": url.port, "kvxfer.agent_id": worker.agent_id}


def _value(given: Any) -> Object | None:
    """As OTLP's ``AnyValue``; None for what is not known, or of no kind that a span has here."""
    if isinstance(given, bool):
        return {"boolValue": given}
    if isinstance(given, int):
        return {"intValue": str(given)}
    if isinstance(given, float):
        return {"doubleValue": round(given, 6)} if math.isfinite(given) else None
    if isinstance(given, str):
        return {"stringValue": given[:TEXT_CHARS_MAX]}
    return None
