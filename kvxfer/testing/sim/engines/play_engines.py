"""Plays many seeds of the world of engines, for ``python -m kvxfer.testing.sim --world engines``; must never judge
anything itself.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import multiprocessing
import time
import traceback
from typing import Any

from kvxfer.testing.sim.engines.bug import EngineBug
from kvxfer.testing.sim.engines.engine_options import EngineOptions
from kvxfer.testing.sim.engines.engine_report import EngineReport, EngineTotals
from kvxfer.testing.sim.engines.world_of_engines import EngineWorld, engine_world
from kvxfer.testing.sim.play import FAILURES_SHOWN, LogPrinter, SeedFailure, load_machines
from kvxfer.testing.sim.virtual_clock import S

_BATCH = 50
_LINES_SHOWN = 40


@dataclasses.dataclass
class EngineBatch:
    totals: EngineReport
    failures: list[SeedFailure]


def play_engines(
    seed: int, machines: Any, options: EngineOptions, bug: EngineBug, totals: EngineReport
) -> SeedFailure | None:
    """One seed into ``totals``, or why it failed."""
    run: EngineWorld | None = None
    try:
        run = engine_world(seed, machines=machines, options=options, bug=bug)
        totals.add(run.run())
    except Exception as error:
        where = "" if isinstance(error, AssertionError) else traceback.format_exc()
        return SeedFailure(seed, f"{type(error).__name__}: {error}\n{where}".rstrip(), list(run.recent) if run else [])
    return None


def play_engine_batch(first: int, count: int, machines: str, options: EngineOptions, bug: EngineBug) -> EngineBatch:
    """``count`` seeds from ``first`` on, in this process; gives up after a few failures."""
    log = logging.getLogger("kvxfer")
    level = log.level
    log.setLevel(logging.CRITICAL)  # engines say what they give up, hundreds of times
    native = load_machines(machines)
    batch = EngineBatch(EngineTotals(), [])
    try:
        for seed in range(first, first + count):
            failure = play_engines(seed, native, options, bug, batch.totals)
            if failure is not None:
                batch.failures.append(failure)
                if len(batch.failures) >= FAILURES_SHOWN:
                    break
    finally:
        log.setLevel(level)
    return batch


def play_many_engines(
    first: int, count: int, machines: str, options: EngineOptions, bug: EngineBug, jobs: int
) -> EngineBatch:
    """All seeds, on ``jobs`` processes; the sum does not depend on how many."""
    batches = [(at, min(_BATCH, first + count - at)) for at in range(first, first + count, _BATCH)]
    total = EngineBatch(EngineTotals(), [])
    if jobs == 1:
        for at, n in batches:
            _add(total, play_engine_batch(at, n, machines, options, bug))
            if len(total.failures) >= FAILURES_SHOWN:
                break
        return total
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        rows = [(at, n, machines, options, bug) for at, n in batches]
        for part in pool.map(play_engine_batch, *zip(*rows, strict=True)):
            _add(total, part)
    return total


def _add(total: EngineBatch, part: EngineBatch) -> None:
    total.totals.add(part.totals)
    total.failures += part.failures


def replay(seed: int, machines: str, options: EngineOptions, bug: EngineBug) -> int:
    """One seed, with its whole log as it happens."""
    run = engine_world(seed, machines=load_machines(machines), options=options, bug=bug)
    run.recent = LogPrinter()
    try:
        report = run.run()
    except AssertionError as error:
        print(f"seed {seed} at {run.clock.now / S:.9f} s: {error}")
        return 1
    print("\n".join(report.lines()))
    print(f"digest {report.digest}")
    return 0


def main(seeds: int, base: int, machines: str, options: EngineOptions, bug: EngineBug, jobs: int) -> int:
    """What the command prints, and its exit status."""
    began = time.monotonic()
    batch = play_many_engines(base, seeds, machines, options, bug, jobs)
    print("\n".join(batch.totals.lines()))
    print(f"{time.monotonic() - began:.1f} s on {jobs} processes")
    extra = ("" if machines == "core" else f" --machines {machines}") + ("" if options.has_faults else " --no-faults")
    extra += "" if bug is EngineBug.NONE else f" --bug {bug}"
    for failure in batch.failures[:FAILURES_SHOWN]:
        print("", *failure.recent[-_LINES_SHOWN:], f"seed {failure.seed}: {failure.text}", sep="\n")
        print(f"replay: python -m kvxfer.testing.sim --world engines --replay {failure.seed}{extra}")
    return 1 if batch.failures else 0
