"""How much the holder of an API key may ask for: requests and tokens a minute, and requests at once.

Pure: time comes in. Decides whether one more request may begin, and when it may where it may not. Several processes may
count for one holder (:class:`SharedMeter`): each has its own bucket, and takes off what the others say they used. It
must never know a key, nor what is asked for.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

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


class SharedUse(Protocol):
    """What several processes used of one limit of one holder."""

    @property
    def quiet_s(self) -> float:
        """Until that time the other processes used nothing that :meth:`news` did not tell."""

    def begin(self, full: float, now: float) -> tuple[float, float]:
        """A bucket begins here: its level, and the time of that. All that was used until then is in that level."""

    def add(self, amount: float) -> None:
        """This process used so much more."""

    def news(self) -> float:
        """What the other processes used since the last call, or since the beginning; below 0 where they gave back."""


class SharedMeter(Protocol):
    """Where several processes count for one holder: their use, as each of them sees it."""

    @property
    def requests(self) -> SharedUse: ...

    @property
    def tokens(self) -> SharedUse: ...

    def inflight(self) -> int:
        """Of all processes."""

    def add_inflight(self, count: int) -> None:
        """This process has so many more."""

    def attend(self, meter: KeyMeter | None) -> None:
        """That meter counts here now, and is to ``look`` often."""


class MinuteBucket:
    """Fills with ``per_minute`` units a minute, and holds as many, at least one. It begins full. What is taken may
    leave it below zero: then that is paid back first. ``now`` is in seconds; a step back counts as standing still.

    With ``shared``, it is one process's copy of a bucket of several. It differs from that one by what the bucket fills
    with between two looks, at most: what others used is taken off where it is seen, not when they used it.
    """

    __slots__ = ("_at", "_level", "_per_minute", "_shared")

    def __init__(self, per_minute: float, now: float, shared: SharedUse | None = None) -> None:
        self._per_minute = per_minute
        self._shared = shared
        if shared is None:
            self._level, self._at = self.capacity, now
        else:
            self._level, self._at = shared.begin(self.capacity, now)

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
        self.look(now)
        missing = min(amount, self.capacity) - self._level
        if missing <= _ROUNDING * self.capacity:
            return 0.0
        return missing / self._per_minute * MINUTE_S

    def take(self, amount: float, now: float) -> None:
        """Also more than there is."""
        self.look(now)
        self._change(-amount)

    def put_back(self, amount: float, now: float) -> None:
        """Undo what was taken; a negative ``amount`` takes more."""
        self.look(now)
        self._change(amount)

    def resize(self, per_minute: float, now: float) -> None:
        """Another bound: what was used stays used, as far as the new bucket can hold."""
        self.look(now)
        before = self.capacity
        self._per_minute = per_minute
        self._level = min(self.capacity, self._level + max(0.0, self.capacity - before))

    def look(self, now: float) -> None:
        """Count what others used, and the time that went by."""
        if self._shared is not None:
            self._fill(self._shared.quiet_s)
            self._level = self._level - self._shared.news()
        self._fill(now)

    def leave(self) -> None:
        """It is not one of several any more; what is put back from now on stays here."""
        self._shared = None

    def _change(self, amount: float) -> None:
        """More than the bucket holds is lost here, so the others are not told of it either."""
        before = self._level
        self._level = min(self.capacity, before + amount)
        if self._shared is not None:
            self._shared.add(before - self._level)

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level += (now - self._at) / MINUTE_S * self._per_minute
            self._at = now
        self._level = min(self.capacity, self._level)


class KeyMeter:
    """What one holder of keys has used of its limits. With ``shared``, the limits are those of several processes
    together; each has a meter."""

    def __init__(self, limits: KeyLimits, now: float, shared: SharedMeter | None = None) -> None:
        self.inflight = 0
        """In this process."""
        self._shared: SharedMeter | None = None
        self._requests: MinuteBucket | None = None
        self._tokens: MinuteBucket | None = None
        self.adopt(limits, now, shared)

    def adopt(self, limits: KeyLimits, now: float, shared: SharedMeter | None = None) -> None:
        """Other limits from now on; requests that run are not refused any more."""
        if shared is not self._shared:
            self._count_in(shared)
        self.limits = limits
        uses = (None, None) if shared is None else (shared.requests, shared.tokens)
        self._requests = _bucket(self._requests, limits.requests_per_minute, now, uses[0])
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now, uses[1])

    def leave(self) -> None:
        """Its holder is gone: what still runs ends without being counted in other processes."""
        self._count_in(None)

    def look(self, now: float) -> None:
        """Take note of what other processes used."""
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.look(now)

    def levels(self, now: float) -> tuple[float | None, float | None]:
        """Of requests and of tokens; None where there is no bound."""
        self.look(now)
        found = [None if bucket is None else bucket.level for bucket in (self._requests, self._tokens)]
        return found[0], found[1]

    def enter(self, now: float) -> KeyPass | KeyRefusal:
        """Begin one request, and count it; a refused one is not counted. The pass must be ended."""
        bound, shared = self.limits.max_inflight, self._shared
        if bound and (self.inflight if shared is None else shared.inflight()) >= bound:
            return KeyRefusal(LimitKind.INFLIGHT, bound, INFLIGHT_RETRY_S)
        requests, tokens = self._requests, self._tokens
        if requests is not None and (wait_s := requests.wait_s(1.0, now)):
            return KeyRefusal(LimitKind.REQUESTS, requests.per_minute, wait_s)
        if tokens is not None and (wait_s := tokens.wait_s(1.0, now)):  # before its body is read
            return KeyRefusal(LimitKind.TOKENS, tokens.per_minute, wait_s)
        if requests is not None:
            requests.take(1.0, now)
        self._count(1)
        return KeyPass(self, requests, tokens)

    def ended(self) -> None:
        """One that was let in is over."""
        self._count(-1)

    def _count(self, count: int) -> None:
        self.inflight += count
        if self._shared is not None:
            self._shared.add_inflight(count)

    def _count_in(self, shared: SharedMeter | None) -> None:
        """What runs moves there; buckets begin there anew."""
        if self._shared is not None:
            self._shared.add_inflight(-self.inflight)
            self._shared.attend(None)
        for bucket in (self._requests, self._tokens):
            if bucket is not None:
                bucket.leave()
        self._requests = self._tokens = None
        self._shared = shared
        if shared is not None:
            shared.add_inflight(self.inflight)
            shared.attend(self)


def _bucket(
    before: MinuteBucket | None, per_minute: float, now: float, shared: SharedUse | None
) -> MinuteBucket | None:
    if not per_minute:
        if before is not None:
            before.leave()
        return None
    if before is None:
        return MinuteBucket(per_minute, now, shared)
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
        if self._requests is not None and (self._is_refused or not is_counted):
            self._requests.put_back(1.0, now)
        if self._tokens is not None and self._reserved is not None and tokens is not None:
            self._tokens.put_back(self._reserved - tokens, now)
        self._meter.ended()
