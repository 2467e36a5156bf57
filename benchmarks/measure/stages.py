"""What a run measures, in order: from the options of a command line, or the whole table.

It decides the cases and their order (the most telling first, because no row begins once a run's time is spent). It must
never measure.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from measure.contenders import (
    CMA,
    COPYING,
    HUGE,
    LANES,
    MAPPED,
    ONE_SHOT,
    PREPARED,
    READ,
    SMALL,
    STREAM,
    UCX,
    UNIX,
    WRITE,
    Case,
    parse_size,
)

ONE_HOST, NAMESPACES = "one host", "two namespaces"
K, M = 1 << 10, 1 << 20
ALL = (4 * K, 16 * K, 64 * K, 256 * K, 1 * M, 4 * M)
FEW = (4 * K, 64 * K, 1 * M)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Rows that make one table."""

    case: Case
    sizes: tuple[int, ...]
    site: str = ONE_HOST
    via: str = "post"
    rounds: int = 1
    """So many times a row's pairs and sets of processes."""


UCX_ROUNDS = 2
"""Both contenders make the same system calls there: which pages a process got outweighs all else."""


def stage(lane: str, op: str, pages: str, sizes: tuple[int, ...], site: str = ONE_HOST, via: str = "post") -> Stage:
    """By one copying thread, as what it is compared with."""
    rounds = UCX_ROUNDS if lane == UCX else 1
    return Stage(Case(lane, op, pages, PREPARED, 1, 1 if lane in COPYING else 0), sizes, site, via, rounds)


def by_default(lane: str, pages: str, sizes: tuple[int, ...]) -> Stage:
    """By as many copying threads as processors are idle."""
    return Stage(Case(lane, READ, pages, PREPARED, 1), sizes)


def table() -> list[Stage]:
    """Everything that benchmarks/RESULTS.md shows."""
    stages = [
        stage(MAPPED, READ, SMALL, ALL),
        stage(CMA, READ, HUGE, ALL),
        stage(STREAM, READ, HUGE, ALL),
        stage(STREAM, WRITE, HUGE, ALL),
        stage(UCX, READ, HUGE, ALL),
        stage(STREAM, READ, HUGE, ALL, site=NAMESPACES),
        stage(STREAM, WRITE, HUGE, FEW, site=NAMESPACES),
        stage(MAPPED, READ, HUGE, ALL),
        stage(CMA, READ, SMALL, ALL),
        by_default(CMA, HUGE, ALL),
        by_default(MAPPED, SMALL, FEW),
        by_default(CMA, SMALL, FEW),
    ]
    for lane in (STREAM, CMA, MAPPED):
        stages += [Stage(Case(lane, READ, SMALL if lane == MAPPED else HUGE, PREPARED, 64), (64 * K,))]
    stages += [
        Stage(Case(STREAM, READ, HUGE, PREPARED, 8), (64 * K,)),
        stage(UCX, READ, SMALL, ALL),
        stage(STREAM, READ, SMALL, ALL),
        stage(STREAM, WRITE, SMALL, FEW),
        stage(STREAM, READ, SMALL, FEW, site=NAMESPACES),
        stage(UNIX, READ, HUGE, FEW),
        stage(UCX, WRITE, HUGE, FEW),
        stage(CMA, WRITE, HUGE, FEW),
        stage(MAPPED, WRITE, SMALL, FEW),
        stage(UNIX, WRITE, HUGE, FEW),
        stage(MAPPED, READ, SMALL, FEW, via="pull"),
        stage(STREAM, READ, HUGE, FEW, via="pull"),
        Stage(Case(CMA, READ, HUGE, ONE_SHOT, 1), FEW),
        Stage(Case(STREAM, READ, HUGE, ONE_SHOT, 1), FEW),
    ]
    return stages


def asked(options: argparse.Namespace) -> Iterator[Stage]:
    """The cases of a command line, every choice with every other."""
    sizes = tuple(parse_size(size) for size in options.sizes.split(","))
    for lane in options.lanes.split(","):
        if lane not in LANES:
            raise SystemExit(f"transfer.py: no lane is called {lane!r}; lanes are {', '.join(LANES)}")
        if options.netns and lane != STREAM:
            continue
        for pages in options.pages.split(","):
            for op in options.direction.split(","):
                for lists in options.lists:
                    for at_once in options.at_once.split(","):
                        threads = options.copy_threads if lane in COPYING else 0
                        case = Case(lane, op, pages, lists, int(at_once), threads)
                        for via in options.via.split(","):
                            if via == "post" or (op == READ and lane in (MAPPED, STREAM)):
                                yield Stage(case, sizes, NAMESPACES if options.netns else ONE_HOST, via)
