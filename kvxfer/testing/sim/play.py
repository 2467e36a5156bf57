"""Plays one seed or many of a world, on as many processes as asked, and adds up their reports; must never judge
anything itself.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import importlib
import logging
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvxfer.testing.sim.report import SimReport
from kvxfer.testing.sim.virtual_clock import S
from kvxfer.testing.sim.world import world
from kvxfer.testing.sim.world_options import WorldOptions

_BATCH = 50
_LINES_SHOWN = 40
FAILURES_SHOWN = 3


@dataclasses.dataclass
class SeedFailure:
    seed: int
    text: str
    recent: list[str]


@dataclasses.dataclass
class Batch:
    totals: Any
    """A report of the world that was played."""
    failures: list[SeedFailure]


@dataclasses.dataclass(frozen=True)
class Game:
    """What is played: ``make(seed, machines=...)`` is the world of a seed, and ``report`` the class of its report.
    Travels between processes."""

    make: Callable[..., Any]
    report: type[Any]


def agents(options: WorldOptions) -> Game:
    return Game(functools.partial(world, options=options), SimReport)


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


def play(seed: int, machines: Any, game: Game, totals: Any) -> SeedFailure | None:
    """One seed into ``totals``, or why it failed."""
    run: Any = None
    try:
        run = game.make(seed, machines=machines)
        totals.add(run.run())
    except Exception as error:
        where = "" if isinstance(error, AssertionError) else traceback.format_exc()
        return SeedFailure(seed, f"{type(error).__name__}: {error}\n{where}".rstrip(), list(run.recent) if run else [])
    return None


def play_batch(first: int, count: int, machines: str, game: Game) -> Batch:
    """``count`` seeds from ``first`` on, in this process; gives up after a few failures."""
    log = logging.getLogger("kvxfer")
    level = log.level
    log.setLevel(logging.CRITICAL)  # engines say what they give up, hundreds of times
    native = load_machines(machines)
    batch = Batch(game.report.of_none(), [])
    try:
        for seed in range(first, first + count):
            failure = play(seed, native, game, batch.totals)
            if failure is not None:
                batch.failures.append(failure)
                if len(batch.failures) >= FAILURES_SHOWN:
                    break
    finally:
        log.setLevel(level)
    return batch


def play_game(first: int, count: int, machines: str, game: Game, jobs: int) -> Batch:
    """All seeds, on ``jobs`` processes; the sum does not depend on how many."""
    batches = [(at, min(_BATCH, first + count - at), machines, game) for at in range(first, first + count, _BATCH)]
    if jobs == 1:
        return _sum(game, _until_failed(play_batch(*batch) for batch in batches))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return _sum(game, pool.map(play_batch, *zip(*batches, strict=True)))


def play_many(first: int, count: int, machines: str, options: WorldOptions, jobs: int) -> Batch:
    """As :func:`play_game`, of the world of agents."""
    return play_game(first, count, machines, agents(options), jobs)


def _until_failed(parts: Iterable[Batch]) -> Iterator[Batch]:
    failed = 0
    for part in parts:
        yield part
        failed += len(part.failures)
        if failed >= FAILURES_SHOWN:
            return


def _sum(game: Game, parts: Iterable[Batch]) -> Batch:
    total = Batch(game.report.of_none(), [])
    for part in parts:
        total.totals.add(part.totals)
        total.failures += part.failures
    return total


def show(batch: Batch, began_s: float, jobs: int, replay_command: Callable[[int], str]) -> int:
    """Print what became of all seeds; returns how many of those that failed were shown."""
    print("\n".join(batch.totals.lines()))
    print(f"{time.monotonic() - began_s:.1f} s on {jobs} processes")
    shown = batch.failures[:FAILURES_SHOWN]
    for failure in shown:
        print("", *failure.recent[-_LINES_SHOWN:], f"seed {failure.seed}: {failure.text}", sep="\n")
        print(f"replay: {replay_command(failure.seed)}")
    return len(shown)


def replay(seed: int, machines: str, game: Game) -> int:
    """One seed, with its whole log as it happens."""
    run = game.make(seed, machines=load_machines(machines))
    run.recent = LogPrinter()
    try:
        report = run.run()
    except AssertionError as error:
        print(f"seed {seed} at {run.clock.now / S:.9f} s: {error}")
        return 1
    print("\n".join(report.lines()))
    print(f"digest {report.digest}")
    return 0


class LogPrinter(collections.deque[str]):
    """A log that is printed as it grows."""

    def append(self, line: str) -> None:
        print(line)
