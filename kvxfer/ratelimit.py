"""Log lines that a peer can cause as often as it likes. Decides how often one is written; must never know
what it says.
"""

from __future__ import annotations

import logging
import time

PERIOD_S = 1.0
"""At most one line in so long."""


class RateLimitedWarning:
    """One kind of warning; use it on one thread."""

    def __init__(self, log: logging.Logger, text: str, *, period_s: float | None = None) -> None:
        """``text`` has places for what :meth:`say` is given, as in logging; ``period_s`` defaults to PERIOD_S."""
        self._log = log
        self._text = text + " (one of %d since this was last said)"
        self._period_s = period_s
        self._said_s = -float("inf")
        self._unsaid = 0

    def say(self, *arguments: object) -> None:
        """Write the line, or count it where the last one is too recent."""
        now_s = time.monotonic()
        self._unsaid += 1
        if now_s - self._said_s >= (PERIOD_S if self._period_s is None else self._period_s):
            self._log.warning(self._text, *arguments, self._unsaid)
            self._said_s, self._unsaid = now_s, 0
