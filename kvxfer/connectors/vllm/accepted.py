"""Prompts that this engine has accepted and not begun, and the engines that await each: what its first rank answers
them.

Knowledge instead of a time: an engine learns of its requests between two steps, so a prompt that it does not know after
it took in its queue twice is on no way to it that this engine can see. vLLM's API server makes tokens of a text before
its engine hears of it, which no step counts: such a prompt has some time besides, or the server says that it has it.

Decides which agent is told what; has no clock, and must never know a block.
"""

from __future__ import annotations

import dataclasses

from kvxfer.connectors.vllm.wire import KEEPS_MAX, Queued
from kvxfer.types import TransferId

ACCEPTED_MAX = 1 << 16
AWAITED_MAX = 1 << 16
ARRIVED_S = 15.0
"""The API server repeats every second that it still has a prompt, unless a long operation keeps it."""
FORGET_S = 2.5
"""An engine repeats its question every half second; without one for this time it awaits the prompt no more."""


@dataclasses.dataclass
class _Question:
    """When it came first, with the ``steps`` that this engine had begun by then."""

    since_s: float
    heard_s: float
    steps: int


class Accepted:
    """Of one rank. Every rank knows what is accepted; the first is asked."""

    def __init__(self, unknown_wait_s: float) -> None:
        self._unknown_wait_s = unknown_wait_s
        self._accepted: dict[TransferId, None] = {}
        self._arrived: dict[TransferId, float] = {}
        self._questions: dict[tuple[TransferId, str], _Question] = {}
        self._steps = 0
        self._began_s: float | None = None
        self._is_stepping = False

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Whether it waits to be computed here, or will reach this engine."""
        return transfer_id in self._accepted or transfer_id in self._arrived

    def __len__(self) -> int:
        return len(self._accepted)

    # --- the engine ---

    def step_began(self, now_s: float) -> None:
        """The engine has read its queue, and begins a step."""
        self._steps += 1
        self._began_s = now_s
        self._is_stepping = True

    def step_over(self) -> None:
        """It has come to the end of that."""
        self._is_stepping = False

    def accept(self, transfer_id: TransferId) -> None:
        """The engine has it in its queue. Forgotten where there is no room: then others hear that it is unknown."""
        self._arrived.pop(transfer_id, None)
        if len(self._accepted) < ACCEPTED_MAX:
            self._accepted[transfer_id] = None

    def arrive(self, transfer_id: TransferId, now_s: float) -> None:
        """The API server has it, and its engine will."""
        if transfer_id not in self._accepted and len(self._arrived) < ACCEPTED_MAX:
            self._arrived[transfer_id] = now_s

    def leave(self, transfer_id: TransferId) -> None:
        """The API server is through with it."""
        self._arrived.pop(transfer_id, None)

    def accept_again(self, transfer_id: TransferId) -> None:
        """It had begun, was preempted, and will begin again next."""
        self._accepted = {transfer_id: None, **self._accepted}

    def take(self, transfer_id: TransferId) -> list[str]:
        """It begins, or never will. Returns the agents that await it."""
        self._accepted.pop(transfer_id, None)
        self._arrived.pop(transfer_id, None)
        keys = [key for key in self._questions if key[0] == transfer_id]
        for key in keys:
            del self._questions[key]
        return [agent_id for _, agent_id in keys]

    # --- others ---

    def ask(self, agent_id: str, transfer_id: TransferId, now_s: float) -> bool:
        """That agent awaits it. Returns whether there is room for the question."""
        question = self._questions.get((transfer_id, agent_id))
        if question is not None:
            question.heard_s = now_s
        elif len(self._questions) < AWAITED_MAX:
            self._questions[transfer_id, agent_id] = _Question(now_s, now_s, self._steps)
        else:
            return False
        return True

    def forget(self, agent_id: str, transfer_id: TransferId) -> None:
        """That agent awaits it no more."""
        self._questions.pop((transfer_id, agent_id), None)

    def answer(self, transfer_ids: list[TransferId], now_s: float, *, is_computing: bool) -> list[Queued]:
        """The answer about these prompts, none of which has begun. ``is_computing``: others have."""
        position = {transfer_id: at for at, transfer_id in enumerate((*self._accepted, *self._arrived), 1)}
        age_ms = 0 if self._began_s is None else min(round((now_s - self._began_s) * 1e3), (1 << 31) - 1)
        has_work = bool(self._accepted) or is_computing or self._is_stepping
        answers = []
        for begin in range(0, len(transfer_ids), KEEPS_MAX):
            some = tuple(transfer_ids[begin : begin + KEEPS_MAX])
            answers.append(Queued(some, tuple(position.get(one, 0) for one in some), age_ms, has_work))
        return answers

    def sweep(self, now_s: float) -> list[tuple[str, TransferId]]:
        """Forget agents that ask no more. Returns questions for prompts that will not be sent, with the agents that
        ask."""
        for key in [key for key, question in self._questions.items() if now_s >= question.heard_s + FORGET_S]:
            del self._questions[key]
        self._arrived = {one: at_s for one, at_s in self._arrived.items() if now_s < at_s + ARRIVED_S}
        over = [
            key
            for key, question in self._questions.items()
            if key[0] not in self and self.is_unknown(question.since_s, question.steps, now_s)
        ]
        for key in over:
            del self._questions[key]
        return [(agent_id, transfer_id) for transfer_id, agent_id in over]

    @property
    def steps(self) -> int:
        """How often the engine has read its queue."""
        return self._steps

    def is_unknown(self, since_s: float, steps: int, now_s: float) -> bool:
        """Whether a prompt that the engine has not accepted will not come: it was asked for at ``since_s``, when the
        engine had begun ``steps``."""
        if now_s < since_s + self._unknown_wait_s:
            return False
        has_work = bool(self._accepted) or self._is_stepping
        is_idle = not has_work and (self._began_s is None or now_s >= self._began_s + self._unknown_wait_s)
        return is_idle or self._steps >= steps + 2
