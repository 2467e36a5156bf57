"""Messages to readers, in order. A reader that confirms slowly is told the rest later. Everything here lives on the
agent's loop; must never know what a message means.
"""

from __future__ import annotations

import collections
import logging

from kvxfer.agent import Agent
from kvxfer.connectors.vllm.wire import Message, encode
from kvxfer.errors import KvxferError, LimitExceeded

log = logging.getLogger("kvxfer.vllm")

UNSENT_MAX = 4096
"""Messages to one reader beyond those that it has not confirmed."""


class Outbox:
    """What one rank's agent still has to tell others."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._unsent: dict[str, collections.deque[Message]] = {}

    def send(self, agent_id: str, message: Message) -> None:
        """Tell it, after what it was not told yet."""
        self._unsent.setdefault(agent_id, collections.deque()).append(message)
        self._flush(agent_id)

    def flush(self) -> None:
        """Send what waits, as far as readers have confirmed enough."""
        for agent_id in list(self._unsent):
            self._flush(agent_id)

    def _flush(self, agent_id: str) -> None:
        waiting = self._unsent[agent_id]
        try:
            while waiting:
                self._agent.notify(agent_id, encode(waiting[0]))
                waiting.popleft()
        except LimitExceeded as error:
            if len(waiting) < UNSENT_MAX:
                return
            log.warning("UNSENT_MAX=%d messages to a reader are dropped: %s", UNSENT_MAX, error)
        except KvxferError as error:
            log.debug("a reader could not be told: %s", error, extra={"agent_id": agent_id})
        del self._unsent[agent_id]
