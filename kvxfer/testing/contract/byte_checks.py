"""The part of the lane contract about bytes of granted blocks: which move, when, and that no others do. Decides what
arrives; must never know how a lane is made.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvxfer.testing.contract.parties import LaneMaker, PoolLayout, fresh_id
from kvxfer.testing.contract.steps import (
    SOON_S,
    expect,
    expect_outcome,
    expect_poison,
    grant,
    granted_pull,
    has_done,
    pull,
    two_parties,
)


def check_bytes_are_equal(maker: LaneMaker) -> None:
    """Random blocks between pools of random cuts: exactly the granted bytes, in order, and not one more."""
    random = np.random.default_rng(5)
    for round_number in range(6):
        parts = [int(n) for n in random.integers(1, 5000, int(random.integers(1, 5)))]
        other = sorted({0, *(int(n) for n in random.integers(0, sum(parts), 3)), sum(parts)})
        source_layout = PoolLayout.cut(int(random.integers(4, 80)), parts, int(random.integers(0, 100)))
        layout = PoolLayout.cut(int(random.integers(4, 80)), np.diff(other).tolist(), int(random.integers(0, 100)))
        with two_parties(maker, source_layout, to=layout) as (source, destination):
            truth = source.fill(round_number)
            count = int(random.integers(1, min(source_layout.block_count, layout.block_count) + 1))
            granted = random.choice(source_layout.block_count, count, replace=False).tolist()
            filled = random.choice(layout.block_count, count, replace=False).tolist()
            transfer_id = granted_pull(maker, source, destination, granted, filled)
            expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
            assert (destination.read(filled) == truth[granted]).all(), "bytes differ"
            expect_poison(destination, sorted(set(range(layout.block_count)) - set(filled)))
            assert (source.read() == truth).all(), "the source was written to"
            final = destination.finals[transfer_id.raw][0]
            assert final.lane.name.lower() == maker.lane.value, f"went over {final.lane}"
            assert final.blocks_done == count


def check_large_transfer(maker: LaneMaker) -> None:
    """Many times what one read or one frame carries."""
    layout = PoolLayout.cut(96, [200_000, 62_144], 64)
    with two_parties(maker, layout) as (source, destination):
        truth = source.fill(1)
        order = np.random.default_rng(1).permutation(96)
        transfer_id = granted_pull(maker, source, destination, order.tolist(), range(96))
        expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
        assert (destination.read() == truth[order]).all(), "bytes differ"


def check_progressive_ready(maker: LaneMaker) -> None:
    """Ready blocks move before the rest is ready; blocks that are not ready do not move."""
    with two_parties(maker) as (source, destination):
        truth = source.fill(2)
        source.write(range(8, 16), 0x11)
        transfer_id = granted_pull(maker, source, destination, range(16), ready=3)
        parties = [source, destination]
        expect(maker, parties, "3 blocks", has_done(destination, transfer_id, 3), SOON_S)
        assert (destination.read(range(3)) == truth[:3]).all()
        expect_poison(destination, range(3, 16))
        source.transport.ready(transfer_id, 8, layers=1, complete=False)
        expect(maker, parties, "8 blocks", has_done(destination, transfer_id, 8), SOON_S)
        expect_poison(destination, range(8, 16))
        source.write(range(8, 16), 0x22)
        source.transport.ready(transfer_id, 16, layers=2, complete=True)
        expect_outcome(maker, parties, destination, transfer_id, "committed")
        assert (destination.read(range(8, 16)) == 0x22).all()
        assert destination.finals[transfer_id.raw][0].blocks_before_complete == 8


def check_pull_before_grant(maker: LaneMaker) -> None:
    """A pull that comes first waits for its grant."""
    with two_parties(maker) as (source, destination):
        truth, transfer_id = source.fill(3), fresh_id()
        pull(maker, destination, source, transfer_id, [4, 5])
        parties = [source, destination]
        expect(maker, parties, "a waiting pull", lambda: source.transport.counts().grants.waiting_pulls == 1, SOON_S)
        grant(source, transfer_id, [9, 2])
        expect_outcome(maker, parties, destination, transfer_id, "committed")
        assert (destination.read([4, 5]) == truth[[9, 2]]).all()


def check_tail_of_a_grant(maker: LaneMaker) -> None:
    """A reader that has the first blocks asks from a later position on."""
    with two_parties(maker) as (source, destination):
        truth = source.fill(4)
        transfer_id = granted_pull(maker, source, destination, [1, 3, 5, 7, 9], [0, 1], first=3)
        expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
        assert (destination.read([0, 1]) == truth[[7, 9]]).all()
        expect_poison(destination, range(2, 16))


def check_checksums(maker: LaneMaker) -> None:
    """Blocks that go with checksums arrive as the others do, whether source, reader or both want them."""
    for has_checksums, wants_checksums in ((True, False), (False, True), (True, True)):
        with two_parties(maker, has_checksums=has_checksums) as (source, destination):
            truth = source.fill(9)
            transfer_id = granted_pull(maker, source, destination, range(16), ready=5, wants_checksums=wants_checksums)
            parties = [source, destination]
            expect(maker, parties, "5 blocks", has_done(destination, transfer_id, 5), SOON_S)
            source.transport.ready(transfer_id, 16, layers=0, complete=True)
            expect_outcome(maker, parties, destination, transfer_id, "committed")
            assert (destination.read() == truth).all(), "bytes differ"


def check_many_transfers(maker: LaneMaker) -> None:
    """Forty transfers both ways at once, grants and pulls in any order."""
    with two_parties(maker, PoolLayout.plain(200, 1500)) as (one, other):
        truths, random = {one: one.fill(6), other: other.fill(7)}, np.random.default_rng(8)
        moves = []
        for number in range(20):
            for source, destination in ((one, other), (other, one)):
                granted, filled = (
                    list(range(number * 5, number * 5 + 5)),
                    list(range(100 + number * 5, 105 + number * 5)),
                )
                moves.append((fresh_id(), source, destination, granted, filled))
        for index in random.permutation(len(moves)):
            transfer_id, source, destination, _, filled = moves[index]
            pull(maker, destination, source, transfer_id, filled)
        for index in random.permutation(len(moves)):
            transfer_id, source, destination, granted, _ = moves[index]
            grant(source, transfer_id, granted, reader=destination.ref.agent_id)
        for transfer_id, source, destination, granted, filled in moves:
            expect_outcome(maker, [one, other], destination, transfer_id, "committed")
            assert (destination.read(filled) == truths[source][granted]).all()


BYTE_CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    check_bytes_are_equal,
    check_large_transfer,
    check_progressive_ready,
    check_pull_before_grant,
    check_tail_of_a_grant,
    check_checksums,
    check_many_transfers,
)
