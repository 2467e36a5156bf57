"""Which watched processes are alive, guessed from the rhythm of their heartbeats; must never know what a heartbeat
carries or what follows from the guess.

A key whose heartbeat came lately is alive. After one or two missed ones it is suspect, and gets nothing new. After a
long silence it is dead.

A watcher that did not run itself, for instance because its host was suspended, has heard no heartbeats either, and must
not take all keys for dead. So ages are not measured on the clock but on an *awake clock*: each observation advances it
by the time that passed, and by at most ``gap_max_ns`` for any one gap. A watcher that is scheduled as it should be
never reaches that bound. One that was stopped for a minute counts that minute as one gap, reads the heartbeats that
queued up meanwhile, and judges then. The bound is above zero, so a watcher that is always late gets slow, not blind.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Generic, TypeVar

from kvxfer.errors import InvalidArgumentError

Key = TypeVar("Key")


class Light(enum.Enum):
    """What the rhythm says: GREEN on time, YELLOW late, RED gone."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclasses.dataclass(frozen=True)
class LivenessLimits:
    """Ages at which the light changes, and the longest time that one gap between observations may count for; all in
    nanoseconds.
    """

    suspect_after_ns: int
    dead_after_ns: int
    gap_max_ns: int

    def __post_init__(self) -> None:
        if not 0 < self.suspect_after_ns < self.dead_after_ns or self.gap_max_ns <= 0:
            raise InvalidArgumentError(f"{self} needs 0 < suspect_after_ns < dead_after_ns and gap_max_ns > 0")

    def light(self, age_ns: int, stretch: float = 1.0) -> Light:
        """The light for a last heartbeat ``age_ns`` of awake time ago, by ages that are ``stretch`` times longer."""
        if age_ns < self.suspect_after_ns * stretch:
            return Light.GREEN
        return Light.YELLOW if age_ns < self.dead_after_ns * stretch else Light.RED


class AwakeClock:
    """Time that the watcher itself was running: each gap between observations counts for ``gap_max_ns`` at most."""

    def __init__(self, now_ns: int, *, gap_max_ns: int) -> None:
        self._last_ns = now_ns
        self._gap_max_ns = gap_max_ns
        self._awake_ns = 0

    def observe(self, now_ns: int) -> int:
        """Awake nanoseconds since construction; a ``now_ns`` older than the last one counts as no time."""
        self._awake_ns += min(max(now_ns - self._last_ns, 0), self._gap_max_ns)
        self._last_ns = max(now_ns, self._last_ns)
        return self._awake_ns


class Liveness(Generic[Key]):
    """The lights of many, by key."""

    def __init__(self, limits: LivenessLimits, now_ns: int) -> None:
        self._limits = limits
        self._clock = AwakeClock(now_ns, gap_max_ns=limits.gap_max_ns)
        self._seen: dict[Key, tuple[int, float]] = {}
        """The awake time of the last heartbeat, and the stretch by which the next one is judged."""

    def beat(self, key: Key, now_ns: int, stretch: float = 1.0) -> None:
        """``key`` gave a heartbeat just now, and may take ``stretch`` times as long for the next as the limits say; an
        unknown key becomes known."""
        self._seen[key] = (self._clock.observe(now_ns), stretch)

    def stretch(self, key: Key, stretch: float) -> None:
        """A known ``key`` may take at least ``stretch`` times as long for its next heartbeat as the limits say. Raises
        KeyError for an unknown one."""
        seen_ns, before = self._seen[key]
        self._seen[key] = (seen_ns, max(before, stretch))

    def forget(self, key: Key) -> None:
        """``key`` is not watched any more; harmless if it never was."""
        self._seen.pop(key, None)

    def observe(self, now_ns: int) -> int:
        """Let time pass without judging; returns the awake nanoseconds since construction."""
        return self._clock.observe(now_ns)

    def light(self, key: Key, now_ns: int) -> Light:
        """The light of a known ``key``; raises KeyError for an unknown one."""
        seen_ns, stretch = self._seen[key]
        return self._limits.light(self._clock.observe(now_ns) - seen_ns, stretch)

    def __contains__(self, key: Key) -> bool:
        return key in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def __repr__(self) -> str:
        return f"<Liveness watching {len(self)}, {self._limits}>"
