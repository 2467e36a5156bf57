"""``python -m kvxfer.testing.sim``: plays many seeds, prints which fault struck in which phase and how transfers
ended, and fails on a broken invariant, or on a fault that never met a phase which it should have met.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import time

from kvxfer.testing.sim.play import Game, agents, load_machines, play_game, replay, show
from kvxfer.testing.sim.world_options import WorldOptions

CELLS_AFTER_SEEDS = 2000
"""From so many seeds on, a possible cell that no fault struck is a failure."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvxfer.testing.sim",
        description="plays many seeds of the simulated world, and fails on a broken invariant",
    )
    parser.add_argument(
        "--world", choices=("agents", "engines"), default="agents", help="agents alone, or whole engines (needs torch)"
    )
    parser.add_argument(
        "--bug", default="none", help="of the world of engines: a way of waiting that went wrong, by name"
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (default 200)")
    parser.add_argument("--seed-base", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--machines", default="core", help="core, bugs, or bugs:<classic bug>")
    parser.add_argument("--no-faults", action="store_true", help="worlds in which nothing goes wrong")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default: 2 at most)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one seed and print everything that happens")
    asked = parser.parse_args(arguments)
    try:
        load_machines(asked.machines)
        game = _engines(asked) if asked.world == "engines" else agents(WorldOptions(has_faults=not asked.no_faults))
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    if asked.replay is not None:
        return replay(asked.replay, asked.machines, game)
    began_s = time.monotonic()
    batch = play_game(asked.seed_base, asked.seeds, asked.machines, game, asked.jobs)
    problems = show(batch, began_s, asked.jobs, functools.partial(_replay_command, asked))
    if asked.world == "engines":
        return 1 if problems else 0
    for kind, phase in batch.totals.impossible_cells():
        problems += 1
        print(f"{kind} struck a transfer that was {phase}, which faults.IMPOSSIBLE says cannot be")
    if asked.seeds >= CELLS_AFTER_SEEDS and not asked.no_faults:
        for kind, phase in batch.totals.empty_cells():
            problems += 1
            print(f"{kind} never struck a transfer that was {phase}")
    return 1 if problems else 0


def _engines(asked: argparse.Namespace) -> Game:
    """The world of engines, which needs torch. Raises ValueError for a bug that there is not."""
    engines = importlib.import_module("kvxfer.testing.sim.engines.play_engines")
    bugs = importlib.import_module("kvxfer.testing.sim.engines")
    game: Game = engines.engines(bugs.EngineOptions(has_faults=not asked.no_faults), bugs.EngineBug(asked.bug))
    return game


def _replay_command(asked: argparse.Namespace, seed: int) -> str:
    world = " --world engines" if asked.world == "engines" else ""
    flags = "" if asked.machines == "core" else f" --machines {asked.machines}"
    flags += " --no-faults" if asked.no_faults else ""
    flags += "" if asked.bug == "none" else f" --bug {asked.bug}"
    return f"python -m kvxfer.testing.sim{world} --replay {seed}{flags}"
