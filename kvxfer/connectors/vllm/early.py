"""Messages for prompts that this engine has not begun: bounded, and kept as long as the engine may still begin them.
Decides nothing; `source` does, and `accepted` decides what may come.
"""

from __future__ import annotations

from typing import TypeAlias

from kvxfer.connectors.vllm.accepted import AWAITED_MAX, Accepted
from kvxfer.connectors.vllm.wire import Ask, Claim, Claimed, Refuse, Release
from kvxfer.errors import GrantUnknownError, KvxferError, OverloadedError, RefusedError
from kvxfer.types import TransferId

EARLY_MAX = 1024
"""Of either kind."""
RELEASE_S = 60.0
"""How long it is remembered that no engine wants a prompt that this engine has not heard of."""

Question: TypeAlias = Ask | Claim
Refusal: TypeAlias = Refuse | Claimed
Key: TypeAlias = tuple[TransferId, int, str]


def refusal(ask: Question, error: KvxferError) -> Refusal:
    """What is answered to that question where the answer is no."""
    if isinstance(ask, Claim):
        return Claimed(ask.transfer_id, error.code, str(error))
    return Refuse(ask.transfer_id, ask.attempt, error.code, str(error))


def unknown() -> GrantUnknownError:
    """Of a prompt that will not come."""
    return GrantUnknownError("this engine never heard of that prompt")


def another() -> RefusedError:
    """Of a prompt of some other reader."""
    return RefusedError("that prompt is promised to another engine")


def crowded() -> OverloadedError:
    """The answer for a prompt that so many others wait for that there is no room for one more question."""
    return OverloadedError(
        f"this engine keeps at most AWAITED_MAX={AWAITED_MAX} questions for prompts that it has not begun"
    )


class Early:
    """Questions and releases, in the order in which they came."""

    def __init__(self, accepted: Accepted) -> None:
        self._accepted = accepted
        self._asks: dict[tuple[type[Question], Key], tuple[Question, float, int]] = {}
        self._releases: dict[Key, tuple[Release, float]] = {}

    def __len__(self) -> int:
        """Questions that wait."""
        return len(self._asks)

    @property
    def asks(self) -> tuple[Question, ...]:
        return tuple(ask for ask, *_ in self._asks.values())

    def ask(self, agent_id: str, ask: Question, now_s: float) -> bool:
        """Keep that question. Returns whether there was room for it."""
        if len(self._asks) >= EARLY_MAX:
            return False
        self._asks[type(ask), (ask.transfer_id, ask.rank, agent_id)] = (ask, now_s, self._accepted.steps)
        return True

    def release(self, agent_id: str, release: Release, now_s: float) -> None:
        """That agent asks no more. Dropped without room for it: the prompt's own time ends the wait."""
        key = (release.transfer_id, release.rank, agent_id)
        self._asks.pop((Ask, key), None)
        if len(self._releases) < EARLY_MAX:
            self._releases[key] = (release, now_s + RELEASE_S)

    def take_asks(self, transfer_id: TransferId) -> list[tuple[str, Question]]:
        """Remove and return the questions for that prompt, with the agents that asked."""
        keys = [key for key in self._asks if key[1][0] == transfer_id]
        return [(key[1][2], self._asks.pop(key)[0]) for key in keys]

    def take_releases(self, transfer_id: TransferId) -> list[tuple[str, Release]]:
        """Remove and return the releases of that prompt, with the agents that sent them."""
        keys = [key for key in self._releases if key[0] == transfer_id]
        return [(key[2], self._releases.pop(key)[0]) for key in keys]

    def expire(self, now_s: float) -> list[tuple[str, Question]]:
        """Drop everything for prompts that will not come. Returns the questions for them, with their agents."""
        accepted = self._accepted
        for key in [key for key, (_, until_s) in self._releases.items() if now_s >= until_s]:
            if key[0] not in accepted:
                del self._releases[key]
        keys = [
            key
            for key, (ask, since_s, steps) in self._asks.items()
            if ask.transfer_id not in accepted and accepted.is_unknown(since_s, steps, now_s)
        ]
        return [(key[1][2], self._asks.pop(key)[0]) for key in keys]
