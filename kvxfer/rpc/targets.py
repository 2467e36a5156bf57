"""Which coordinator a client asks next. Must never know why the last one was lost."""

from __future__ import annotations

import random

from kvxfer.config import addresses
from kvxfer.errors import InvalidArgumentError


class Targets:
    """Coordinators that serve alike: one is asked until it is lost, then the next one, round and round."""

    def __init__(self, text: str, source: random.Random | None = None) -> None:
        """``text``: ``host:port``, or several with commas between. ``source`` draws the first one, so that the clients
        of a cluster spread over all. Raises InvalidArgumentError where none is named.
        """
        self._all = addresses(text)
        if not all(self._all):
            raise InvalidArgumentError(f"coordinators must be named as host:port,host:port, not as {text!r:.100}")
        self._at = (source or random.Random()).randrange(len(self._all))

    @property
    def now(self) -> str:
        """The one that is asked."""
        return self._all[self._at]

    def lost(self) -> None:
        """Ask the next one from now on."""
        self._at = (self._at + 1) % len(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __str__(self) -> str:
        return self.now if len(self) == 1 else f"{self.now} (one of {len(self)})"
