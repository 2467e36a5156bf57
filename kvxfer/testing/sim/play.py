"""Plays one seed or many of the world of agents, on as many processes as asked, and adds up their reports; must never
judge anything itself.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import traceback
from typing import Any

from kvxfer.testing.sim.report import Totals
from kvxfer.testing.sim.virtual_clock import S
from kvxfer.testing.sim.world import World, world
from kvxfer.testing.sim.world_options import WorldOptions

_BATCH = 50
FAILURES_SHOWN = 3


@dataclasses.dataclass
class SeedFailure:
    seed: int
    text: str
    recent: list[str]


@dataclasses.dataclass
class Batch:
    totals: Totals
    failures: list[SeedFailure]


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


def play(seed: int, machines: Any, options: WorldOptions, totals: Totals) -> SeedFailure | None:
    """One seed into ``totals``, or why it failed."""
    run: World | None = None
    try:
        run = world(seed, machines=machines, options=options)
        totals.add(run.run())
    except Exception as error:
        where = "" if isinstance(error, AssertionError) else traceback.format_exc()
        return SeedFailure(seed, f"{type(error).__name__}: {error}\n{where}".rstrip(), list(run.recent) if run else [])
    return None


def play_batch(first: int, count: int, machines: str, options: WorldOptions) -> Batch:
    """``count`` seeds from ``first`` on, in this process; gives up after a few failures."""
    native = load_machines(machines)
    batch = Batch(Totals(), [])
    for seed in range(first, first + count):
        failure = play(seed, native, options, batch.totals)
        if failure is not None:
            batch.failures.append(failure)
            if len(batch.failures) >= FAILURES_SHOWN:
                break
    return batch


def play_many(first: int, count: int, machines: str, options: WorldOptions, jobs: int) -> Batch:
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
        if failed >= FAILURES_SHOWN:
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


def replay(seed: int, machines: str, options: WorldOptions) -> int:
    """One seed, with its whole log as it happens."""
    run = world(seed, machines=load_machines(machines), options=options)
    run.recent = LogPrinter()
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


class LogPrinter(collections.deque[str]):
    """A log that is printed as it grows."""

    def append(self, line: str) -> None:
        print(line)
