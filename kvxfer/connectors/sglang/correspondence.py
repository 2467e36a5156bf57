"""Which messages over SGLang's sockets are accepted: each once, by the one process that it is for. A signed message
cannot be changed, but a process that sees it can send it again, to any rank. Decides which process it is for, and
whether it is new; must never know what a message says.

A *place* is the host and port at which a rank receives messages. A restarted rank is another process at the same place.
A message has a postmark: the agent of the process that sent it, the agent of the process that it is for, and a number
that its sender gives only once. A Register names no receiver: it is for any process at its place. Every other message
is for one process, so it waits until this process has heard one from that place.
"""

from __future__ import annotations

import collections
import itertools
import threading

from kvxfer.connectors.sglang.greetings import Greeting, Postmark, Register

WINDOW = 4096
"""How many later messages of its sender may come before a message: they may come over two sockets."""
PLACES_MAX = 1 << 14
"""The places whose process is remembered; the place that was silent for longest is forgotten first."""
HELD_MAX = 1024
"""Messages that wait until the process at their place is known; the oldest are dropped first."""

Place = tuple[str, int]


class Window:
    """Which numbers of one sender were accepted, of the last WINDOW (a replay window, as in IPsec)."""

    def __init__(self) -> None:
        self._highest = 0
        self._taken = 1
        """Bit n is set if the n-th number below the highest was accepted."""

    def take(self, number: int) -> bool:
        """Accept that number. Returns whether it is new; a number too old for the window counts as not new."""
        ahead = number - self._highest
        if ahead > 0:
            self._taken = (self._taken << ahead | 1) & ((1 << WINDOW) - 1) if ahead < WINDOW else 1
            self._highest = number
            return True
        if -ahead >= WINDOW or self._taken >> -ahead & 1:
            return False
        self._taken |= 1 << -ahead
        return True


class Correspondence:
    """The messages of one rank's process. From any thread."""

    def __init__(self, agent_id: str) -> None:
        self._agent_id = agent_id
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._windows: dict[str, Window] = {}
        """By sender, of each process that ever sent a message: without its window its messages could be replayed."""
        self._last_heard: collections.OrderedDict[Place, str] = collections.OrderedDict()
        """By place, the agent of the process that sent the last message from there."""
        self._held: collections.deque[tuple[Place, Greeting]] = collections.deque(maxlen=HELD_MAX)

    def mark(self, place: Place, greeting: Greeting) -> Postmark:
        """A postmark for a message to the process that was heard last from that place."""
        with self._lock:
            to = "" if isinstance(greeting, Register) else self._last_heard.get(place, "")
        return Postmark(self._agent_id, to, next(self._numbers))

    def take(self, mark: Postmark, place: Place, greeting: Greeting) -> bool:
        """Accept a verified message. Returns whether it is for this process, and new."""
        with self._lock:
            is_ours = mark.to == self._agent_id or (not mark.to and isinstance(greeting, Register))
            if not is_ours or not self._windows.setdefault(mark.by, Window()).take(mark.number):
                return False
            self._last_heard[place] = mark.by
            self._last_heard.move_to_end(place)
            if len(self._last_heard) > PLACES_MAX:
                self._last_heard.popitem(last=False)
            return True

    def hold(self, place: Place, greeting: Greeting) -> bool:
        """Keep a message if no process was heard from its place yet; :meth:`release` returns it later. Returns whether
        the message was kept."""
        with self._lock:
            if place in self._last_heard:
                return False
            self._held.append((place, greeting))
            return True

    def release(self, place: Place) -> list[Greeting]:
        """Remove and return the messages that were kept for that place, if a process was heard from it."""
        with self._lock:
            if place not in self._last_heard or not self._held:
                return []
            found = [greeting for at, greeting in self._held if at == place]
            self._held = collections.deque((one for one in self._held if one[0] != place), HELD_MAX)
            return found
