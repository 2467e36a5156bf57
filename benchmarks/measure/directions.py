"""READ beside WRITE on `stream`: the same blocks in turns, between the same two processes.

It decides the order of turns and the figures of one size of blocks. It must never know how they are shown.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from measure.contenders import HUGE, PREPARED, READ, STREAM, WRITE, Case, kvxfer
from measure.rows import SEEDS, Room, Spread, Turns, each_case

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
WARM_UP = 2
"""Pairs before the first that counts: connections and pages are made there."""


def compare(room: Room, site: str, library: str, nbytes: int, pairs: int) -> list[dict[str, Any]]:
    """For each size GB/s of both directions, and WRITE's speed over READ's (quartiles of the pairs)."""
    cases = ({"site": site, "block_bytes": block_bytes} for block_bytes in SIZES)
    return each_case(cases, lambda site, block_bytes: _compare(room, library, block_bytes, nbytes, pairs))


def _compare(room: Room, library: str, block_bytes: int, nbytes: int, pairs: int) -> dict[str, Any]:
    turns = {op: Turns(room, Case(STREAM, op, HUGE, PREPARED, 1), nbytes) for op in (READ, WRITE)}
    speeds: dict[str, list[float]] = {READ: [], WRITE: []}
    for turn in range(-WARM_UP, pairs):
        seed = next(SEEDS)
        for op in (READ, WRITE) if turn % 2 else (WRITE, READ):
            moved = turns[op].take(kvxfer(turns[op].case, library)[0], block_bytes, nbytes, seed)
            if turn >= 0:
                speeds[op].append(moved.gb_s)
    ratios = [write / read for read, write in zip(speeds[READ], speeds[WRITE], strict=True)]
    return {
        **{op: dataclasses.asdict(Spread.of(of_op)) for op, of_op in speeds.items()},
        "ratio": dataclasses.asdict(Spread.of(ratios)),
    }
