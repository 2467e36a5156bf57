"""The leg keys of now: which period it is, and what routers and workers are given in it.

Decides that a worker knows the key of the next period before any router shows it, and that of the last one for as long
as a period: so neither has to be told first. It must never know who is given what.

Periods are counted from 1970, so that all coordinators of a cluster are in the same one. The wall clock is read once: a
jump of it, while a coordinator runs, changes no key.
"""

from __future__ import annotations

from kvxfer.clock import NS_PER_S, Clock
from kvxfer.protocol.leg_keys import leg_key, leg_secret
from kvxfer.types import AgentRef


class LegKeys:
    """Of one coordinator."""

    def __init__(self, root: bytes, clock: Clock, *, period_s: float, wall_s: float) -> None:
        """``root``: as of :func:`kvxfer.protocol.leg_keys.leg_secret`. ``wall_s``: seconds since 1970, now."""
        self._root = root
        self._clock = clock
        self._period_s = period_s
        self._zero_s = wall_s - clock.now_ns() / NS_PER_S

    @property
    def period(self) -> int:
        """The number of this period."""
        return max(1, int((self._zero_s + self._clock.now_ns() / NS_PER_S) // self._period_s))

    def secret(self) -> bytes:
        """What routers derive keys from."""
        return leg_secret(self._root, self.period)

    def accepted_by(self, worker: AgentRef) -> tuple[bytes, ...]:
        """The keys that a worker takes: of this period, the last and the next."""
        now = self.period
        return tuple(leg_key(leg_secret(self._root, period), worker) for period in (now, now - 1, now + 1))

    def __repr__(self) -> str:
        return f"<LegKeys of period {self.period}>"
