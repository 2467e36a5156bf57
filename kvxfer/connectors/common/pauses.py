"""How long this process did not run (stopped, or its host suspended). Decides nothing; must never know what waits."""

from __future__ import annotations

PAUSED_S = 0.5


class Pauses:
    """Pauses of one loop. A look that comes PAUSED_S late was kept from running (SIGSTOP, a suspended host), and
    messages of peers may wait to be read: a caller that measures their silence adds the pause to its start times."""

    def __init__(self, period_s: float) -> None:
        """The loop looks every ``period_s``, or more often."""
        self._period_s = period_s
        self._looked_s: float | None = None

    def look(self, now_s: float) -> float:
        """Seconds that this process did not run since the last look; mostly 0."""
        before_s, self._looked_s = self._looked_s, now_s
        late_s = 0.0 if before_s is None else now_s - before_s - self._period_s
        return late_s if late_s >= PAUSED_S else 0.0
