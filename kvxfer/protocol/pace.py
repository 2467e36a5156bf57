"""How often agents give heartbeats, by how many there are. Decides the durations that a coordinator tells its agents;
must never know an agent, a clock or a message.

A coordinator takes a bounded number of heartbeats a second, whatever the number of its agents: as it fills, it tells
them a longer interval. All other durations grow by the same factor, the *stretch*: what counts as late or dead, and
over how long agents spread when all of them lost their connection at once. Below the bound the stretch is 1, and every
duration is the configured one.

An agent is never judged by an interval that it has not heard of. Each heartbeat promises when the next one comes, and
that promise is what the agent is measured by, up to the longest interval that was ever told
(:meth:`Pace.stretch_of`). So it does not matter how late an agent hears of a new interval, nor in which direction the
interval changed.
"""

from __future__ import annotations

import dataclasses
import math

from kvxfer.errors import InvalidArgumentError

RETURNS_A_S = 500.0
"""How many registrations a second a coordinator asks for, when all its agents come back."""
SETTLING_MAX = 20
"""After so many times ``dead_after`` a restarted coordinator waits no longer, even if agents still come back."""
LATE_MIN, LATE_SHARE = 32, 1 / 8
"""If more agents than either are late at the same time, it is more likely that the coordinator is."""
DURATION_MAX_S = 3600.0
"""No duration that is told is longer."""


class SelfDoubt:
    """Whether so many agents are late at once that their silence says nothing of each; not for ever."""

    def __init__(self) -> None:
        self._since_ns: int | None = None

    def holds(self, late: int, agents: int, awake_ns: int, dead_after_ns: float) -> bool:
        """Whether none of the ``agents`` is to end for silence at ``awake_ns``, when so many are ``late``."""
        if late <= max(LATE_MIN, agents * LATE_SHARE):
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = awake_ns
        return self._since_ns is not None and awake_ns - self._since_ns < SETTLING_MAX * dead_after_ns


@dataclasses.dataclass(frozen=True)
class ToldPace:
    """What one agent was told, in milliseconds: how often it is to give a heartbeat, after which silence it counts as
    dead, and over how long it spreads its return after a loss."""

    heartbeat_ms: int
    dead_after_ms: int
    return_within_ms: int = 0

    def patience_s(self, *, has_other: bool) -> float:
        """How long the coordinator may be silent, in seconds. Where there is another one (``has_other``) that is half
        the time in which this one takes a silent agent for dead, so that a cut between the two finds the agent
        elsewhere and does not end it."""
        return max(self.dead_after_ms / (2 if has_other else 1), 2 * self.heartbeat_ms) / 1e3

    def returns_s(self, *, has_other: bool) -> tuple[float, float]:
        """Over how long the agent spreads its first attempt to come back, and the later ones, in seconds.

        The first one comes before silence means death, however late the loss was noticed. A coordinator that is lost
        for all of its agents does not answer that one, and waits for them when it is there again; where there is
        another one, the agent is to be there in time.
        """
        unheard_s = self.patience_s(has_other=True) if has_other else self.heartbeat_ms / 1e3
        again_s = self.return_within_ms / 1e3
        first_s = min(again_s, max(0.0, self.dead_after_ms / 1e3 - unheard_s) / 2)
        return first_s, first_s if has_other else again_s


@dataclasses.dataclass(frozen=True)
class Pace:
    """The rule of one coordinator. ``heartbeat_s`` and ``dead_after_s``: the shortest interval and the silence that
    ends an agent, in seconds; ``heartbeats_a_s_max``: how many heartbeats of all agents together it takes each second.
    Raises InvalidArgumentError unless all are above zero, and the first below the second."""

    heartbeat_s: float
    dead_after_s: float
    heartbeats_a_s_max: float = math.inf

    def __post_init__(self) -> None:
        if not (0 < self.heartbeat_s < self.dead_after_s and self.heartbeats_a_s_max > 0):
            raise InvalidArgumentError(f"{self} needs 0 < heartbeat_s < dead_after_s and heartbeats_a_s_max > 0")

    def stretch(self, agents: int) -> float:
        """By how much all durations grow with so many agents: 1 or more, never less with more agents, and never more
        than lets ``dead_after_s`` be DURATION_MAX_S."""
        longest = DURATION_MAX_S / self.dead_after_s
        return max(1.0, min(agents / (self.heartbeats_a_s_max * self.heartbeat_s), longest))

    def stretch_of(self, promised_ms: int, *, longest: float) -> float:
        """The stretch by which an agent is judged that promised its next heartbeat within ``promised_ms``: at most
        ``longest``, the greatest that was told, and that for 0, which is no promise."""
        if promised_ms == 0:
            return longest
        return min(max(1.0, promised_ms / 1e3 / self.heartbeat_s), longest)

    def told(self, stretch: float, agents: int) -> ToldPace:
        """What an agent is told while there are so many ``agents``."""
        dead_after_ms = round(self.dead_after_s * stretch * 1e3)
        return ToldPace(
            round(self.heartbeat_s * stretch * 1e3),
            dead_after_ms,
            min(round(agents / RETURNS_A_S * 1e3), dead_after_ms * 2 // 3),
        )
