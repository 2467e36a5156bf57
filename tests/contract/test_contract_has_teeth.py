"""Lanes with a known fault fail the contract, and for the right reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer._native import _core
from kvxfer.testing.contract.parties import MemoryLaneMaker
from kvxfer.testing.contract.suite import BY_NAME
from kvxfer.transport.base import Event, PostOrder, StartPost
from kvxfer.transport.batch import TransferBatch
from kvxfer.transport.memory import MemoryTransport
from kvxfer.transport.memory_bytes import BlockMemory, Memories
from kvxfer.types import GrantState, TransferId, TransferState


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
        block = next(iter(self._memories.pools.values()))._views[0][0]
        self._network.call_soon(lambda: self._network.call_soon(lambda: block.fill(0)))

    patch.setattr(MemoryTransport, "cancel", leave_one_behind)


def say_twice(patch: pytest.MonkeyPatch) -> None:
    drain = MemoryTransport.drain

    def repeat(self: MemoryTransport) -> list[Event]:
        return [copy for event in drain(self) for copy in (event, event)]

    patch.setattr(MemoryTransport, "drain", repeat)


def forget_to_revoke(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTransport, "revoke_grant", lambda self, transfer_id: GrantState.REVOKED)


def corrupt_elements(patch: pytest.MonkeyPatch) -> None:
    read = Memories.read

    def flip(self: Memories, extent: _core.Extent) -> list[bytes] | None:
        data = read(self, extent)
        return data if not data else [*data[:-1], bytes([data[-1][0] ^ 1]) + data[-1][1:]]

    patch.setattr(Memories, "read", flip)


def spill_elements(patch: pytest.MonkeyPatch) -> None:
    write = Memories.write

    def next_too(self: Memories, extent: _core.Extent, data: Sequence[bytes]) -> None:
        write(self, extent, data)
        for region in self.regions.values():
            region._flat[-1] = 0

    patch.setattr(Memories, "write", next_too)


def land_after_cancel(patch: pytest.MonkeyPatch) -> None:
    cancel = MemoryTransport.cancel

    def leave_one_behind(self: MemoryTransport, transfer_id: TransferId) -> None:
        cancel(self, transfer_id)
        flat = next(iter(self._memories.regions.values()))._flat
        self._network.call_soon(lambda: self._network.call_soon(lambda: flat.fill(0)))

    patch.setattr(MemoryTransport, "cancel", leave_one_behind)


def keep_serving(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTransport, "remove_region", lambda self, region_id: None)


def tell_early(patch: pytest.MonkeyPatch) -> None:
    prepare_push = MemoryTransport.prepare_push

    def notify_first(self: MemoryTransport, order: PostOrder) -> StartPost:
        def start(identity: bytes, timeout_ns: int, notification: bytes | None, wants_checksums: bool, /) -> None:
            if notification is not None:
                self.notify(order.peer, notification)
            prepare_push(self, order)(identity, timeout_ns, None, wants_checksums)

        return start

    patch.setattr(MemoryTransport, "prepare_push", notify_first)


def tell_every_part(patch: pytest.MonkeyPatch) -> None:
    """The notification of a post of several transfers goes with each of them."""
    prepare_push = MemoryTransport.prepare_push

    def with_each(self: MemoryTransport, order: PostOrder) -> StartPost:
        def start(identity: bytes, timeout_ns: int, _: bytes | None, wants_checksums: bool, /) -> None:
            prepare_push(self, order)(identity, timeout_ns, b"all", wants_checksums)

        return start

    patch.setattr(MemoryTransport, "prepare_push", with_each)


def overlook_a_failure(patch: pytest.MonkeyPatch) -> None:
    """A post of several transfers is called committed when one of them is."""
    finished = TransferBatch.finished

    def look_away(self: TransferBatch, event: _core.TransferFinal) -> None:
        if len(self.transfer_ids) > 1 and event.state != TransferState.COMMITTED:
            self._states[event.id] = TransferState.COMMITTED
        else:
            finished(self, event)

    patch.setattr(TransferBatch, "finished", look_away)


def forget_offers(patch: pytest.MonkeyPatch) -> None:
    drain = MemoryTransport.drain
    patch.setattr(
        MemoryTransport, "drain", lambda self: [e for e in drain(self) if not isinstance(e, _core.OfferEnded)]
    )


def never_drain(patch: pytest.MonkeyPatch) -> None:
    drain = MemoryTransport.drain
    patch.setattr(
        MemoryTransport, "drain", lambda self: [e for e in drain(self) if not isinstance(e, _core.TransferDrained)]
    )


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (corrupt, "check_bytes_are_equal"),
        (spill, "check_bytes_are_equal"),
        (swap, "check_bytes_are_equal"),
        (write_late, "check_cancel_races_the_read"),
        (say_twice, "check_tail_of_a_grant"),
        (forget_to_revoke, "check_revoke_races_the_read"),
        (corrupt_elements, "check_post_bytes"),
        (spill_elements, "check_post_bytes"),
        (land_after_cancel, "check_post_cancel_races_the_bytes"),
        (keep_serving, "check_removed_region"),
        (keep_serving, "check_region_taken_back_while_it_is_read"),
        (tell_early, "check_post_notifications"),
        (tell_every_part, "check_post_in_several_transfers"),
        (overlook_a_failure, "check_post_fails_as_one"),
        (forget_offers, "check_offers_are_told"),
        (say_twice, "check_many_posts"),
        (never_drain, "check_post_past_its_deadline"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_faulty_lane_fails(fault: object, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        BY_NAME[check](MemoryLaneMaker())
