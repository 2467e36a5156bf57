"""A whole kvxfer in one process on a virtual clock: agents, coordinator, network and memory are fakes, the machines
that decide are the ones of production. Decides nothing about safety itself; must never be imported by anything that
serves.

``world(seed, machines=_core).run()`` plays one seed and returns its :class:`SimReport`, or raises :class:`Violation`.
"""

from __future__ import annotations

from kvxfer.testing.sim.checkers import Invariant, Violation
from kvxfer.testing.sim.faults import Kind, TransferPhase
from kvxfer.testing.sim.report import SimReport
from kvxfer.testing.sim.world import World, world
from kvxfer.testing.sim.world_options import WorldOptions

__all__ = [
    "Invariant",
    "Kind",
    "SimReport",
    "TransferPhase",
    "Violation",
    "World",
    "WorldOptions",
    "world",
]
