"""Messages to peers, in order. If a peer confirms slowly, later messages to it wait here. Everything runs on the
agent's loop; must never know what a message means.
"""

from __future__ import annotations

import collections
import logging
import time

from kvxfer.agent import Agent
from kvxfer.errors import KvxferError, LimitExceededError, TransportError

log = logging.getLogger("kvxfer.connectors")

UNSENT_MAX = 4096
"""Messages to one peer that wait beyond its unconfirmed ones."""


class Outbox:
    """The unsent messages of one rank's agent."""

    def __init__(self, agent: Agent, *, unknown_s: float = 0.0) -> None:
        """An unknown peer may become known within ``unknown_s``; then it gets its messages."""
        self._agent = agent
        self._unknown_s = unknown_s
        self._unsent: dict[str, collections.deque[bytes]] = {}
        self._unknown: dict[str, float] = {}
        """By agent id: since when it is unknown."""

    def send(self, agent_id: str, payload: bytes) -> None:
        """Send a message, after the earlier ones."""
        self._unsent.setdefault(agent_id, collections.deque()).append(payload)
        self._flush(agent_id)

    def flush(self) -> None:
        """Send waiting messages, as far as peers have confirmed earlier ones."""
        for agent_id in list(self._unsent):
            self._flush(agent_id)

    def _flush(self, agent_id: str) -> None:
        waiting = self._unsent[agent_id]
        try:
            while waiting:
                self._agent.notify(agent_id, waiting[0])
                waiting.popleft()
                self._unknown.pop(agent_id, None)
        except LimitExceededError as error:
            if len(waiting) < UNSENT_MAX:
                return
            log.warning("UNSENT_MAX=%d messages to a peer are dropped: %s", UNSENT_MAX, error)
        except KvxferError as error:
            now_s = time.monotonic()
            is_late = now_s - self._unknown.setdefault(agent_id, now_s) >= self._unknown_s
            if isinstance(error, TransportError) and not is_late and len(waiting) < UNSENT_MAX:
                return
            self._unknown.pop(agent_id, None)
            log.debug("a peer could not be told: %s", error, extra={"agent_id": agent_id})
        del self._unsent[agent_id]
