"""What checksums cost on `stream`: the same transfers with and without them, in turns.

It decides the order of turns and the figures of one size of blocks. It must never know how they are shown.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from measure.contenders import HUGE, PREPARED, READ, STREAM, WRITE, Case, kvxfer
from measure.ends import Moved
from measure.rows import SEEDS, Room, Spread, Turns, each_case

SIZES = (4 << 10, 64 << 10, 1 << 20)
OFF, ON = "off", "on"
WARM_UP = 2
"""Pairs before the first that counts: connections and pages are made there."""


def cost(room: Room, site: str, library: str, nbytes: int, pairs: int) -> list[dict[str, Any]]:
    """For each direction and size GB/s and processor seconds a GB without and with checksums, and what part of the
    speed they take (quartiles of the pairs; ``median`` is of the two medians)."""
    cases = ({"site": site, "op": op, "block_bytes": block_bytes} for op in (READ, WRITE) for block_bytes in SIZES)

    def compare(site: str, op: str, block_bytes: int) -> dict[str, Any]:
        return _compare(Turns(room, Case(STREAM, op, HUGE, PREPARED, 1), nbytes), library, block_bytes, pairs)

    return each_case(cases, compare)


def _compare(turns: Turns, library: str, block_bytes: int, pairs: int) -> dict[str, Any]:
    option = kvxfer(turns.case, library)[0]
    choices = {name: dataclasses.replace(option, how=(*option.how, ("checks", name))) for name in (OFF, ON)}
    moved: dict[str, list[Moved]] = {OFF: [], ON: []}
    for turn in range(-WARM_UP, pairs):
        seed = next(SEEDS)
        for name in (OFF, ON) if turn % 2 else (ON, OFF):
            one = turns.take(choices[name], block_bytes, turns.nbytes, seed)
            if turn >= 0:
                moved[name].append(one)
    speeds = {name: statistics.median(one.gb_s for one in all_of) for name, all_of in moved.items()}
    costs = [1 - on.gb_s / off.gb_s for off, on in zip(moved[OFF], moved[ON], strict=True)]
    return {
        **speeds,
        "cost": {**dataclasses.asdict(Spread.of(costs)), "median": 1 - speeds[ON] / speeds[OFF]},
        "cpu_s_per_gb": {name: statistics.median(one.cpu_s_per_gb for one in all_of) for name, all_of in moved.items()},
    }
