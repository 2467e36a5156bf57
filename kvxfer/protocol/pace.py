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

RETURNS_A_S = 250.0
"""How many registrations a second a coordinator asks for, when all its agents come back: half of what a core takes."""
DOUBT_MAX = 20
"""After so many times ``dead_after`` a coordinator doubts itself no longer."""
LATE_MIN, LATE_SHARE = 32, 1 / 8
"""If more agents than either are late at the same time, it is more likely that the coordinator is."""
DURATION_MAX_S = 3600.0
"""No duration that is told is longer."""


class SelfDoubt:
    """Whether so many agents are late at once that their silence says nothing of each; not for ever."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self.has_ended = False
        """Whether it ended at the last judgement, because most of the agents were heard again."""

    def holds(self, late: int, agents: int, awake_ns: int, dead_after_ns: float) -> bool:
        """Whether none of the ``agents`` is to end for silence at ``awake_ns``, when so many are ``late``."""
        is_many = late > max(LATE_MIN, agents * LATE_SHARE)
        self.has_ended = self._since_ns is not None and not is_many
        if not is_many:
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = awake_ns
        return self._since_ns is not None and awake_ns - self._since_ns < DOUBT_MAX * dead_after_ns


@dataclasses.dataclass(frozen=True)
class ToldPace:
    """What one agent was told, in milliseconds: how often it is to give a heartbeat, after which silence it counts as
    dead, and over how long it spreads each attempt to come back after a loss."""

    heartbeat_ms: int
    dead_after_ms: int
    return_within_ms: int = 0

    def patience_s(self, *, has_other: bool) -> float:
        """How long the coordinator may be silent, in seconds. Where there is another one (``has_other``) that is half
        the time in which this one takes a silent agent for dead, so that a cut between the two finds the agent
        elsewhere and does not end it."""
        return max(self.dead_after_ms / (2 if has_other else 1), 2 * self.heartbeat_ms) / 1e3


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

    def more_for_return(self, agents: int) -> float:
        """By how much the stretch grows for an agent without a connection, so that ``dead_after`` and the time over
        which so many ``agents`` spread their return both pass before it counts as dead."""
        return min(agents / RETURNS_A_S, DURATION_MAX_S) / self.dead_after_s

    def told(self, stretch: float, agents: int) -> ToldPace:
        """What an agent is told while there are so many ``agents``."""
        dead_after_ms = round(self.dead_after_s * stretch * 1e3)
        return ToldPace(
            round(self.heartbeat_s * stretch * 1e3),
            dead_after_ms,
            min(round(agents / RETURNS_A_S * 1e3), round(DURATION_MAX_S * 1e3)),
        )


class CoordinatorPace:
    """What one coordinator tells its agents now.

    A restarted coordinator has few agents at first, and would tell them short durations just when all of them come
    back, and it is slow. So each agent that comes back says what it was told, and until the coordinator has settled, it
    tells durations for that many.
    """

    def __init__(self, pace: Pace, agents_max: int) -> None:
        """It expects at most ``agents_max`` agents, whatever they say."""
        self._pace = pace
        self._agents_max = agents_max
        self._expected = 0
        self._told, self._told_agents = pace.told(1.0, 0), 0
        self.longest_stretch = 1.0
        """The greatest that was told, or that grace was given by."""

    def expect(self, return_within_ms: int) -> None:
        """An agent came back that was told that duration by a coordinator before."""
        self._expected = max(self._expected, min(round(return_within_ms / 1e3 * RETURNS_A_S), self._agents_max))

    def expect_no_more(self) -> None:
        """All that will come back are back."""
        self._expected = 0

    @property
    def returns_ns(self) -> float:
        """Over how long those that are expected spread."""
        return self._expected / RETURNS_A_S * 1e9

    def stretch(self, agents: int) -> float:
        """By how much durations grow now."""
        stretch = self._pace.stretch(max(agents, self._expected))
        self.longest_stretch = max(self.longest_stretch, stretch)
        return stretch

    def stretch_of_absent(self, agents: int) -> float:
        """The stretch by which one of ``agents`` is judged that has no connection, and waits for its turn to come
        back."""
        return self.stretch(agents) + self._pace.more_for_return(max(agents, self._expected))

    def stretch_of(self, promised_ms: int) -> float:
        """As :meth:`Pace.stretch_of`."""
        return self._pace.stretch_of(promised_ms, longest=self.longest_stretch)

    def told(self, agents: int) -> ToldPace:
        """What an agent is to be told now, of so many ``agents``."""
        agents = max(agents, self._expected)
        if agents != self._told_agents:
            self._told, self._told_agents = self._pace.told(self.stretch(agents), agents), agents
        return self._told
