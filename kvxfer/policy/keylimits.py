"""How much the holder of an API key may ask for: requests and tokens a minute, and requests at once.

Pure: time comes in. Decides whether one more request may begin, and when it may where it may not. It must never know a
key, nor what is asked for.
"""

from __future__ import annotations

import dataclasses
import enum

from kvxfer.errors import ConfigError

MINUTE_S = 60.0
BOUND_MAX = 1e12
INFLIGHT_RETRY_S = 1.0
"""When to ask again where too many requests run: it is not known when one ends."""
_ROUNDING = 1e-9
"""Of a bucket: what floating point may lose while it fills."""


class LimitKind(enum.StrEnum):
    """Which limit refused a request."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    INFLIGHT = "inflight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """0 is no bound. Raises ConfigError for a bad value."""

    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    max_inflight: int = 0
    """Requests at once, from their head to the end of their answer. A connection carries one request at a time, so
    these are also the connections at work."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= BOUND_MAX:
                raise ConfigError(f"{field.name} must be 0 to {BOUND_MAX:g}, where 0 is no bound, not {value!r}")


@dataclasses.dataclass(frozen=True)
class KeyRefusal:
    """``bound`` is the limit's own; the request may be admitted after ``retry_after_s``, if no other comes first."""

    limit: LimitKind
    bound: float
    retry_after_s: float


class MinuteBucket:
    """Fills with ``per_minute`` units a minute, and holds as many, at least one. It begins full. What is taken may
    leave it below zero: then that is paid back first. ``now`` is in seconds; a step back counts as standing still.
    """

    __slots__ = ("_at", "_level", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._level = self.capacity
        self._at = now

    @property
    def per_minute(self) -> float:
        return self._per_minute

    @property
    def capacity(self) -> float:
        return max(1.0, self._per_minute)

    @property
    def level(self) -> float:
        """As of the last call that had the time."""
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount`` may be taken; 0 for now. More than it holds may be taken when it is full."""
        self._fill(now)
        missing = min(amount, self.capacity) - self._level
        if missing <= _ROUNDING * self.capacity:
            return 0.0
        return missing / self._per_minute * MINUTE_S

    def take(self, amount: float, now: float) -> None:
        """Also more than there is."""
        self._fill(now)
        self._level -= amount

    def put_back(self, amount: float, now: float) -> None:
        """Undo what was taken; a negative ``amount`` takes more."""
        self._fill(now)
        self._level = min(self.capacity, self._level + amount)

    def resize(self, per_minute: float, now: float) -> None:
        """Another bound: what was used stays used, as far as the new bucket can hold."""
        self._fill(now)
        before = self.capacity
        self._per_minute = per_minute
        self._level = min(self.capacity, self._level + max(0.0, self.capacity - before))

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) / MINUTE_S * self._per_minute)
            self._at = now


class KeyMeter:
    """What one holder of keys has used of its limits."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self.inflight = 0
        self._requests = _bucket(None, limits.requests_per_minute, now)
        self._tokens = _bucket(None, limits.tokens_per_minute, now)

    def adopt(self, limits: KeyLimits, now: float) -> None:
        """Other limits from now on; requests that run are not refused any more."""
        self.limits = limits
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def enter(self, now: float) -> KeyPass | KeyRefusal:
        """Begin one request, and count it; a refused one is not counted. The pass must be ended."""
        bound = self.limits.max_inflight
        if bound and self.inflight >= bound:
            return KeyRefusal(LimitKind.INFLIGHT, bound, INFLIGHT_RETRY_S)
        requests, tokens = self._requests, self._tokens
        if requests is not None and (wait_s := requests.wait_s(1.0, now)):
            return KeyRefusal(LimitKind.REQUESTS, requests.per_minute, wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(1.0, now)):  # before its body is read
            return KeyRefusal(LimitKind.TOKENS, tokens.per_minute, wait_s)
        if requests is not None:
            requests.take(1.0, now)
        self.inflight += 1
        return KeyPass(self, requests, tokens)


def _bucket(before: MinuteBucket | None, per_minute: float, now: float) -> MinuteBucket | None:
    if not per_minute:
        return None
    if before is None:
        return MinuteBucket(per_minute, now)
    before.resize(per_minute, now)
    return before


class KeyPass:
    """One request of a holder: what it took, so that as much and no more is given back. Made by a KeyMeter."""

    __slots__ = ("_is_ended", "_is_refused", "_meter", "_requests", "_reserved", "_tokens")

    def __init__(self, meter: KeyMeter, requests: MinuteBucket | None, tokens: MinuteBucket | None) -> None:
        self._meter = meter
        self._requests = requests
        self._tokens = tokens
        self._reserved: float | None = None
        self._is_refused = False
        self._is_ended = False

    @property
    def reserved(self) -> float:
        """Tokens that were taken for it."""
        return self._reserved or 0.0

    def reserve(self, tokens: float, now: float) -> KeyRefusal | None:
        """Take as many tokens as it may cost, once. Where they are refused none is taken, and the request's own count
        is undone when it ends. A second call, and one after the end, does nothing."""
        if self._is_ended or self._reserved is not None:
            return None
        bucket = self._tokens
        if bucket is not None:
            wait_s = bucket.wait_s(tokens, now)
            if wait_s:
                self._is_refused = True
                return KeyRefusal(LimitKind.TOKENS, bucket.per_minute, wait_s)
            bucket.take(tokens, now)
        self._is_refused = False
        self._reserved = tokens
        return None

    def end(self, now: float, tokens: float | None = None, *, is_counted: bool = True) -> None:
        """The request is over, and cost ``tokens``; None: what was reserved. ``is_counted``: whether it was a request
        at all. A second call does nothing."""
        if self._is_ended:
            return
        self._is_ended = True
        self._meter.inflight -= 1
        if self._requests is not None and (self._is_refused or not is_counted):
            self._requests.put_back(1.0, now)
        if self._tokens is not None and self._reserved is not None and tokens is not None:
            self._tokens.put_back(self._reserved - tokens, now)
