"""How long this process did not run, because it was stopped or its host was suspended. Decides nothing; must never know
what the caller waits for."""

from __future__ import annotations

PAUSED_S = 0.5
"""A look that is late by less than this may be late because the processors are busy."""


class Pauses:
    """Pauses of a loop that calls :meth:`look` regularly. If a call is late by PAUSED_S or more, the process did not
    run (SIGSTOP, a suspended host). Messages of peers may then wait to be read, so the peers were not silent: a caller
    that measures the silence of peers adds the pause to its start times."""

    def __init__(self, period_s: float) -> None:
        """The loop looks every ``period_s``, or more often."""
        self._period_s = period_s
        self._looked_s: float | None = None

    def look(self, now_s: float) -> float:
        """Seconds that this process did not run since the last look; mostly 0."""
        before_s, self._looked_s = self._looked_s, now_s
        late_s = 0.0 if before_s is None else now_s - before_s - self._period_s
        return late_s if late_s >= PAUSED_S else 0.0
