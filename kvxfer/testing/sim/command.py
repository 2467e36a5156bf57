"""``python -m kvxfer.testing.sim``: plays many seeds, prints which fault struck in which phase and how transfers
ended, and fails on a broken invariant, or on a fault that never met a phase which it should have met.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time

from kvxfer.testing.sim.play import FAILURES_SHOWN, load_machines, play_many, replay, replay_command
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
    options = WorldOptions(has_faults=not asked.no_faults)
    try:
        load_machines(asked.machines)
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    if asked.world == "engines":
        return _main_of_engines(asked)
    if asked.replay is not None:
        return replay(asked.replay, asked.machines, options)
    began = time.monotonic()
    batch = play_many(asked.seed_base, asked.seeds, asked.machines, options, asked.jobs)
    print("\n".join(batch.totals.lines()))
    print(f"{time.monotonic() - began:.1f} s on {asked.jobs} processes")
    problems = 0
    for failure in batch.failures[:FAILURES_SHOWN]:
        problems += 1
        print("", *failure.recent[-40:], f"seed {failure.seed}: {failure.text}", sep="\n")
        print(f"replay: {replay_command(failure.seed, asked.machines, options.has_faults)}")
    for kind, phase in batch.totals.impossible_cells():
        problems += 1
        print(f"{kind} struck a transfer that was {phase}, which faults.IMPOSSIBLE says cannot be")
    if asked.seeds >= CELLS_AFTER_SEEDS and options.has_faults:
        for kind, phase in batch.totals.empty_cells():
            problems += 1
            print(f"{kind} never struck a transfer that was {phase}")
    return 1 if problems else 0


def _main_of_engines(asked: argparse.Namespace) -> int:
    engines = importlib.import_module("kvxfer.testing.sim.engines.play_engines")
    try:
        bug = engines.EngineBug(asked.bug)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options = engines.EngineOptions(has_faults=not asked.no_faults)
    if asked.replay is not None:
        return int(engines.replay(asked.replay, asked.machines, options, bug))
    return int(engines.main(asked.seeds, asked.seed_base, asked.machines, options, bug, asked.jobs))
