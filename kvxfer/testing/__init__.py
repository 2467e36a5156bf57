"""A whole kvxfer in one process on a virtual clock: agents, coordinator, network and memory are fakes, the machines
that decide are the ones of production. Decides nothing about safety itself; must never be imported by anything that
serves.

``world(seed, machines=_core).run()`` plays one seed and returns its :class:`Report`, or raises :class:`Violation`.
"""

from __future__ import annotations

from kvxfer.testing.checkers import Invariant, Violation
from kvxfer.testing.faults import Kind, Phase
from kvxfer.testing.options import Options
from kvxfer.testing.report import Report, Totals
from kvxfer.testing.world import World, world

__all__ = ["Invariant", "Kind", "Options", "Phase", "Report", "Totals", "Violation", "World", "world"]
