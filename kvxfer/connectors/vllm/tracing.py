"""kvxfer's spans, exported through vLLM's tracing (``--otlp-traces-endpoint``). Decides their form there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.observe import Span


def vllm_sink(vllm_config: Any) -> Callable[[Span], None] | None:
    """What exports spans of requests as vLLM exports its own; ``None`` where it does not trace, or cannot be asked."""
    observability = getattr(vllm_config, "observability_config", None)
    if getattr(observability, "otlp_traces_endpoint", None) is None:
        return None
    try:
        from vllm.tracing import extract_trace_context, instrument_manual
    except ImportError:
        return None

    def export(span: Span) -> None:
        if span.parent is None:
            return
        failure = {} if span.error is None else {"error.type": span.error}
        instrument_manual(
            span.name,
            span.started_unix_ns,
            span.started_unix_ns + span.duration_ns,
            attributes={**{f"kvxfer.{name}": value for name, value in span.attributes.items()}, **failure},
            context=extract_trace_context({"traceparent": span.parent}),
        )

    return export
