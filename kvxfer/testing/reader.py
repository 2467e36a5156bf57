"""A one-sided read: the destination takes blocks out of the source's memory, one after the other, while the source
may do anything; must never ask whether the source still allows it, because a real one cannot.

Two kinds, by chance: a copy that its own process makes (it looks between blocks whether it is still wanted, stands
still with its process, and goes on in mapped memory whatever became of the session), and a read by an adapter that
nothing but the death of its process stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.testing.clock import US
from kvxfer.testing.memory import Memory

if TYPE_CHECKING:
    from kvxfer.testing.process import Process


class OneSidedRead:
    """Performs one ReadBlocks effect."""

    def __init__(self, process: Process, effect: Any) -> None:
        self.process, self.effect = process, effect
        self._end = process.ends.get(effect.session)
        self._is_mapped = self._end is not None and self._end.kind == process.machines.SessionKind.UNIX
        self._is_adapter = not self._is_mapped and process.rng.random() < 0.5
        self._slow = process.world.slowness(effect.id)
        self._memory: Memory

    def begin(self) -> None:
        process = self.process
        if self._end is None:
            return process.afterwards(self._stop, process.machines.Code.transport, "the session is gone")
        if self._is_mapped:
            if self.effect.remote_pool not in self._end.mapped:
                return process.afterwards(self._stop, process.machines.Code.no_lane, "the pool was not mapped")
            self._memory = self._end.mapped[self.effect.remote_pool]
        else:
            self._memory = self._end.peer.process.memory
        process.world.read_began(self.effect.id)
        self._then(self._sample, 0)

    def _then(self, act: Any, *args: Any) -> None:
        delay = self.process.rng.randrange(10 * US, 400 * US) * self._slow
        if self._is_adapter:
            self.process.clock.call_after(delay, act, *args)
        else:
            self.process.later(delay, act, *args)

    def _sample(self, index: int) -> None:
        process, effect = self.process, self.effect
        if not process.is_alive:
            return
        if not self._is_adapter and not process.endpoint.is_landing(effect.id, effect.token):
            return self._stop(process.machines.Code.cancelled, "not wanted any more")
        if not self._is_mapped and not self._memory.is_process_alive:
            return process.run(self._stop, process.machines.Code.transport, "the peer's memory is gone")
        self._then(self._land, index, self._memory.blocks[effect.from_blocks[index]], process.clock.now)

    def _land(self, index: int, data: bytes, sampled_at: int) -> None:
        process, effect = self.process, self.effect
        if not process.is_alive:
            return
        block = effect.to_blocks[index]
        process.memory.blocks[block] = data
        process.world.checkers.landed(
            process.life, effect.id, block, data, sampled_at=sampled_at, sampled_from=self._memory.life
        )
        if index + 1 < len(effect.to_blocks):
            return self._then(self._sample, index + 1)
        process.run(self._landed)

    def _landed(self) -> None:
        process = self.process
        process.perform(process.endpoint.read_landed(self.effect.id, self.effect.token, process.clock.now))

    def _stop(self, code: Any, text: str) -> None:
        process = self.process
        process.perform(process.endpoint.read_stopped(self.effect.id, self.effect.token, code, text, process.clock.now))
