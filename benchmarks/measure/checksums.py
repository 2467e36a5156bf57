"""What checksums cost on `stream`: the same transfers with and without them, in turns.

It decides the order of turns and the figures of one size of blocks. It must never know how they are shown.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from measure.contenders import HUGE, PREPARED, READ, STREAM, Case, Option, kvxfer
from measure.ends import WorkerFailed
from measure.rows import SEEDS, Room, Spread, Turns

SIZES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)
OFF, ON, SAMPLED = "off", "on", "sampled"
SAMPLED_AT_ONCE = 16
"""As many transfers as one of which is checked, on the average: a turn says what sampling costs."""


def cost(room: Room, site: str, library: str, nbytes: int, pairs: int) -> list[dict[str, Any]]:
    """For each size GB/s without and with checksums, and what part of the speed they take (quartiles of the pairs;
    ``median`` is of the two medians)."""
    return [at_size(room, site, library, nbytes, pairs, size) for size in SIZES]


def at_size(room: Room, site: str, library: str, nbytes: int, pairs: int, block_bytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {"site": site, "block_bytes": block_bytes}
    try:
        for policy, at_once in ((ON, 1), (SAMPLED, SAMPLED_AT_ONCE)):
            case = Case(STREAM, READ, HUGE, PREPARED, at_once)
            turns = Turns(room, case, nbytes)
            option = kvxfer(case, library)[0]
            choices = {name: dataclasses.replace(option, how=(*option.how, ("checks", name))) for name in (OFF, policy)}
            found |= compare(turns, choices, block_bytes, pairs, policy)
    except WorkerFailed as error:
        found["error"] = str(error).splitlines()[0]
    return found


def compare(turns: Turns, choices: dict[str, Option], block_bytes: int, pairs: int, policy: str) -> dict[str, Any]:
    """A pair before the first that counts: connections and pages are made there."""
    speeds: dict[str, list[float]] = {OFF: [], policy: []}
    for turn in range(-1, pairs):
        seed = next(SEEDS)
        for name in (OFF, policy) if turn % 2 else (policy, OFF):
            speed = turns.take(choices[name], block_bytes, turns.nbytes, seed).gb_s
            if turn >= 0:
                speeds[name].append(speed)
    costs = [1 - on / off for on, off in zip(speeds[policy], speeds[OFF], strict=True)]
    spread = dataclasses.asdict(Spread.of(costs))
    spread["median"] = 1 - statistics.median(speeds[policy]) / statistics.median(speeds[OFF])
    return {f"{policy}_cost": spread, **_median_speeds(policy, speeds)}


def _median_speeds(policy: str, speeds: dict[str, Sequence[float]]) -> dict[str, float]:
    """The figures without checksums are those of single transfers."""
    names = (OFF, ON) if policy == ON else (policy,)
    return {name: statistics.median(speeds[name]) for name in names}
