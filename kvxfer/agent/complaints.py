"""Warnings that others can cause as often as they like. Decides how often one is said; must never know of what."""

from __future__ import annotations

import logging
import time

COMPLAIN_S = 1.0
"""At most one line of log in so long."""


class Complaint:
    """One kind of warning, on the agent's loop."""

    def __init__(self, log: logging.Logger, text: str) -> None:
        """``text``: with places for what :meth:`say` is given, as in logging."""
        self._log = log
        self._text = text + " (one of %d since this was last said)"
        self._said_s = -COMPLAIN_S
        self._unsaid = 0

    def say(self, *arguments: object) -> None:
        now_s = time.monotonic()
        self._unsaid += 1
        if now_s - self._said_s >= COMPLAIN_S:
            self._log.warning(self._text, *arguments, self._unsaid)
            self._said_s, self._unsaid = now_s, 0
