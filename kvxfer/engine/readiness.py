"""Whether this worker takes requests now, as placement elsewhere sees it, and why not.

Losing the coordinator changes nothing: routers that know this worker go on sending to it. It must never know of HTTP.
"""

from __future__ import annotations

import enum
from typing import Protocol

from kvxfer.engine.engine import Engine


class Drainable(Protocol):
    """An agent, as far as readiness needs it."""

    @property
    def is_draining(self) -> bool: ...


class NotReady(enum.StrEnum):
    STARTING = "starting"
    """Not registered yet: no router places anything here."""
    DRAINING = "draining"
    """It stops, or the coordinator took it out of service."""
    FAILED = "failed"
    """The engine's thread died; the process ends."""


class Readiness:
    """Of one worker; ``agent`` is None for one without a coordinator. Read on the engine's loop."""

    def __init__(self, engine: Engine, agent: Drainable | None) -> None:
        self._engine = engine
        self._agent = agent
        self._is_registered = False

    def registered(self) -> None:
        """It can be found from now on."""
        self._is_registered = True

    @property
    def is_live(self) -> bool:
        """Whether the process can still do its work, now or later."""
        return self._engine.failure is None

    @property
    def reason(self) -> NotReady | None:
        """Why no request is taken; None where they are."""
        if not self.is_live:
            return NotReady.FAILED
        if not self._is_registered:
            return NotReady.STARTING
        if not self._engine.is_accepting or (self._agent is not None and self._agent.is_draining):
            return NotReady.DRAINING
        return None
