"""`stream` over one connection and over several: the same transfers in turns.

It decides the order of turns and the figures of one size of blocks. It must never know how they are shown.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from measure.contenders import HUGE, PREPARED, READ, STREAM, Case, kvxfer
from measure.rows import SEEDS, Room, Spread, Turns, each_case

SIZES = (4 << 10, 64 << 10, 1 << 20)
STRIPES = (1, 2, 4)
WARM_UP = 2
"""Rounds before the first that counts: connections and pages are made there."""


def compare(room: Room, site: str, library: str, nbytes: int, pairs: int) -> list[dict[str, Any]]:
    """For each size GB/s by the number of connections, and the speed of several over that of one (quartiles of the
    pairs)."""
    cases = ({"site": site, "block_bytes": block_bytes} for block_bytes in SIZES)
    return each_case(cases, lambda site, block_bytes: _compare(room, library, block_bytes, nbytes, pairs))


def _compare(room: Room, library: str, block_bytes: int, nbytes: int, pairs: int) -> dict[str, Any]:
    turns = Turns(room, Case(STREAM, READ, HUGE, PREPARED, 1), nbytes)
    choices = {stripes: kvxfer(turns.case, library, stripes=stripes)[0] for stripes in STRIPES}
    speeds: dict[int, list[float]] = {stripes: [] for stripes in STRIPES}
    orders = itertools.cycle(itertools.permutations(STRIPES))
    for turn in range(-WARM_UP, pairs):
        seed = next(SEEDS)
        for stripes in next(orders):
            moved = turns.take(choices[stripes], block_bytes, nbytes, seed)
            if turn >= 0:
                speeds[stripes].append(moved.gb_s)
    ratios = {
        stripes: [several / one for several, one in zip(speeds[stripes], speeds[1], strict=True)]
        for stripes in STRIPES[1:]
    }
    return {
        "gb_s": {str(stripes): dataclasses.asdict(Spread.of(of_it)) for stripes, of_it in speeds.items()},
        "ratio": {str(stripes): dataclasses.asdict(Spread.of(of_it)) for stripes, of_it in ratios.items()},
    }
