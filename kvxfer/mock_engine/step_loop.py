"""The step model on a real clock: one timer an engine, whatever the number of its sequences.

Decides when a step begins and ends. Requests that come while a step runs join the next one. A step that ends late does
not delay the next one, up to LATE_S: the model's time is followed, not the machine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvxfer.forecast.cost import LinearCost
from kvxfer.forecast.paged_cache import CacheChange
from kvxfer.forecast.step import PlannedStep, StepLimits, StepModel
from kvxfer.mock_engine.generation import MockGeneration

LATE_S = 0.02
"""A clock that is later than this is not caught up: the machine is too slow for the model."""


class StepLoop:
    """``on_changes`` is called after each step with what changed in the prefix cache."""

    def __init__(
        self,
        limits: StepLimits,
        cost: LinearCost,
        speed: float,
        on_changes: Callable[[list[CacheChange]], None] | None = None,
    ) -> None:
        self.model: StepModel[MockGeneration] = StepModel(limits, records_changes=on_changes is not None)
        self.counts = self.model.counts
        self.late_steps = 0
        self._cost = cost
        self._speed = speed
        self._on_changes = on_changes
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._is_closed = False

    @property
    def running(self) -> int:
        return self.model.running

    @property
    def waiting(self) -> int:
        return self.model.waiting

    @property
    def used_blocks(self) -> int:
        return self.model.cache.used

    @property
    def held_blocks(self) -> int:
        return self.model.held_blocks

    def start(self, generation: MockGeneration) -> None:
        self.model.add(generation.sequence)
        self._wake()

    def loaded(self, generation: MockGeneration, tokens: int) -> None:
        self.model.loaded(generation.sequence, tokens)
        self._wake()

    def stop(self, generation: MockGeneration) -> None:
        self.model.abort(generation.sequence)
        self._wake()

    def forget_prefixes(self) -> None:
        self.model.cache.clear()
        self._tell_changes()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_soon(self._begin_now)

    def _begin_now(self) -> None:
        self._begin(self._loop.time())

    def _begin(self, at_s: float) -> None:
        self._timer = None
        step = self.model.begin()
        if step.work:
            seconds = self._cost.seconds(
                step.prefill_tokens, step.decode_sequences, step.context_tokens, step.prefill_context_tokens
            )
            end_s = at_s + seconds / self._speed
            self._timer = self._loop.call_at(end_s, self._end, step, end_s)
            for sequence, _ in step.work[len(step.work) - step.admitted :]:
                if sequence.owner.began_s is None:
                    sequence.owner.began_s = at_s
        for sequence in step.to_load:
            sequence.owner.listener.on_room(sequence.owner)

    def _end(self, step: PlannedStep[MockGeneration], due_s: float) -> None:
        for sequence in self.model.end(step):
            sequence.owner.listener.on_token(sequence.owner)
        if self._on_changes is not None:
            self._tell_changes()
        now = self._loop.time()
        if now - due_s > LATE_S:
            self.late_steps += 1
            due_s = now
        if not self._is_closed:
            self._begin(due_s)

    def _tell_changes(self) -> None:
        changes = self.model.cache.drain_changes()
        if changes and self._on_changes is not None:
            self._on_changes(changes)
