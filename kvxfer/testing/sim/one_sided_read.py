"""A one-sided read: the destination takes blocks out of the source's memory, one after the other, while the source
may do anything; must never ask whether the source still allows it, because a real one cannot.

Two kinds, by chance: a copy that its own process makes (it looks between blocks whether it is still wanted, stands
still with its process, and goes on in mapped memory whatever became of the session), and a read by an adapter that
nothing but the death of its process stops.
"""

from __future__ import annotations

from typing import Any

from kvxfer.testing.sim.links import Sample
from kvxfer.testing.sim.tagged_memory import TaggedMemory, cells, checksum, flipped
from kvxfer.testing.sim.view import ProcessView
from kvxfer.testing.sim.virtual_clock import US


class OneSidedRead:
    """Performs one ReadBlocks effect."""

    def __init__(self, process: ProcessView, effect: Any) -> None:
        self.process, self.effect = process, effect
        lane = process.machines.Lane
        self._end = process.ends.get(effect.session)
        self._is_mapped = effect.lane == lane.MAPPED
        self._is_adapter = effect.lane in (lane.MEMORY, lane.UCX) and process.rng.random() < 0.5
        self._slow = process.world.slowness(effect.id)
        self._from, self._to = cells(effect.source), cells(effect.to)
        self._checksums: list[int] = []
        self._corrupted = -1
        if effect.checksums and process.world.chaos.corrupts():
            self._corrupted = process.rng.randrange(len(self._to))
        self._lost = -1
        if not self._is_mapped and process.world.chaos.loses_memory():
            self._lost = process.rng.randrange(len(self._to))
        self._is_for_good = not self._is_mapped and process.world.is_gone(effect.id)
        if self._is_for_good:
            self._lost = process.rng.randrange(len(self._to))
        self._memory: TaggedMemory

    def begin(self) -> None:
        process, effect = self.process, self.effect
        if self._end is None:
            return process.afterwards(self._stop, process.machines.Code.transport, "the session is gone")
        if effect.lane == process.machines.Lane.MEMORY:
            self._memory = self._end.peer.process.memory
        else:
            maps = [self._end.mapped.get((cell.region, effect.lane)) for cell in self._from]
            if None in maps:
                return process.afterwards(self._stop, process.machines.Code.no_lane, "it was not mapped")
            assert maps[0] is not None
            self._memory = maps[0]
        process.world.read_began(effect.id)
        self._then(self._sample, 0)

    def _then(self, callback: Any, *args: Any) -> None:
        delay = self.process.rng.randrange(10 * US, 400 * US) * self._slow
        if self._is_adapter:
            self.process.clock.call_after(delay, callback, *args)
        else:
            self.process.later(delay, callback, *args)

    def _sample(self, index: int) -> None:
        process, effect = self.process, self.effect
        if not process.is_alive:
            return
        if not self._is_adapter and not process.endpoint.is_landing(effect.id, effect.token):
            return self._stop(process.machines.Code.cancelled, "not wanted any more")
        if not self._is_mapped and not self._memory.is_process_alive:
            return process.run(self._stop, process.machines.Code.transport, "the peer's memory is gone")
        if index == self._lost:
            process.world.memory_lost(effect.id)
            return process.run(self._stop, process.machines.Code.memory_gone, "unmapped")
        cell = self._from[index]
        sample = Sample(process.clock.now, self._memory.incarnation, cell, self._memory.read(cell))
        self._then(self._land, index, sample)

    def _land(self, index: int, sample: Sample) -> None:
        process = self.process
        if not process.is_alive:
            return
        data = sample.data
        if index == self._corrupted:
            data = flipped(data)
            process.world.corruption_landed(self.effect.id)
        process.landed(self.effect.id, self._to[index], data, sample, is_checked=bool(self.effect.checksums))
        self._checksums.append(checksum(data))
        if index + 1 < len(self._to):
            return self._then(self._sample, index + 1)
        process.run(self._landed)

    def _landed(self) -> None:
        process, effect = self.process, self.effect
        if effect.checksums and effect.checksums != self._checksums:
            return self._stop(process.machines.Code.checksum, "checksum")
        process.perform(process.endpoint.read_landed(effect.id, effect.token, process.clock.now))

    def _stop(self, code: Any, text: str) -> None:
        process = self.process
        process.perform(process.endpoint.read_stopped(self.effect.id, self.effect.token, code, text, process.clock.now))
