"""Whole engines in the simulated world: the executor and scheduler of production over the machines of production, with
a model that computes nothing, on the virtual clock. Decides nothing about waiting itself; must never be imported by
anything that serves. It loads torch, so ``kvxfer.testing`` alone does not import it.

``engine_world(seed, machines=_core).run()`` plays one seed and returns its report, or raises ``Violation``.
"""

from __future__ import annotations

from kvxfer.testing.sim.engines.bug import EngineBug
from kvxfer.testing.sim.engines.engine_options import EngineOptions
from kvxfer.testing.sim.engines.engine_report import EngineReport
from kvxfer.testing.sim.engines.world_of_engines import EngineWorld, engine_world

__all__ = ["EngineBug", "EngineOptions", "EngineReport", "EngineWorld", "engine_world"]
