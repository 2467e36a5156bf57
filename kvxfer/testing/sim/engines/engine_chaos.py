"""What goes wrong with engines at times of its own: they hang, their processes are stopped, killed and restarted, their
connections break; must never act once the world is calm.
"""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.testing.sim.engines.engine_view import EngineOwnerView, EngineWorldView
from kvxfer.testing.sim.virtual_clock import MS, NEVER, S


class EngineChaos:
    """Each kind is on in some seeds, and strikes a few times there."""

    def __init__(self, world: EngineWorldView) -> None:
        self._world, self._rng, self._clock = world, world.rng, world.clock
        self._hung_for_ever = 0

    def begin(self) -> None:
        kinds: tuple[tuple[float, int, Callable[[], None]], ...] = (
            (0.25, 2, self._hang),
            (0.12, 1, self._hang_for_ever),
            (0.2, 2, self._kill),
            (0.15, 2, self._pause),
            (0.3, 4, self._cut),
            (0.2, 3, self._partition),
        )
        for chance, most, callback in kinds:
            if self._rng.random() < chance:
                for _ in range(self._rng.randint(1, most)):
                    self._clock.call_after(self._rng.randrange(0, self._world.options.chaos_ns - 1 * S), callback)

    def _engine(self) -> EngineOwnerView | None:
        owners = [owner for owner in self._world.owners() if not owner.is_hung and not owner.process.is_paused]
        return self._rng.choice(owners) if owners else None

    def _strike(self, name: str, owner: EngineOwnerView) -> None:
        self._world.report.struck[name] += 1
        self._world.log(f"{name}: {owner!r}")

    def _hang(self) -> None:
        owner = self._engine()
        if owner is not None:
            self._strike("hangs", owner)
            owner.hang(self._clock.now + self._rng.randrange(500 * MS, 12 * S))

    def _hang_for_ever(self) -> None:
        owner = self._engine()
        if owner is not None and len(self._world.owners()) > 2:
            self._strike("hangs for ever", owner)
            owner.hang(NEVER)

    def _kill(self) -> None:
        owner = self._engine()
        if owner is not None:
            self._strike("killed", owner)
            slot = owner.process.slot
            self._world.kill(slot)
            self._clock.call_after(self._rng.randrange(50 * MS, 3 * S), self._world.restart, slot)

    def _pause(self) -> None:
        owner = self._engine()
        if owner is not None:
            self._strike("stopped", owner)
            owner.was_disturbed = True
            owner.process.is_paused = True
            self._clock.call_after(self._rng.randrange(50 * MS, 2 * S), owner.process.resume)

    def _cut(self) -> None:
        world = self._world
        world.connections[:] = [pair for pair in world.connections if pair[0].is_open and pair[1].is_open]
        if world.connections:
            pair = self._rng.choice(world.connections)
            world.report.struck["cut"] += 1
            world.log(f"the connection of {pair[0].process!r} and {pair[1].process!r} is cut")
            world.cut(pair)

    def _partition(self) -> None:
        world, rng = self._world, self._rng
        one, other = rng.sample(sorted(world.slots), 2)
        until = self._clock.now + rng.randrange(50 * MS, 1500 * MS)
        world.report.struck["partition"] += 1
        world.log(f"partition of {one} and {other} until {until / S:.3f}")
        for source, target in ((one, other), (other, one)):
            world.links.block(source, target, until)
