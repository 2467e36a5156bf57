"""Decides over how many connections large posts to one peer are spread, from how fast earlier ones were; must never
time anything itself.

On one host, and wherever one connection fills the wire, more of them gain little; where a connection's window or a
network's load balancing holds each of them back they gain a multiple. Neither is known beforehand. So each number is
tried a few times, the fastest is kept, and now and then another is tried again: networks change. What is measured are
the owner's own posts, so this costs no byte.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

CHOICES: Final = (1, 2, 4)
"""Connections."""
TRIES: Final = 3
"""Of each before one is preferred."""
KEPT: Final = 5
"""Measurements of each, the newest; their median is what counts."""
EVERY: Final = 32
"""One post in so many tries one that is not the fastest."""
MISSES_MAX: Final = 8
"""Posts in a row that went over another number of connections than they were to, until that one is done without. A post
has one more dialed, and does not wait for it; one of few pieces is cut into fewer parts, one of very many into more."""
GAIN: Final = 1.05
"""So much faster must more connections be than fewer: each takes sockets and buffers at both ends."""


class Striping:
    """What was seen of one pair (this agent and one life of a peer)."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {count: deque(maxlen=KEPT) for count in CHOICES}
        self._missed = dict.fromkeys(CHOICES, 0)
        self._posts = 0

    def __repr__(self) -> str:
        medians = {count: statistics.median(rates) for count, rates in self._seen.items() if rates}
        seen = ", ".join(f"{count}: {median:.1f} GB/s" for count, median in medians.items())
        return f"<Striping {seen or 'nothing seen'}>"

    def choose(self) -> int:
        """For the next large post."""
        for count, rates in self._seen.items():
            if len(rates) < TRIES and self._missed[count] < MISSES_MAX:
                return count
        if self._posts % EVERY == EVERY - 1:
            others = [count for count in CHOICES if count != self.best]
            return others[self._posts // EVERY % len(others)]
        return self.best

    @property
    def best(self) -> int:
        """The fastest so far, of those that were tried; 1 where nothing was."""
        best = CHOICES[0]
        for count, rates in self._seen.items():
            ahead = self._seen[best]
            if rates and ahead and statistics.median(rates) > statistics.median(ahead) * GAIN:
                best = count
        return best

    def measured(self, wanted: int, connections: int, nbytes: int, seconds: float) -> None:
        """A large post that was to go over ``wanted`` connections, and went over so many, committed in ``seconds`` from
        its call. Figures that cannot be are left out."""
        if wanted not in self._seen or nbytes <= 0 or not 0 < seconds < float("inf"):
            return
        self._posts += 1
        self._missed[wanted] = 0 if connections == wanted else self._missed[wanted] + 1
        if connections in self._seen:
            self._seen[connections].append(nbytes / seconds / 1e9)
