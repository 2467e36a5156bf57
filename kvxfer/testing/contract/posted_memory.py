"""Registered memory and posts as checks of the lane contract use them: memory that shows every byte that landed, and
posts whose outcome is a word. Decides nothing about what is right; must never know how a lane is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.testing.contract.parties import POISON, LaneMaker, LaneParty
from kvxfer.testing.contract.steps import SOON_S, expect
from kvxfer.transport.batch import TransferBatch
from kvxfer.transport.descriptors import RemotePeer
from kvxfer.transport.engine import MemoryRegistration
from kvxfer.transport.plan import Op
from kvxfer.types import RegionRecord

Rows = npt.NDArray[np.uint64]


@dataclasses.dataclass
class PostedMemory:
    """One registered region of one party, poisoned: ``array`` is uint8, all of it."""

    party: LaneParty
    registration: MemoryRegistration
    array: npt.NDArray[np.uint8]

    @classmethod
    def register(
        cls,
        party: LaneParty,
        length_bytes: int,
        *,
        is_foreign: bool = False,
        can_read: bool = True,
        can_write: bool = True,
    ) -> PostedMemory:
        """``is_foreign``: memory of numpy's instead of kvxfer's own (lane ``mapped`` needs the latter)."""
        if is_foreign:
            array = np.empty(length_bytes, np.uint8)
            registration = party.poster.register(array, can_read=can_read, can_write=can_write)
        else:
            registration = party.poster.allocate(length_bytes, can_read=can_read, can_write=can_write)
            array = registration.region.owner  # type: ignore[assignment]
        memory = cls(party, registration, array[:length_bytes])
        memory.poison()
        return memory

    @property
    def record(self) -> RegionRecord:
        return self.registration.record

    def poison(self) -> None:
        self.array[:] = POISON

    def fill(self, seed: int) -> npt.NDArray[np.uint8]:
        """Random bytes; returns a copy."""
        self.array[:] = np.random.default_rng(seed).integers(0, 256, len(self.array), dtype=np.uint8)
        return self.array.copy()

    def expect_poison(self) -> None:
        assert (self.array == POISON).all(), "a byte landed where none may"

    def rows(self, offsets: npt.ArrayLike, length: npt.ArrayLike) -> Rows:
        """Descriptors, shape [n, 3]."""
        starts = np.asarray(offsets, np.uint64) + np.uint64(self.record.address)
        return np.stack(np.broadcast_arrays(starts, length, 0), axis=1).astype(np.uint64)


def peer_of(party: LaneParty, *records: RegionRecord) -> RemotePeer:
    """``party`` as others know it; ``records``: its memory as they see it (default: the truth)."""
    return RemotePeer(party.ref, party.transport.address, records or party.poster.records())


def post(
    maker: LaneMaker,
    op: Op,
    party: LaneParty,
    local: Any,
    peer: LaneParty | RemotePeer,
    remote: Any,
    **options: Any,
) -> TransferBatch:
    """Post all descriptors of ``local`` against all of ``remote``, over the maker's lane."""
    other = peer_of(peer) if isinstance(peer, LaneParty) else peer
    mine, theirs = party.poster.prepare(local), party.poster.prepare(remote, peer=other)
    return party.poster.post(op, mine, None, theirs, None, **{"lanes": [maker.lane], "deadline_s": 60.0, **options})


def has_received(party: LaneParty, count: int) -> Callable[[], bool]:
    """Whether so many notifications, at least, have come in."""
    return lambda: len(party.received) >= count


def outcome(one: TransferBatch) -> str:
    """``committed``, the error's code, or ``""`` while it is not over."""
    if not one.is_final:
        return ""
    return "committed" if one.error is None else one.error.code


def expect_post(
    maker: LaneMaker, parties: Sequence[LaneParty], one: TransferBatch, *outcomes: str, within_s: float = SOON_S
) -> None:
    """The post ends as one of ``outcomes``, and drains."""
    expect(maker, parties, "post drained", lambda: one.is_final and one.is_drained, within_s)
    assert outcome(one) in outcomes, f"{outcome(one)} ({one.error}), not {' or '.join(outcomes)}"
