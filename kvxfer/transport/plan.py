"""The transfers of a batch: checks two prepared lists against each other and cuts them into transfers that one
frame each can carry. Decides where to cut; must never know time or what became of an earlier batch.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.base import Blocks, StartPost, Transport, as_blocks
from kvxfer.transport.descriptors import INDEX_BYTES, RANGE_BYTES, Prepared, RemotePeer, Words
from kvxfer.transport.lane_choice import LaneChoice
from kvxfer.types import ChecksumMode, Lane

LIST_BYTES_MAX = 384 * 1024
"""Most bytes of one list of ranges in a frame; the core has the same bound."""
SHARE_BYTES_MIN = 8 << 20
"""A batch is spread over several connections only where each gets at least so much."""


class Op(enum.StrEnum):
    """The direction of a batch, seen from the agent that posts it."""

    READ = "READ"
    WRITE = "WRITE"


@dataclasses.dataclass(frozen=True, eq=False)
class PlanPart:
    """One transfer: elements of our memory, and as many of the peer's."""

    local: _core.Elements
    remote: _core.Elements


RouteKey: TypeAlias = tuple[Transport, tuple[Lane, ...] | None, bool | None]
"""The transport that starts a plan, and the call's lanes and checksums."""


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """The result of a plan's first start, which later starts reuse."""

    choice: LaneChoice
    checksum: ChecksumMode
    """Whether its posts carry checksums."""
    starts: dict[tuple[Lane, ...], tuple[StartPost, ...]] = dataclasses.field(default_factory=dict)
    """One of each part, by the order in which lanes are tried."""


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """A checked batch that can be started many times."""

    op: Op
    local: Prepared
    remote: Prepared
    peer: RemotePeer
    parts: tuple[PlanPart, ...]
    elements: int
    nbytes: int
    routes: dict[RouteKey, Route] = dataclasses.field(default_factory=dict, repr=False)


def make_plan(
    op: Op,
    local: Prepared,
    local_ids: npt.ArrayLike | None,
    remote: Prepared,
    remote_ids: npt.ArrayLike | None,
    *,
    shares: int = 1,
) -> TransferPlan:
    """Pair descriptor ``local_ids[i]`` of ``local`` with ``remote_ids[i]`` of ``remote``; ``None``: all descriptors of
    a list, in order. ``shares``: over how many connections a large batch is spread.

    Raises InvalidArgumentError: lists of unequal length, an index outside its list, a pair of unequal lengths, a local
    list that is remote or the reverse.
    """
    if local.peer is not None or remote.peer is None:
        raise InvalidArgumentError("a post needs a local list and one prepared for a peer")
    local_index = None if local_ids is None else as_blocks(local_ids, "local_ids")
    remote_index = None if remote_ids is None else as_blocks(remote_ids, "remote_ids")
    count = local.count if local_index is None else len(local_index)
    remote_count = remote.count if remote_index is None else len(remote_index)
    if count != remote_count:
        raise InvalidArgumentError(f"{count} local descriptors do not pair with {remote_count} of the peer")
    mine, theirs = local.elements(local_index), remote.elements(remote_index)
    if local.length_bytes and local.length_bytes == remote.length_bytes:
        nbytes = local.length_bytes * count
    else:
        nbytes = _compare(local.lengths(mine), remote.lengths(theirs), count)
    shares = max(1, min(shares, nbytes // SHARE_BYTES_MIN))
    size = -(-len(mine) // shares)
    # The lists that travel: a peer that we read from needs only its own, a peer that we write to needs both.
    on_wire = (remote,) if op is Op.READ else (local, remote)
    size = min(size, *(_elements_max(prepared) for prepared in on_wire))
    parts = tuple(
        PlanPart(
            _cut(local, mine[begin : begin + size], is_sent=op is Op.WRITE),
            _cut(remote, theirs[begin : begin + size], is_sent=True),
        )
        for begin in range(0, len(mine), size)
    )
    return TransferPlan(op, local, remote, remote.peer, parts, count, nbytes)


def _compare(mine: Words, theirs: Words, count: int) -> int:
    """Bytes in all. Raises InvalidArgumentError unless the lengths pair."""
    is_cut = len(mine) != count or len(theirs) != count
    if len(mine) != len(theirs):
        raise InvalidArgumentError("the descriptors of some pair have different lengths")
    is_equal = mine == theirs
    if not is_equal.all():
        which = "some pair" if is_cut else f"pair {int(np.argmin(is_equal))}"
        raise InvalidArgumentError(f"the descriptors of {which} have different lengths")
    return int(mine.sum())


def _elements_max(prepared: Prepared) -> int:
    """How many elements one frame can carry."""
    if prepared.is_table:
        return LIST_BYTES_MAX // RANGE_BYTES
    if _is_sent_whole(prepared):
        return (LIST_BYTES_MAX - RANGE_BYTES * len(prepared.strided)) // INDEX_BYTES
    return LIST_BYTES_MAX // (RANGE_BYTES + INDEX_BYTES)


def _is_sent_whole(prepared: Prepared) -> bool:
    """Whether the strided ranges are few enough to go with every frame."""
    return RANGE_BYTES * len(prepared.strided) <= LIST_BYTES_MAX // 2


def _cut(prepared: Prepared, elements: Blocks, *, is_sent: bool) -> _core.Elements:
    """``elements`` of a list, for one transfer. Where the list is sent and has too many strided ranges for a frame, the
    transfer gets a list of the ranges that it uses, and its elements are numbered anew in that."""
    if not is_sent or prepared.is_table or _is_sent_whole(prepared):
        return _core.Elements(prepared.ranges, np.ascontiguousarray(elements))
    row = prepared.strided_of(elements)
    used, new_row = np.unique(row, return_inverse=True)
    strided = np.ascontiguousarray(prepared.strided[used])
    firsts = np.cumsum(prepared.strided[:, 4]) - prepared.strided[:, 4]
    new_firsts = np.cumsum(strided[:, 4]) - strided[:, 4]
    renumbered = elements - firsts[row] + new_firsts[new_row]
    return _core.Elements(_core.Ranges(strided), renumbered.astype(np.uint32))
