"""Records of a load test that no request made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvxfer.load.record import MeasuredRequest
from kvxfer.load.run import LoadRun


def answered(number: int, due_s: float, *, ttft_s: float = 0.1, tpot_s: float = 0.01, **more: Any) -> MeasuredRequest:
    """A request answered whole, with 11 tokens unless ``output_tokens`` says otherwise."""
    tokens = more.pop("output_tokens", 11)
    first = due_s + ttft_s
    last = first + tpot_s * (tokens - 1)
    values: dict[str, Any] = {
        "sent_s": due_s,
        "first_s": first,
        "last_s": last,
        "end_s": last,
        "output_tokens": tokens,
        "tokens_from": "usage",
        "chunks": tokens,
        "longest_gap_s": tpot_s if tokens > 1 else None,
        "status": 200,
    }
    return MeasuredRequest("run", number, f"r{number}", due_s, 8, tokens, **{**values, **more})


def failed(number: int, due_s: float, error: str = "status_503", **more: Any) -> MeasuredRequest:
    values: dict[str, Any] = {"sent_s": due_s, "end_s": due_s + 0.01, "error": error}
    return MeasuredRequest("run", number, f"r{number}", due_s, 8, 11, **{**values, **more})


def run_of(records: Iterable[MeasuredRequest], seconds: float = 10.0, **more: Any) -> LoadRun:
    return LoadRun("run", "native", 0.0, (0.0, seconds), records=list(records), **more)
