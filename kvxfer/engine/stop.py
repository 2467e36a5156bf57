"""Stop strings over streamed text: decides which text may go out now and where an answer ends.

It must never know of tokens: text comes in pieces of any size, and a stop string may lie across them.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Holds back text that could be the start of a stop string; ends the text before the first stop string in it."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found, or None."""

    def push(self, text: str) -> str:
        """Take the next piece; return what may be sent. After a stop string was found, always empty."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            at, self.stopped = found
            sent, self._held = self._held[:at], ""
            return sent
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent

    def flush(self) -> str:
        """The text ended without a stop string: what was held back."""
        sent, self._held = self._held, ""
        return sent

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a true prefix of ``stop``."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
