"""A peer whose registered memory can be read and written: what it registered, and the lanes that reach it. Decides
which of the allowed lanes can carry a post; must never know how the records got here, nor try a lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvxfer.errors import LaneUnavailable
from kvxfer.policy.lanes import LaneEnd, choose_lanes, explain
from kvxfer.transport.descriptors import MemoryTable, Prepared, Traits
from kvxfer.types import AgentRef, DataAddress, Lane, RegionRecord

Ways = tuple[tuple[Lane, ...], Mapping[Lane, str]]
"""Lanes that can carry something, best first as the operator sees it, and for each lane why or why not."""


class RemotePeer:
    """One life of a peer, and what is known of its memory. Another life, or other records, are another RemotePeer;
    lists prepared for the earlier one stay good as long as their regions are registered.
    """

    def __init__(self, ref: AgentRef, address: DataAddress, records: Sequence[RegionRecord]) -> None:
        self.ref = ref
        self.address = address
        self.records = tuple(records)
        self.table = MemoryTable(records)
        self._choices: dict[tuple[object, ...], Ways] = {}

    def __repr__(self) -> str:
        return f"<RemotePeer {self.ref}: {len(self.table)} regions>"

    def lanes(
        self, ours: DataAddress, local: Prepared, remote: Prepared, allowed: Sequence[Lane], *, is_read: bool
    ) -> Ways:
        """The lanes of ``allowed``, in its order, that can carry a read (or a write, which is a read by the peer), and
        for each lane why or why not. Raises LaneUnavailable where none can.
        """
        key = (ours, local.traits, remote.traits, tuple(allowed), is_read)
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = self._choose(ours, local.traits, remote.traits, tuple(allowed), is_read)
        return found

    def _choose(
        self,
        ours: DataAddress,
        local: Sequence[Traits],
        remote: Sequence[Traits],
        allowed: tuple[Lane, ...],
        is_read: bool,
    ) -> tuple[tuple[Lane, ...], Mapping[Lane, str]]:
        lanes = allowed
        why: dict[Lane, str] = {}
        for mine in local:
            for theirs in remote:
                here, there = LaneEnd(ours, mine), LaneEnd(self.address, theirs)
                possible, reasons = choose_lanes(here, there, lanes) if is_read else choose_lanes(there, here, lanes)
                why.update(reasons)
                lanes = possible
        if not lanes:
            raise LaneUnavailable(f"no lane joins us and {self.ref}: {explain(None, why)}")
        return lanes, why
