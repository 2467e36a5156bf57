"""The world of engines, as ``python -m kvxfer.testing.sim --world engines`` plays it. Decides nothing."""

from __future__ import annotations

import functools

from kvxfer.testing.sim.engines.bug import EngineBug
from kvxfer.testing.sim.engines.engine_options import EngineOptions
from kvxfer.testing.sim.engines.engine_report import EngineReport
from kvxfer.testing.sim.engines.world_of_engines import engine_world
from kvxfer.testing.sim.play import Batch, Game, play_game


def engines(options: EngineOptions, bug: EngineBug) -> Game:
    return Game(functools.partial(engine_world, options=options, bug=bug), EngineReport)


def play_many_engines(
    first: int, count: int, machines: str, options: EngineOptions, bug: EngineBug, jobs: int
) -> Batch:
    """As :func:`~kvxfer.testing.sim.play.play_game`, of the world of engines."""
    return play_game(first, count, machines, engines(options, bug), jobs)
