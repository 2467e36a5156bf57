"""Decides which lanes can carry a read, best first, and says of every other lane why not; must never know how a lane
moves bytes, nor try one.

Four facts decide which lanes are possible: the lanes that the operators of both sides allow (an address names the lanes
that its agent serves), the hosts and users of both agents, how the source pool is exposed, and the kind of memory.
Measurements decide which possible lane is tried first (:mod:`kvxfer.policy.calibration`). A possible lane may still
fail when it is used: a container does not see the socket file, a ptrace rule forbids the read, the kernel refuses a
mapping. Then the native core takes the next lane of the list and notes why. Both texts together are the transfer's
``lane_reason``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvxfer.types import DataAddress, Exposure, Lane, MemoryKind

MEMORY_HOST = "memory:"
"""How the ``host_id`` of an agent in an in-process network begins."""


class Memory(Protocol):
    """What decides about lanes in the record of a pool or of a region."""

    @property
    def exposure(self) -> Exposure: ...
    @property
    def is_shareable(self) -> bool:
        """Allocated by kvxfer, so that a reader on the same host may map it."""
        ...

    @property
    def memory(self) -> MemoryKind: ...


@dataclasses.dataclass(frozen=True)
class LaneEnd:
    """One side of a read: where the agent can be reached, and the pool or region that takes part."""

    address: DataAddress
    pool: Memory


def choose_lanes(
    ours: LaneEnd, theirs: LaneEnd, allowed: Sequence[Lane]
) -> tuple[tuple[Lane, ...], Mapping[Lane, str]]:
    """The lanes that can carry a read from ``theirs`` (the source) to ``ours``, in the order of ``allowed``; and for
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


def is_same_host(ours: DataAddress, theirs: DataAddress) -> bool:
    """Whether both run on one kernel as one user; no agent is on a host without a name."""
    return bool(ours.host_id) and ours.host_id == theirs.host_id


def checking_lanes(lanes: Sequence[Lane], reasons: Mapping[Lane, str]) -> tuple[tuple[Lane, ...], Mapping[Lane, str]]:
    """As :func:`choose_lanes`, without those on which registered memory has no checksums."""
    found = tuple(lane for lane in lanes if lane in _SENDING_LANES)
    left_out = {lane: _NO_CHECKSUMS for lane in lanes if lane not in _SENDING_LANES}
    return found, {lane: left_out.get(lane, reason) for lane, reason in reasons.items()}


def explain(
    lane: Lane | None,
    reasons: Mapping[Lane, str],
    notes: str = "",
    *,
    passed_over: Mapping[Lane, str] | None = None,
    is_checked: bool | None = None,
) -> str:
    """One sentence for people: why the transfer used ``lane`` (``None``: no lane), and why it used none of the lanes
    before it in ``reasons``.

    ``notes``: what the native core says about lanes that looked possible and failed. ``passed_over``: why possible
    lanes were to be tried after ``lane`` (:meth:`kvxfer.policy.calibration.LaneOrder.passed_over`). ``is_checked``:
    whether every byte had a checksum; ``None``: checksums were not asked for.
    """
    names = list(reasons)
    better = names if lane is None else names[: names.index(lane)] if lane in reasons else []
    rejected = []
    for other in better:
        why = reasons[other]
        if why == _MERITS[other]:  # it was possible: choose_lanes gives a merit, not an obstacle
            why = (passed_over or {}).get(other, "" if notes else "possible")
        if why:
            rejected.append(f"{other.value}: {why}")
    if notes:
        rejected.append(notes)
    if lane is None:
        return "; ".join(rejected) or "no lane is allowed"
    checked = {True: ", checksums verified", False: ", without checksums: it has none of this memory", None: ""}
    head = f"{lane.value}: {reasons.get(lane, 'named by the caller')}{checked[is_checked]}"
    return f"{head} (not {'; '.join(rejected)})" if rejected else head


_MERITS = {
    Lane.MAPPED: "same host, source pool in shared memory",
    Lane.CMA: "same host and user, read out of the source process",
    Lane.UCX: "both sides have UCX",
    Lane.UNIX: "same host, sent over its Unix socket",
    Lane.STREAM: "the source is reached over TCP",
    Lane.MEMORY: "same process",
}


_SENDING_LANES = (Lane.UNIX, Lane.STREAM)
"""On these the source sends the bytes, and can send checksums with them."""
_NO_CHECKSUMS = "checksums are on, and registered memory has checksums on unix and stream alone"

_DEVICE_LANES = (Lane.UCX, Lane.UNIX, Lane.STREAM)
"""These carry memory on a device. The two socket lanes copy it through pinned host memory, with the driver of the
process that registered it."""


def _obstacle(lane: Lane, ours: LaneEnd, theirs: LaneEnd) -> str | None:
    """Why ``lane`` cannot join the two, or ``None``."""
    are_together = is_same_host(ours.address, theirs.address)
    if lane is Lane.MEMORY:
        is_memory = ours.address.host_id.startswith(MEMORY_HOST)
        return None if is_memory and are_together else "the two agents do not share an in-process network"
    for end, where in ((ours, "here"), (theirs, "at the source")):
        if end.address.lanes and lane not in end.address.lanes:
            return f"not served {where} (its operator's lanes, or what its host allows: kvxfer doctor)"
    if lane not in _DEVICE_LANES:
        for end, side in ((ours, "destination"), (theirs, "source")):
            if end.pool.memory is not MemoryKind.HOST:
                return f"the {side} memory is on a device"
    if lane is Lane.STREAM:
        return None if theirs.address.tcp_port else "the source listens on no TCP port"
    if lane is not Lane.UNIX and theirs.pool.exposure is not Exposure.POOL:
        return "the source pool is exposed by grant only"
    if lane is Lane.UCX:
        return None
    if not are_together:
        return "the source is on another host, or another user's"
    if not ours.address.unix_path or not theirs.address.unix_path:
        return f"the {'reader' if theirs.address.unix_path else 'source'} listens on no Unix socket"
    if lane is Lane.MAPPED and not theirs.pool.is_shareable:
        return "kvxfer did not allocate the source pool's memory as shared memory"
    return None
