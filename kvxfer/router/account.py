"""The router's account of one request, for a client that asks for it: which workers had it, and when each step was.

Decides names, units and bounds, and where the account stands in an answer: in the head of a whole answer, as a comment
before the last event of a stream, which every reader of events passes over. It tells what was noted for spans
(`tracing`); it must never know spans, sockets, or who asks. docs/router.md has the members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.openai.sse import encode_object
from kvxfer.openai.transfer_params import Part
from kvxfer.router.tracing import AttemptTrace, RequestFacts, RequestTrace, told_count, told_seconds

COMMENT = b": kvxfer-account "
BYTES_MAX = 4096
"""Of the whole; beyond it the engines' own words are left out."""
TEXT_CHARS_MAX = 128
_DECODE_SECONDS = ("queue_s", "ttft_s", "total_s", "wire_seconds")
_DECODE_COUNTS = ("bytes_moved", "bytes_before_prefill_end", "bytes", "early_bytes")
_DECODE_TEXTS = ("prefill", "lane", "failure", "code")
_TRANSFER_SECONDS = ("queue", "plan", "wire", "confirm")


class RequestAccount:
    """Of one request. Its values are those of the moment in which they are asked for."""

    __slots__ = ("_now", "_record", "_trace", "is_told")

    def __init__(self, record: RequestFacts, trace: RequestTrace, now: Callable[[], float]) -> None:
        self._record = record
        self._trace = trace
        self._now = now
        self.is_told = False
        """Whether the client has it already."""

    def values(self) -> dict[str, Any]:
        """Times are seconds after the request's arrival, by the router's monotonic clock; those that are not known are
        left out."""
        record, attempts = self._record, self._trace.attempts
        told: dict[str, Any] = {"request_id": record.request_id[:TEXT_CHARS_MAX], "attempts": record.attempts}
        if attempts:
            told |= _steps(attempts, record)
        for name, at_s in {**_times(attempts), "first_s": record.first_byte_s}.items():
            if at_s is not None:
                told[name] = self._after(at_s)
        told["ended_s"] = self._after(self._now())
        if record.code:
            told["code"] = record.code[:TEXT_CHARS_MAX]
        return told

    def header(self) -> bytes:
        """One line of visible ASCII."""
        self.is_told = True
        values = self.values()
        content = encode_object(values)
        if len(content) > BYTES_MAX:
            content = encode_object({name: value for name, value in values.items() if not isinstance(value, dict)})
        return content

    def comment(self) -> bytes:
        """What a stream has before its last event; empty where it was told before."""
        return b"" if self.is_told else COMMENT + self.header() + b"\n\n"

    def _after(self, at_s: float) -> float:
        return round(at_s - self._record.arrived_s, 6)


def _steps(attempts: list[AttemptTrace], record: RequestFacts) -> dict[str, Any]:
    """What is known of the last attempt, without its times."""
    last = attempts[-1]
    prefill = last.pair.prefill
    told: dict[str, Any] = {
        "dialect": last.dialect,
        "prefill_agent": None if prefill is None else record.told_name(prefill.agent_id, Part.PREFILL)[:TEXT_CHARS_MAX],
        "decode_agent": record.told_name(last.pair.decode.agent_id, Part.DECODE)[:TEXT_CHARS_MAX],
        "reason": record.alone_for.decode()[:TEXT_CHARS_MAX] or last.reason,
    }
    made = _prefilling(attempts)
    for name, failed in (("prefill_failure", last.prefill_failure), ("decode_failure", last.decode_failure)):
        if failed:
            told[name] = failed
    if made.prefilled is not None:
        timings = made.prefilled.timings
        said = {name: told_seconds(timings.get(name)) for name in ("queue_s", "prefill_s")}
        told["prefill"] = _known({**said, "cached_tokens": told_count(made.prefilled.cached_tokens)})
    if last.account:
        told["decode"] = _decode(last.account)
    return told


def _decode(account: Mapping[str, Any]) -> dict[str, Any]:
    parts = account.get("seconds")
    texts = {name: account.get(name) for name in _DECODE_TEXTS}
    told = _known(
        {
            **{name: told_seconds(account.get(name)) for name in _DECODE_SECONDS},
            **{name: told_count(account.get(name)) for name in _DECODE_COUNTS},
            **{name: text[:TEXT_CHARS_MAX] for name, text in texts.items() if isinstance(text, str)},
        }
    )
    if isinstance(parts, dict):
        told["seconds"] = _known({name: told_seconds(parts.get(name)) for name in _TRANSFER_SECONDS})
    return told


def _times(attempts: list[AttemptTrace]) -> dict[str, float | None]:
    """Of the last attempt. A prefill that was handed on to it is that of an attempt before."""
    if not attempts:
        return {}
    last, made = attempts[-1], _prefilling(attempts)
    return {
        "placed_s": last.placed_s,
        "prefill_sent_s": made.prefill_sent_s,
        "prefill_ended_s": made.prefill_ended_s,
        "decode_sent_s": last.decode_sent_s,
    }


def _prefilling(attempts: list[AttemptTrace]) -> AttemptTrace:
    """The attempt whose prefill the last one has."""
    last = attempts[-1]
    if not last.was_handed_over:
        return last
    return next((one for one in reversed(attempts) if one.prefill_sent_s is not None), last)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
