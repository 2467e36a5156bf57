"""Lanes with a known fault fail the contract, and for the right reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.testing import lane_contract
from kvxfer.testing.lane_parties import MemoryLaneMaker
from kvxfer.transport.base import Event
from kvxfer.transport.memory import BlockMemory, MemoryTransport
from kvxfer.types import GrantState, TransferId


def corrupt(patch: pytest.MonkeyPatch) -> None:
    read = BlockMemory.read

    def flip(self: BlockMemory, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        data = read(self, blocks)
        data[-1, -1] ^= 1
        return data

    patch.setattr(BlockMemory, "read", flip)


def spill(patch: pytest.MonkeyPatch) -> None:
    write = BlockMemory.write

    def next_too(self: BlockMemory, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        write(self, blocks, data)
        if len(blocks) < len(self._views[0]):
            neighbour = next(b for b in range(len(self._views[0])) if b not in blocks)
            self._views[0][neighbour, 0] = 0

    patch.setattr(BlockMemory, "write", next_too)


def swap(patch: pytest.MonkeyPatch) -> None:
    read = BlockMemory.read
    patch.setattr(BlockMemory, "read", lambda self, blocks: read(self, list(blocks)[::-1]))


def write_late(patch: pytest.MonkeyPatch) -> None:
    """One more byte of a cancelled transfer lands, after its blocks were given back."""
    cancel = MemoryTransport.cancel

    def leave_one_behind(self: MemoryTransport, transfer_id: TransferId) -> None:
        cancel(self, transfer_id)
        block = next(iter(self._memories.values()))._views[0][0]
        self._network.post(lambda: self._network.post(lambda: block.fill(0)))

    patch.setattr(MemoryTransport, "cancel", leave_one_behind)


def say_twice(patch: pytest.MonkeyPatch) -> None:
    drain = MemoryTransport.drain

    def repeat(self: MemoryTransport) -> list[Event]:
        return [copy for event in drain(self) for copy in (event, event)]

    patch.setattr(MemoryTransport, "drain", repeat)


def forget_to_revoke(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTransport, "revoke_grant", lambda self, transfer_id: GrantState.REVOKED)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (corrupt, "check_bytes_are_equal"),
        (spill, "check_bytes_are_equal"),
        (swap, "check_bytes_are_equal"),
        (write_late, "check_cancel_races_the_read"),
        (say_twice, "check_tail_of_a_grant"),
        (forget_to_revoke, "check_revoke_races_the_read"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_faulty_lane_fails(fault: object, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        getattr(lane_contract, check)(MemoryLaneMaker())
