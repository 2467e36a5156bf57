"""The fixed pace: the first token after a fixed time, and each further one after a fixed time more.

All sequences of an engine share one timer wheel, so that a token costs no timer of its own. Decides when a token is
due; there is no batch, no queue and no prefix cache, and blocks are only counted.
"""

from __future__ import annotations

import asyncio
import heapq

from kvxfer.forecast.step import StepCounts, StepPhase
from kvxfer.mock_engine.generation import MockGeneration

SLOTS_PER_S = 1000
"""Tokens that are due within the same thousandth of a second are made together."""


class FixedPace:
    """Times in seconds."""

    def __init__(self, ttft_s: float, itl_s: float, block_tokens: int) -> None:
        self.counts = StepCounts()
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._block_tokens = block_tokens
        self._loop = asyncio.get_running_loop()
        self._slots: dict[int, list[MockGeneration]] = {}
        self._order: list[int] = []
        """The numbers of the slots, as a heap."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_slot = 0
        self._running = 0
        self._loading = 0
        self._used = 0
        self._held = 0

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return self._loading

    @property
    def used_blocks(self) -> int:
        return self._used

    @property
    def held_blocks(self) -> int:
        return self._held

    def start(self, generation: MockGeneration) -> None:
        sequence = generation.sequence
        self._used += self._blocks(generation)
        if sequence.remote_tokens:
            sequence.phase = StepPhase.LOADING
            self._loading += 1
            generation.listener.on_room(generation)
        else:
            self._run(generation)

    def loaded(self, generation: MockGeneration, tokens: int) -> None:
        sequence = generation.sequence
        if sequence.phase is not StepPhase.LOADING:
            return
        self._loading -= 1
        sequence.loaded_tokens = min(tokens, sequence.prompt_tokens - 1)
        self.counts.loaded += sequence.loaded_tokens
        self._run(generation)

    def stop(self, generation: MockGeneration) -> None:
        sequence = generation.sequence
        if sequence.phase is StepPhase.ENDED:
            return
        if sequence.phase is StepPhase.LOADING:
            self._loading -= 1
        elif sequence.phase is StepPhase.RUNNING:
            self._running -= 1
        elif sequence.phase is StepPhase.HELD:
            self._held -= self._blocks(generation)
        if sequence.phase is not StepPhase.NEW:
            self._used -= self._blocks(generation)
        sequence.phase = StepPhase.ENDED

    def forget_prefixes(self) -> None:
        """There is no cache."""

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._slots.clear()
        self._order.clear()

    def _blocks(self, generation: MockGeneration) -> int:
        return -(-generation.sequence.prompt_tokens // self._block_tokens)

    def _run(self, generation: MockGeneration) -> None:
        generation.sequence.phase = StepPhase.RUNNING
        self._running += 1
        generation.began_s = self._loop.time()
        generation.due_s = generation.began_s + self._ttft_s
        self._put(generation)
        self._arm()

    def _put(self, generation: MockGeneration) -> None:
        slot = int(generation.due_s * SLOTS_PER_S)
        there = self._slots.get(slot)
        if there is None:
            self._slots[slot] = [generation]
            heapq.heappush(self._order, slot)
        else:
            there.append(generation)

    def _arm(self) -> None:
        if not self._order:
            return
        slot = self._order[0]
        if self._timer is not None:
            if self._timer_slot <= slot:
                return
            self._timer.cancel()
        self._timer_slot = slot
        self._timer = self._loop.call_at(slot / SLOTS_PER_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time() + 0.5 / SLOTS_PER_S
        itl_s, counts = self._itl_s, self.counts
        while self._order and self._order[0] / SLOTS_PER_S <= now:
            for generation in self._slots.pop(heapq.heappop(self._order)):
                sequence = generation.sequence
                while sequence.phase is StepPhase.RUNNING:
                    if not sequence.emitted:
                        sequence.prompt_computed = sequence.prompt_tokens - sequence.loaded_tokens
                        counts.prompt_computed += sequence.prompt_computed
                    sequence.emitted += 1
                    counts.output += 1
                    if sequence.emitted >= sequence.output_tokens:
                        self._finish(generation)
                    generation.listener.on_token(generation)
                    if itl_s and sequence.phase is StepPhase.RUNNING:
                        generation.due_s += itl_s
                        self._put(generation)
                        break
        self._arm()

    def _finish(self, generation: MockGeneration) -> None:
        self._running -= 1
        if generation.sequence.holds:
            generation.sequence.phase = StepPhase.HELD
            self._held += self._blocks(generation)
        else:
            generation.sequence.phase = StepPhase.ENDED
            self._used -= self._blocks(generation)
