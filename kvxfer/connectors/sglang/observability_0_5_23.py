"""A rank's metrics and spans among SGLang 0.5.23's own. Decides their labels, and the form of spans there."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from sglang.srt.observability import trace as sglang_trace
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from kvxfer.connectors.sglang.metrics import RankMetrics
from kvxfer.observe import Span, is_traceparent, spans_to
from kvxfer.types import Role

log = logging.getLogger("kvxfer.sglang")

_exporting: list[contextlib.ExitStack] = []
"""Until the process ends."""


def rank_metrics(role: Role) -> RankMetrics | None:
    """Of this process's rank, with the labels of its scheduler's; ``None`` where SGLang was not asked for metrics."""
    if not get_observability().enable_metrics:
        return None
    parallel = get_parallel()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": role.value,
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels |= get_observability().extra_metric_labels or {}
    return RankMetrics({name: str(value) for name, value in labels.items()})


def traceparent_of(request: Any) -> str | None:
    """The W3C ``traceparent`` of SGLang's own span of a request; ``None`` where it does not trace it."""
    context = getattr(getattr(request, "time_stats", None), "trace_ctx", None)
    if context is None or not getattr(context, "tracing_enable", False):
        return None
    carrier = getattr(context, "_root_span_carrier", None)  # that of SGLANG_TRACE_ASYNC has it written already
    if not carrier and getattr(context, "root_span_context", None) is not None:
        from opentelemetry import propagate

        carrier = {}
        propagate.inject(carrier, context.root_span_context)
    traceparent = (carrier or {}).get("traceparent")
    return str(traceparent) if is_traceparent(traceparent) else None


def export_spans() -> None:
    """Have the spans of this process's requests exported as SGLang exports its own, where it traces. Callable twice."""
    if get_observability().enable_trace and not _exporting:
        _exporting.append(contextlib.ExitStack())
        _exporting[0].enter_context(spans_to(export))


def export(span: Span) -> None:
    """Where SGLang traces: as a child of its span of the request."""
    tracer = sglang_trace.tracer
    if span.parent is None or tracer is None:
        return
    from opentelemetry import propagate

    failure = {} if span.error is None else {"error.type": span.error}
    try:
        made = tracer.start_span(
            span.name,
            context=propagate.extract({"traceparent": span.parent}),
            start_time=span.started_unix_ns,
            attributes={**{f"kvxfer.{name}": value for name, value in span.attributes.items()}, **failure},
        )
        made.end(end_time=span.started_unix_ns + span.duration_ns)
    except Exception:
        log.exception("a span could not be exported")
