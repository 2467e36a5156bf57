"""One sequence on its way through an engine, and what the two clocks ask of it.

Decides nothing. The clocks (``pace``, ``step_loop``) must never know requests, and the exchanges never know which clock
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvxfer.forecast.step import StepCounts, StepSequence
from kvxfer.mock_engine.choice import ChoiceText


class GenerationListener(Protocol):
    """What a sequence's progress is told to."""

    def on_token(self, generation: MockGeneration) -> None:
        """One more token is made; ``sequence.emitted`` counts it already."""

    def on_room(self, generation: MockGeneration) -> None:
        """Blocks for KV from another engine are reserved; :meth:`EnginePace.loaded` is expected."""


class MockGeneration:
    """A sequence, its text and its listener."""

    __slots__ = ("began_s", "choice", "due_s", "listener", "sequence")

    def __init__(
        self, listener: GenerationListener, choice: ChoiceText, keys: Sequence[int], *, is_remote: bool, holds: bool
    ) -> None:
        self.listener = listener
        self.choice = choice
        prompt_tokens = choice.prompt.count
        self.sequence: StepSequence[MockGeneration] = StepSequence(
            self, prompt_tokens, choice.count, keys, prompt_tokens if is_remote else 0, holds
        )
        self.began_s: float | None = None
        """When it left the queue: its first step, by the event loop's clock."""
        self.due_s = 0.0
        """When its next token is due, at a fixed pace."""


class EnginePace(Protocol):
    """When tokens are due. All calls are made on the event loop."""

    counts: StepCounts

    @property
    def running(self) -> int:
        """Sequences that get tokens."""

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place, or for KV from another engine."""

    @property
    def used_blocks(self) -> int:
        """Blocks of all sequences, those included that are held for a reader."""

    @property
    def held_blocks(self) -> int:
        """Blocks of sequences that ended and are held for a reader."""

    def start(self, generation: MockGeneration) -> None:
        """Let it begin. Raises DoesNotFitError where it can never run."""

    def loaded(self, generation: MockGeneration, tokens: int) -> None:
        """KV of its first ``tokens`` prompt tokens has come; 0: it has not, and the engine computes the prompt."""

    def stop(self, generation: MockGeneration) -> None:
        """End it now, and free its blocks. Repeats are harmless."""

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""

    def close(self) -> None:
        """Make no more tokens."""
