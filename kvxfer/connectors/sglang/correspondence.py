"""Which messages over SGLang's sockets are accepted: each once, by the one process that it is for. A signed message
cannot be changed, but a process that sees it can send it again, to any rank. Decides which process it is for, and
whether it is new; must never know what a message says.

A message names its sender and the process it is for, which are new with each incarnation, and has a number of its
sender's. The first one to a place is for any process there: none has been heard from it yet.
"""

from __future__ import annotations

import collections
import itertools
import threading

from kvxfer.connectors.sglang.greetings import Greeting, Postmark, Register

WINDOW = 4096
"""How many later messages of its sender may overtake a message: two sockets have no common order."""
PLACES_MAX = 1 << 14
HELD_MAX = 1024

Place = tuple[str, int]


class Window:
    """The numbers of one sender that were accepted."""

    def __init__(self) -> None:
        self._highest = 0
        self._taken = 1
        """Bit n is set if the n-th number below the highest was accepted."""

    def take(self, number: int) -> bool:
        """Whether it is new. One that is older than WINDOW is not."""
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
    """Of one rank's process. From any thread."""

    def __init__(self, agent_id: str) -> None:
        self._agent_id = agent_id
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._windows: dict[str, Window] = {}
        """By process that ever sent a message to this one: a forgotten process could replay its messages."""
        self._who: collections.OrderedDict[Place, str] = collections.OrderedDict()
        self._held: collections.deque[tuple[Place, Greeting]] = collections.deque(maxlen=HELD_MAX)

    def mark(self, place: Place, greeting: Greeting) -> Postmark:
        """A postmark for the process that was heard last from that place."""
        with self._lock:
            to = "" if isinstance(greeting, Register) else self._who.get(place, "")
        return Postmark(self._agent_id, to, next(self._numbers))

    def take(self, mark: Postmark, place: Place, greeting: Greeting) -> bool:
        """Whether that verified message is for this process, and new."""
        with self._lock:
            is_ours = mark.to == self._agent_id or (not mark.to and isinstance(greeting, Register))
            if not is_ours or not self._windows.setdefault(mark.by, Window()).take(mark.number):
                return False
            self._who[place] = mark.by
            self._who.move_to_end(place)
            if len(self._who) > PLACES_MAX:
                self._who.popitem(last=False)
            return True

    def hold(self, place: Place, greeting: Greeting) -> bool:
        """Whether no process was heard from that place yet; :meth:`release` gives it once one was."""
        with self._lock:
            if place in self._who:
                return False
            self._held.append((place, greeting))
            return True

    def release(self, place: Place) -> list[Greeting]:
        """The messages that were held for that place."""
        with self._lock:
            if place not in self._who or not self._held:
                return []
            found = [greeting for at, greeting in self._held if at == place]
            self._held = collections.deque((one for one in self._held if one[0] != place), HELD_MAX)
            return found
