"""Whether a coordinator that was restarted knows its members by now. Decides from when on an absence means something;
must never know an agent.

A coordinator that keeps nothing on disk starts with no members, and all that it had come back. It is *settled* once
that is over: ``dead_after`` has passed, and none came back for as long as one takes to try again. If the network lets
the first of them through only later, the coordinator was settled too early: the first that it does not know tells it
so, and it waits anew.
"""

from __future__ import annotations

import math

SETTLING_MAX = 20
"""After so many times ``dead_after`` a restarted coordinator waits no longer, even if agents still come back."""
RESTART_MAX_NS = 600 * 1_000_000_000
"""So long after its start a coordinator takes an agent that it does not know for one of before its start."""


class Settling:
    """All times are awake nanoseconds since the start of the coordinator."""

    def __init__(self, *, is_alone: bool = True) -> None:
        """``is_alone``: there is no other coordinator that tells of the members."""
        self.is_settled = False
        self._is_alone = is_alone
        self._since_ns = 0
        self._returned_ns = -math.inf

    @property
    def saw_returns(self) -> bool:
        """Whether any agent ever came back."""
        return self._returned_ns >= 0

    def returned(self, awake_ns: int, *, is_known: bool) -> bool:
        """An agent came back. Returns whether the coordinator is not settled any more, and was before."""
        self._returned_ns = awake_ns
        if is_known or not (self._is_alone and self.is_settled) or awake_ns > RESTART_MAX_NS:
            return False
        self.is_settled = False
        self._since_ns = awake_ns
        return True

    def wait(self, awake_ns: int, *, dead_after_ns: float, quiet_ns: float) -> bool:
        """Let time pass. ``dead_after_ns``: the silence that ends an agent now; ``quiet_ns``: how long none has to come
        back. Returns whether the coordinator is settled from now on."""
        if self.is_settled:
            return False
        is_quiet = awake_ns - self._returned_ns >= quiet_ns
        self.is_settled = awake_ns - self._since_ns >= dead_after_ns * (1 if is_quiet else SETTLING_MAX)
        return self.is_settled
