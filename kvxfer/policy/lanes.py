"""Decides which lanes can carry one pull, best first, and says of every other lane why not; must never know how a lane
moves bytes, nor try one.

The order is the caller's. A lane that is possible here may still turn out not to be there for us (a socket file that a
container does not see, a mapping that is refused): the native core then goes on to the next one of the list and notes
why, and both texts together are the transfer's ``lane_reason``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from kvxfer.types import DataAddress, Exposure, Lane, PoolRecord

MEMORY_HOST = "memory:"
"""How the ``host_id`` of an agent in an in-process network begins."""


@dataclasses.dataclass(frozen=True)
class LaneEnd:
    """One side of a pull: where the agent can be reached, and the pool that takes part."""

    address: DataAddress
    pool: PoolRecord


def choose_lanes(
    ours: LaneEnd, theirs: LaneEnd, allowed: Sequence[Lane]
) -> tuple[tuple[Lane, ...], Mapping[Lane, str]]:
    """The lanes that can carry a pull from ``theirs`` (the source) to ``ours``, in the order of ``allowed``; and for
    every lane of ``allowed`` one clause that says why it can or cannot.
    """
    lanes: list[Lane] = []
    reasons: dict[Lane, str] = {}
    for lane in dict.fromkeys(allowed):
        obstacle = _obstacle(lane, ours, theirs)
        if obstacle is None:
            lanes.append(lane)
        reasons[lane] = obstacle or _MERITS[lane]
    return tuple(lanes), reasons


def explain(lane: Lane | None, reasons: Mapping[Lane, str], notes: str = "") -> str:
    """One sentence for people: why ``lane`` (``None``: nothing) was used, and why the better ones were not.

    ``notes`` are the native core's, about lanes that looked possible and were given up.
    """
    names = list(reasons)
    better = names if lane is None else names[: names.index(lane)] if lane in reasons else []
    rejected = [f"{other.value}: {reasons[other]}" for other in better if not notes or reasons[other] != _MERITS[other]]
    if notes:
        rejected.append(notes)
    if lane is None:
        return "; ".join(rejected) or "no lane is allowed"
    head = f"{lane.value}: {reasons.get(lane, 'named by the caller')}"
    return f"{head} (not {'; '.join(rejected)})" if rejected else head


_MERITS = {
    Lane.MAPPED: "same host, source pool in shared memory",
    Lane.STREAM: "the source is reached over TCP",
    Lane.MEMORY: "same process",
}


def _obstacle(lane: Lane, ours: LaneEnd, theirs: LaneEnd) -> str | None:
    """Why ``lane`` cannot join the two, or ``None``."""
    is_same_host = bool(ours.address.host_id) and ours.address.host_id == theirs.address.host_id
    if lane is Lane.MEMORY:
        is_memory = ours.address.host_id.startswith(MEMORY_HOST)
        return None if is_memory and is_same_host else "the two agents do not share an in-process network"
    if lane is Lane.STREAM:
        return None if theirs.address.tcp_port else "the source listens on no TCP port"
    if not is_same_host:
        return "the source is on another host, or another user's"
    if not ours.address.unix_path or not theirs.address.unix_path:
        return f"the {'reader' if theirs.address.unix_path else 'source'} listens on no Unix socket"
    if theirs.pool.exposure is not Exposure.POOL:
        return "the source pool is exposed by grant only"
    if not theirs.pool.is_shareable:
        return "the source pool's memory was not allocated by kvxfer"
    return None
