"""What readers say of prompts that this engine has not heard of yet: kept for a while, bounded. Decides nothing;
`source` does.
"""

from __future__ import annotations

from typing import TypeAlias

from kvxfer.connectors.vllm.wire import Ask, Claim, Release
from kvxfer.types import TransferId

EARLY_MAX = 1024
"""Of either kind."""

Question: TypeAlias = Ask | Claim
Key: TypeAlias = tuple[TransferId, int, str]


class Early:
    """Questions and releases, in the order in which they came."""

    def __init__(self, wait_s: float) -> None:
        """``wait_s``: how long each is kept."""
        self._wait_s = wait_s
        self._asks: dict[tuple[type[Question], Key], tuple[Question, float]] = {}
        self._releases: dict[Key, tuple[Release, float]] = {}

    def __len__(self) -> int:
        """Questions that wait."""
        return len(self._asks)

    @property
    def asks(self) -> tuple[Question, ...]:
        return tuple(ask for ask, _ in self._asks.values())

    def ask(self, agent_id: str, ask: Question, now_s: float) -> bool:
        """Whether there is room for that question."""
        if len(self._asks) >= EARLY_MAX:
            return False
        self._asks[type(ask), (ask.transfer_id, ask.rank, agent_id)] = (ask, now_s + self._wait_s)
        return True

    def release(self, agent_id: str, release: Release, now_s: float) -> None:
        """That agent asks no more. Forgotten where there is no room: the prompt's own time ends it."""
        key = (release.transfer_id, release.rank, agent_id)
        self._asks.pop((Ask, key), None)
        if len(self._releases) < EARLY_MAX:
            self._releases[key] = (release, now_s + self._wait_s)

    def take_asks(self, transfer_id: TransferId) -> list[tuple[str, Question]]:
        """Of that prompt, with the agents that asked."""
        keys = [key for key in self._asks if key[1][0] == transfer_id]
        return [(key[1][2], self._asks.pop(key)[0]) for key in keys]

    def take_releases(self, transfer_id: TransferId) -> list[tuple[str, Release]]:
        """Of that prompt, with the agents that let go."""
        keys = [key for key in self._releases if key[0] == transfer_id]
        return [(key[2], self._releases.pop(key)[0]) for key in keys]

    def expire(self, now_s: float) -> list[tuple[str, Question]]:
        """Forget what is kept for too long; returns the questions of it, with the agents that asked."""
        for key in [key for key, (_, until_s) in self._releases.items() if now_s >= until_s]:
            del self._releases[key]
        keys = [key for key, (_, until_s) in self._asks.items() if now_s >= until_s]
        return [(key[1][2], self._asks.pop(key)[0]) for key in keys]
