"""What is noted of a request whose trace is exported, or whose client asks for its account: span ids, which its legs
carry, and the times of its steps.

Decides which requests are traced, and the ``traceparent`` of each leg. Spans are made when the request is over, in
another thread (`otlp`), of what was noted here (`spans`); so is what a client is told (`account`). It must never know
how either is written or sent.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvxfer.observe import traceparent_of
from kvxfer.openai.transfer_params import Part
from kvxfer.policy.place import Placement
from kvxfer.router.dialects import Pair, Prefilled
from kvxfer.router.failure import Failure

SAMPLED = 1
"""The bit of the trace flags that says that a trace is recorded."""
TEXT_CHARS_MAX = 256
_TOLD = (
    *("prefill", "failure", "code", "lane", "bytes_moved", "bytes", "wire_seconds", "plan", "wire", "confirm"),
    *("queue_s", "prefill_s", "prompt_tokens", "completion_tokens", "queue", "ttft_s", "total_s"),
    *("bytes_before_prefill_end", "early_bytes"),
)
_NEW_FLAGS = {True: "01", False: "00"}


def _new_id(bits: int) -> str:
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"


class AttemptTrace:
    """One attempt: which workers, when each leg was sent and over, and what its answers say of it."""

    __slots__ = (
        "account",
        "decode_ended_s",
        "decode_failure",
        "decode_id",
        "decode_sent_s",
        "dialect",
        "pair",
        "placed_s",
        "prefill_ended_s",
        "prefill_failure",
        "prefill_id",
        "prefill_sent_s",
        "prefilled",
        "reason",
        "usage",
        "was_handed_over",
    )

    def __init__(self, pair: Pair, dialect: str, reason: str, placed_s: float | None = None) -> None:
        self.pair = pair
        self.dialect = dialect
        self.reason = reason
        self.placed_s = placed_s
        """When its workers were chosen."""
        self.was_handed_over = False
        """Its prefill is that of an attempt before."""
        self.prefill_id = "" if pair.prefill is None else _new_id(64)
        self.decode_id = _new_id(64)
        self.prefill_sent_s: float | None = None
        self.prefill_ended_s: float | None = None
        """When P's whole answer was there, or its leg failed."""
        self.decode_sent_s: float | None = None
        self.decode_ended_s: float | None = None
        self.prefill_failure = ""
        self.decode_failure = ""
        self.prefilled: Prefilled | None = None
        self.account: dict[str, Any] = {}
        """Of D's own account of the transfer, what spans tell."""
        self.usage: Mapping[str, Any] = {}

    def failed(self, part: Part, failure: Failure, now_s: float) -> None:
        """A leg failed. What ended it first counts."""
        if part is Part.PREFILL and not self.prefill_failure:
            self.prefill_failure, self.prefill_ended_s = failure.kind.value, now_s
        elif part is Part.DECODE and not self.decode_failure:
            self.decode_failure, self.decode_ended_s = failure.kind.value, now_s

    def end(self, now_s: float) -> None:
        """Both legs are over."""
        if self.decode_ended_s is None:
            self.decode_ended_s = now_s

    def heard(self, prefilled: Prefilled | None, account: Mapping[str, Any], usage: Mapping[str, Any]) -> None:
        """What the workers said so far."""
        self.prefilled = prefilled and Prefilled(prefilled.cached_tokens, _told(prefilled.timings))
        self.account, self.usage = _told(account), _told(usage)
        if isinstance(account.get("seconds"), dict):
            self.account["seconds"] = _told(account["seconds"])


def _told(said: Mapping[str, Any]) -> dict[str, Any]:
    """What spans tell of an account, of timings or a usage: an engine wrote it, it may have any size, and it waits
    here."""
    told = {name: said[name] for name in _TOLD if isinstance(said.get(name), (int, float))}
    return told | {name: said[name][:TEXT_CHARS_MAX] for name in _TOLD if isinstance(said.get(name), str)}


def told_seconds(value: Any) -> float | None:
    """A time that an engine told; None for what is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e6 else None  # neither NaN nor 1e400 is


def told_count(value: Any) -> int | None:
    """A number of tokens or bytes that an engine told; None for what is none."""
    return value if type(value) is int and 0 <= value < 1 << 62 else None


class RequestTrace:
    """One request: its place in its client's trace. ``begun_unix_s`` is the wall clock's time at ``begun_s``."""

    __slots__ = ("attempts", "begun_s", "begun_unix_s", "flags", "parent_id", "span_id", "token_limit", "trace_id")

    def __init__(self, trace_id: str, parent_id: str, flags: str, begun_s: float, begun_unix_s: float) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        """The client's span; empty where the trace begins here."""
        self.span_id = _new_id(64)
        self.flags = flags
        self.begun_s = begun_s
        self.begun_unix_s = begun_unix_s
        self.token_limit: int | None = None
        self.attempts: list[AttemptTrace] = []

    @property
    def is_sampled(self) -> bool:
        return bool(int(self.flags, 16) & SAMPLED)

    @classmethod
    def for_account(cls, begun_s: float) -> RequestTrace:
        """Of a request that is noted for its client only: it is not exported, and its legs carry no span of it."""
        return cls("", "", _NEW_FLAGS[False], begun_s, 0.0)

    def traceparent(self, span_id: str = "") -> str:
        """What a leg carries whose span is ``span_id``; without one: the request's own span."""
        return f"00-{self.trace_id}-{span_id or self.span_id}-{self.flags}"

    def attempt(self, pair: Pair, dialect: str, reason: str, placed_s: float | None = None) -> AttemptTrace:
        made = AttemptTrace(pair, dialect, reason, placed_s)
        self.attempts.append(made)
        return made


class RequestFacts(Protocol):
    """What spans say of a request beside its times: its record."""

    route: str
    request_id: str
    arrived_s: float
    model: str
    is_stream: bool
    prompt_bytes: int
    placement: Placement | None
    attempts: int
    alone_for: bytes
    first_byte_s: float | None
    code: str

    def told_name(self, agent_id: str, part: Part) -> str:
        """What its client is told of the worker that had this part."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndedRequest:
    """Everything that spans are made of. Nothing of it changes any more."""

    trace: RequestTrace
    record: RequestFacts
    outcome: str
    status: int
    answer_bytes: int
    ended_s: float


class Tracer:
    """Of one router. ``export`` takes an ended request; it is called on the event loop and must return at once.

    A client that sent a ``traceparent`` has decided whether its request is recorded; of the others a share is.
    """

    def __init__(
        self,
        export: Callable[[EndedRequest], None],
        *,
        share: float = 1.0,
        draw: Callable[[], float] = random.random,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self.export = export
        self._share = share
        self._draw = draw
        self._unix = unix

    def begin(self, received: bytes | None, now_s: float) -> RequestTrace:
        """Join the trace of the client's ``traceparent``, or begin one."""
        known = None if received is None else traceparent_of(received.decode("latin-1"))
        if known is not None:
            _, trace_id, parent_id, flags = known.split("-")
        else:
            trace_id, parent_id, flags = _new_id(128), "", _NEW_FLAGS[self._draw() < self._share]
        return RequestTrace(trace_id, parent_id, flags, now_s, self._unix())
