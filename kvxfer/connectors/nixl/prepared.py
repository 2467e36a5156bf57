"""Lists of descriptors that were found in registered memory, in the form that transfers take. Decides what rows of zero
bytes become; must never know the use of a list.

A row of no bytes is NIXL's too: it is found where memory is registered (the very end counts, and so does a registration
of no bytes, of an empty tensor for one), pairs with another such row only, and is transferred as nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvxfer.connectors.nixl.errors import nixlInvalidParamError, nixlNotFoundError
from kvxfer.connectors.nixl.remotes import RemoteAgent
from kvxfer.errors import InvalidArgumentError
from kvxfer.transport.descriptors import Descriptors, Prepared
from kvxfer.transport.engine import TransferEngine
from kvxfer.types import RegionRecord

Rows = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, eq=False)
class DList:
    """A prepared list: of our own memory (``agent_name`` empty), or of a remote's, or of ours as a remote's."""

    agent_name: str
    prepared: Prepared | None
    """Of the rows that have bytes; ``None``: none has."""
    remote: RemoteAgent | None
    rows: Rows
    """Those that have bytes."""
    places: npt.NDArray[np.int64] | None = None
    """Where each descriptor is among those that have bytes, -1 where it has none; ``None``: all have."""

    @property
    def count(self) -> int:
        if self.places is not None:
            return len(self.places)
        return 0 if self.prepared is None else self.prepared.count

    @property
    def regions(self) -> frozenset[int]:
        return frozenset() if self.prepared is None else self.prepared.regions

    def check_alive(self) -> None:
        """Raises nixlNotFoundError where its remote was removed since."""
        if self.remote is not None and self.remote.is_gone:
            raise nixlNotFoundError(
                f"agent {self.agent_name!r} was removed since this list was prepared: prepare it again"
            )

    def pieces(self, ids: Indices | None) -> Rows:
        """(address, length) of the descriptors ``ids`` among those that have bytes (``None``: all), shape [n, 2]."""
        rows = self.rows
        if rows.shape[1] == 5:
            counts = rows[:, 3].astype(np.int64)
            row = np.repeat(np.arange(len(rows)), counts)
            step = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
            rows = np.stack((rows[row, 0] + step.astype(np.uint64) * rows[row, 4], rows[row, 1]), axis=1)
        if ids is None:
            return rows[:, :2]
        if int(ids.max()) >= len(rows):
            raise nixlInvalidParamError(f"index {int(ids.max())} is outside a list of {len(rows)} descriptors")
        return rows[ids, :2]


def prepare(
    poster: TransferEngine, agent_name: str, remote: RemoteAgent | None, rows: Rows, own_empties: Collection[int] = ()
) -> DList:
    """Rows [n, 3], or [n, 5] as :class:`~kvxfer.transport.descriptors.Descriptors` takes them, in our memory or the
    remote's. ``own_empties``: where registrations of ours that have no bytes are.

    Raises nixlNotFoundError, naming the first that is in none.
    """
    if len(rows) == 0:
        raise nixlNotFoundError("an empty list of descriptors is found nowhere")
    whose = "registered here" if remote is None else f"in the metadata of agent {agent_name!r}"
    is_empty = rows[:, 1] == 0
    if rows.shape[1] != 3 or not is_empty.any():
        return DList(agent_name, _find(poster, remote, rows, whose), remote, rows)
    records, empties = (poster.records(), own_empties) if remote is None else (remote.peer.records, remote.empties)
    lost = is_empty & ~are_inside(rows[:, 0], records, empties)
    if lost.any():
        first = int(np.argmax(lost))
        raise nixlNotFoundError(f"not all of this is {whose}: descriptor {first}, no bytes at {int(rows[first, 0]):#x}")
    kept = rows[~is_empty]
    places = np.where(is_empty, -1, np.cumsum(~is_empty) - 1)
    return DList(agent_name, _find(poster, remote, kept, whose) if len(kept) else None, remote, kept, places)


def are_inside(addresses: Rows, records: Collection[RegionRecord], empties: Collection[int]) -> npt.NDArray[np.bool_]:
    """Whether no bytes at each address are in registered memory, its end included."""
    found = np.isin(addresses, np.fromiter(empties, np.uint64, len(empties)))
    if not records:
        return found
    spans = sorted((record.address, record.address + record.length_bytes) for record in records)
    starts = np.array([start for start, _ in spans], np.uint64)
    ends = np.maximum.accumulate(np.array([min(end, (1 << 64) - 1) for _, end in spans], np.uint64))
    place = np.searchsorted(starts, addresses, side="right")
    inside: npt.NDArray[np.bool_] = found | ((place > 0) & (ends[np.maximum(place, 1) - 1] >= addresses))
    return inside


def pair(
    local: DList, ours: Indices | None, remote: DList, theirs: Indices | None
) -> tuple[Indices | None, Indices | None] | None:
    """The indices of two lists (``None``: all), among the descriptors that have bytes; ``None`` where no pair has any.

    Raises nixlInvalidParamError: unequal numbers, an index outside its list, a pair of which one has no bytes.
    """
    if local.places is None and remote.places is None:
        return ours, theirs
    mine, other = _places(local, ours), _places(remote, theirs)
    if len(mine) != len(other):
        raise nixlInvalidParamError(f"{len(mine)} local descriptors do not pair with {len(other)} of the remote")
    is_wrong = (mine < 0) != (other < 0)
    if is_wrong.any():
        raise nixlInvalidParamError(f"the descriptors of pair {int(np.argmax(is_wrong))} have different lengths")
    has_bytes = mine >= 0
    if not has_bytes.any():
        return None
    return mine[has_bytes].astype(np.uint32), other[has_bytes].astype(np.uint32)


def _places(dlist: DList, ids: Indices | None) -> npt.NDArray[np.int64]:
    chosen = np.arange(dlist.count, dtype=np.int64) if ids is None else ids.astype(np.int64)
    if len(chosen) and int(chosen.max()) >= dlist.count:
        raise nixlInvalidParamError(f"index {int(chosen.max())} is outside a list of {dlist.count} descriptors")
    return chosen if dlist.places is None else dlist.places[chosen]


def _find(poster: TransferEngine, remote: RemoteAgent | None, rows: Rows, whose: str) -> Prepared:
    try:
        return poster.prepare(Descriptors(rows), peer=None if remote is None else remote.peer)
    except InvalidArgumentError as error:
        raise nixlNotFoundError(f"not all of this is {whose}: {error}") from error
