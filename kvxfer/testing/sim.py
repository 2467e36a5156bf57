"""``python -m kvxfer.testing.sim``: plays many seeds, prints what struck what and how transfers ended, and fails on a
broken invariant, or on a fault that never met a phase which it should have met; must never judge anything itself.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from typing import Any

from kvxfer.testing.clock import S
from kvxfer.testing.options import Options
from kvxfer.testing.report import Totals
from kvxfer.testing.world import World, world

CELLS_AFTER_SEEDS = 2000
"""From so many seeds on, a possible cell that nobody struck is a failure."""
_BATCH = 50
_FAILURES_SHOWN = 3


@dataclasses.dataclass
class Failure:
    seed: int
    text: str
    recent: list[str]


@dataclasses.dataclass
class Batch:
    totals: Totals
    failures: list[Failure]


def load_machines(name: str) -> Any:
    """``core``, ``bugs`` (no bug on) or ``bugs:<classic bug>``, for instance ``bugs:renew_revives``."""
    kind, _, bug = name.partition(":")
    if kind == "core" and not bug:
        return importlib.import_module("kvxfer._native._core")
    if kind != "bugs":
        raise ValueError(f"no machines {name!r}: say core, bugs or bugs:<name>")
    machines = importlib.import_module("kvxfer._native._machines_bugs")
    value = getattr(machines.Bug, (bug or "none").upper(), None)
    if value is None:
        raise ValueError(f"no classic bug {bug!r}")
    machines.seed_bug(value)
    return machines


def play(seed: int, machines: Any, options: Options, totals: Totals) -> Failure | None:
    """One seed into ``totals``, or why it failed."""
    run: World | None = None
    try:
        run = world(seed, machines=machines, options=options)
        totals.add(run.run())
    except Exception as error:
        where = "" if isinstance(error, AssertionError) else traceback.format_exc()
        return Failure(seed, f"{type(error).__name__}: {error}\n{where}".rstrip(), list(run.recent) if run else [])
    return None


def play_batch(first: int, count: int, machines: str, options: Options) -> Batch:
    """``count`` seeds from ``first`` on, in this process; gives up after a few failures."""
    native = load_machines(machines)
    batch = Batch(Totals(), [])
    for seed in range(first, first + count):
        failure = play(seed, native, options, batch.totals)
        if failure is not None:
            batch.failures.append(failure)
            if len(batch.failures) >= _FAILURES_SHOWN:
                break
    return batch


def play_many(first: int, count: int, machines: str, options: Options, jobs: int) -> Batch:
    """All seeds, on ``jobs`` processes; the sum does not depend on how many."""
    batches = [(at, min(_BATCH, first + count - at)) for at in range(first, first + count, _BATCH)]
    if jobs == 1:
        parts = (play_batch(at, n, machines, options) for at, n in batches)
        return _sum(list(_until_failed(parts)))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return _sum(list(pool.map(play_batch, *zip(*((*b, machines, options) for b in batches), strict=True))))


def _until_failed(parts: Any) -> Any:
    failed = 0
    for part in parts:
        yield part
        failed += len(part.failures)
        if failed >= _FAILURES_SHOWN:
            return


def _sum(parts: list[Batch]) -> Batch:
    total = Batch(Totals(), [])
    for part in parts:
        total.totals.merge(part.totals)
        total.failures += part.failures
    return total


def replay_command(seed: int, machines: str, has_faults: bool) -> str:
    extra = "" if machines == "core" else f" --machines {machines}"
    return f"python -m kvxfer.testing.sim --replay {seed}{extra}" + ("" if has_faults else " --no-faults")


def replay(seed: int, machines: str, options: Options) -> int:
    """One seed, with its whole log as it happens."""
    run = world(seed, machines=load_machines(machines), options=options)
    run.recent = _Printer()
    totals = Totals()
    try:
        report = run.run()
    except AssertionError as error:
        print(f"seed {seed} at {run.clock.now / S:.9f} s: {error}")
        return 1
    totals.add(report)
    print("\n".join(totals.lines()))
    print(f"digest {report.digest}")
    return 0


class _Printer(collections.deque[str]):
    def append(self, line: str) -> None:
        print(line)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvxfer.testing.sim", description=__doc__.split("\n")[0] if __doc__ else ""
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
    options = Options(has_faults=not asked.no_faults)
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
    for failure in batch.failures[:_FAILURES_SHOWN]:
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
    engines = importlib.import_module("kvxfer.testing.engines.sim")
    try:
        bug = engines.EngineBug(asked.bug)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options = engines.EngineOptions(has_faults=not asked.no_faults)
    if asked.replay is not None:
        return int(engines.replay(asked.replay, asked.machines, options, bug))
    return int(engines.main(asked.seeds, asked.seed_base, asked.machines, options, bug, asked.jobs))


if __name__ == "__main__":
    sys.exit(main())
