"""Messages of readers about prompts that this engine has not begun: bounded, and kept as long as the engine may still
begin them. Decides nothing: `source` decides, and `accepted` knows which prompts may still come.
"""

from __future__ import annotations

from typing import TypeAlias

from kvxfer.connectors.vllm.accepted import AWAITED_MAX, Accepted
from kvxfer.connectors.vllm.wire import Ask, Claim, Claimed, Refuse, Release
from kvxfer.errors import GrantUnknownError, KvxferError, OverloadedError, RefusedError
from kvxfer.types import TransferId

EARLY_MAX = 1024
"""The most questions that are kept, and the most releases."""
RELEASE_S = 60.0
"""How long a release is kept if the engine never accepts its prompt."""

Question: TypeAlias = Ask | Claim
Refusal: TypeAlias = Refuse | Claimed
Key: TypeAlias = tuple[TransferId, int, str]
"""(transfer id, rank of the reader, agent of the reader)"""


def refusal(ask: Question, error: KvxferError) -> Refusal:
    """The message that answers a question with an error."""
    if isinstance(ask, Claim):
        return Claimed(ask.transfer_id, error.code, str(error))
    return Refuse(ask.transfer_id, ask.attempt, error.code, str(error))


def unknown() -> GrantUnknownError:
    """The error of a question for a prompt that will not come."""
    return GrantUnknownError("this engine never heard of that prompt")


def another() -> RefusedError:
    """The error of a question for a prompt that another engine reads."""
    return RefusedError("that prompt is promised to another engine")


def crowded() -> OverloadedError:
    """The error of a question that there is no room for."""
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
        """That agent no longer asks. Keeps the release for a prompt that may still begin. Without room it is dropped:
        the prompt's own time limit then frees its blocks."""
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
