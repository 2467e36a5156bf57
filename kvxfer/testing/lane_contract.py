"""What every lane must do, as plain functions: give each of :data:`CHECKS` a maker of your lane and let it raise.

It decides what a lane may never do (a wrong byte, a byte outside a reservation, a second final state, a commit that
the source did not confirm, a block that is not given back) and must never know how a lane is made::

for check in CHECKS: maker = MyLaneMaker() try: check(maker) finally: maker.close()

Like trio's ``check_one_way_stream``: a lane that fails here is a bug, a fake that fails here too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np

from kvxfer.config import AgentConfig
from kvxfer.errors import BlocksBusy, GrantGone, InvalidArgument, PeerGone
from kvxfer.testing.lane_parties import POOL_ID, RECORD, LaneMaker, Layout, fresh_id, introduce, make_party
from kvxfer.testing.lane_promises import PROMISE_CHECKS
from kvxfer.testing.lane_steps import (
    PLAIN,
    SOON_S,
    expect,
    expect_idle,
    expect_outcome,
    expect_poison,
    grant,
    has_done,
    has_ended,
    pull,
    raises,
    two_parties,
)
from kvxfer.transport.base import as_blocks
from kvxfer.types import GrantState

# --- bytes ---


def check_bytes_are_equal(maker: LaneMaker) -> None:
    """Random blocks between pools of random cuts: exactly the granted bytes, in order, and not one more."""
    random = np.random.default_rng(5)
    for round_number in range(6):
        parts = [int(n) for n in random.integers(1, 5000, int(random.integers(1, 5)))]
        other = sorted({0, *(int(n) for n in random.integers(0, sum(parts), 3)), sum(parts)})
        source_layout = Layout.cut(int(random.integers(4, 80)), parts, int(random.integers(0, 100)))
        layout = Layout.cut(int(random.integers(4, 80)), np.diff(other).tolist(), int(random.integers(0, 100)))
        with two_parties(maker, source_layout, to=layout) as (source, destination):
            truth = source.fill(round_number)
            count = int(random.integers(1, min(source_layout.block_count, layout.block_count) + 1))
            granted = random.choice(source_layout.block_count, count, replace=False).tolist()
            filled = random.choice(layout.block_count, count, replace=False).tolist()
            transfer_id = fresh_id()
            grant(source, transfer_id, granted)
            pull(maker, destination, source, transfer_id, filled)
            expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
            assert (destination.read(filled) == truth[granted]).all(), "bytes differ"
            expect_poison(destination, sorted(set(range(layout.block_count)) - set(filled)))
            assert (source.read() == truth).all(), "the source was written to"
            final = destination.finals[transfer_id.raw][0]
            assert final.lane.name.lower() == maker.lane.value, f"went over {final.lane}"
            assert final.blocks_done == count


def check_large_transfer(maker: LaneMaker) -> None:
    """Many times what one read or one frame carries."""
    layout = Layout.cut(96, [200_000, 62_144], 64)
    with two_parties(maker, layout) as (source, destination):
        truth, transfer_id = source.fill(1), fresh_id()
        order = np.random.default_rng(1).permutation(96)
        grant(source, transfer_id, order.tolist())
        pull(maker, destination, source, transfer_id, range(96))
        expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
        assert (destination.read() == truth[order]).all(), "bytes differ"


def check_progressive_ready(maker: LaneMaker) -> None:
    """What is ready moves before the rest is; what is not ready does not move."""
    with two_parties(maker) as (source, destination):
        truth, transfer_id = source.fill(2), fresh_id()
        source.write(range(8, 16), 0x11)
        grant(source, transfer_id, range(16), ready=3)
        pull(maker, destination, source, transfer_id, range(16))
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
        expect(maker, parties, "a waiting pull", lambda: source.transport.counts().pulls_waiting == 1, SOON_S)
        grant(source, transfer_id, [9, 2])
        expect_outcome(maker, parties, destination, transfer_id, "committed")
        assert (destination.read([4, 5]) == truth[[9, 2]]).all()


def check_tail_of_a_grant(maker: LaneMaker) -> None:
    """A reader that has the first blocks asks from a later position on."""
    with two_parties(maker) as (source, destination):
        truth, transfer_id = source.fill(4), fresh_id()
        grant(source, transfer_id, [1, 3, 5, 7, 9])
        pull(maker, destination, source, transfer_id, [0, 1], first=3)
        expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
        assert (destination.read([0, 1]) == truth[[7, 9]]).all()
        expect_poison(destination, range(2, 16))


def check_many_transfers(maker: LaneMaker) -> None:
    """Forty transfers both ways at once, grants and pulls in any order."""
    with two_parties(maker, Layout.plain(200, 1500)) as (one, other):
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


# --- grants that end ---


def check_revoke_before_pull(maker: LaneMaker) -> None:
    with two_parties(maker) as (source, destination):
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, [1, 2])
        assert source.transport.revoke_grant(transfer_id) is GrantState.REVOKED
        assert source.transport.revoke_grant(transfer_id) is GrantState.REVOKED
        pull(maker, destination, source, transfer_id, [1, 2])
        expect_outcome(maker, [source, destination], destination, transfer_id, "grant_revoked")
        expect_poison(destination)


def check_revoke_in_the_middle(maker: LaneMaker) -> None:
    """After revoke returned the owner overwrites its blocks; the transfer must not commit."""
    with two_parties(maker) as (source, destination):
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, range(8), ready=4)
        pull(maker, destination, source, transfer_id, range(8))
        parties = [source, destination]
        expect(maker, parties, "4 blocks", has_done(destination, transfer_id, 4), SOON_S)
        assert source.transport.revoke_grant(transfer_id) is GrantState.REVOKED
        source.poison()
        with raises(GrantGone):
            source.transport.ready(transfer_id, 8, layers=0, complete=True)
        expect_outcome(maker, parties, destination, transfer_id, "grant_revoked")
        assert source.ended[transfer_id.raw] == [GrantState.REVOKED]


def check_revoke_races_the_read(maker: LaneMaker) -> None:
    """Revoke and overwrite at any moment: either nothing commits, or only bytes of before."""
    with two_parties(maker, Layout.plain(32, 20_000)) as (source, destination):
        parties = [source, destination]
        for moment in range(12):
            truth, transfer_id = source.fill(moment), fresh_id()
            grant(source, transfer_id, range(32))
            pull(maker, destination, source, transfer_id, range(32))
            maker.wait(parties, lambda: False, moment * 0.0002)
            source.transport.revoke_grant(transfer_id)
            source.poison()
            expect_outcome(maker, parties, destination, transfer_id, "committed", "grant_revoked", "grant_released")
            if destination.outcome(transfer_id) == "committed":
                assert (destination.read() == truth).all(), "a commit of bytes that were overwritten"
            destination.poison()


def check_revoke_after_commit(maker: LaneMaker) -> None:
    with two_parties(maker) as (source, destination):
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, [3])
        pull(maker, destination, source, transfer_id, [3])
        parties = [source, destination]
        expect_outcome(maker, parties, destination, transfer_id, "committed")
        expect(maker, parties, "released", lambda: bool(source.ended[transfer_id.raw]), SOON_S)
        assert source.transport.revoke_grant(transfer_id) is GrantState.RELEASED
        assert destination.outcome(transfer_id) == "committed"


def check_expiry(maker: LaneMaker) -> None:
    """A grant that nobody reads ends by itself, and is over in the very moment."""
    with two_parties(maker) as (source, destination):
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, [1, 2], ttl_s=0.15)
        parties = [source, destination]
        expect(maker, parties, "expired", lambda: source.ended[transfer_id.raw] == [GrantState.EXPIRED], SOON_S)
        assert source.transport.grant_state(transfer_id) is GrantState.EXPIRED
        source.poison()
        pull(maker, destination, source, transfer_id, [1, 2])
        expect_outcome(maker, parties, destination, transfer_id, "grant_expired")
        expect_poison(destination)


def check_renewals(maker: LaneMaker) -> None:
    """A live reader keeps a slow grant alive far past its time; its maximum life ends it all the same."""
    config = AgentConfig(grant_ttl_s=1.0, grant_life_max_s=4.0, stall_s=0.5)
    with two_parties(maker, config=config) as (source, destination):
        truth, transfer_id = source.fill(1), fresh_id()
        grant(source, transfer_id, range(4), ready=1, ttl_s=1.0)
        pull(maker, destination, source, transfer_id, range(4))
        parties = [source, destination]
        maker.wait(parties, lambda: bool(destination.finals[transfer_id.raw]), 2.5)
        assert source.transport.grant_state(transfer_id) is GrantState.ALIVE
        source.transport.ready(transfer_id, 4, layers=0, complete=True)
        expect_outcome(maker, parties, destination, transfer_id, "committed")
        assert (destination.read(range(4)) == truth[:4]).all()
        endless = fresh_id()
        grant(source, endless, range(4), ready=1, ttl_s=1.0)
        pull(maker, destination, source, endless, range(4))
        expect_outcome(maker, parties, destination, endless, "grant_expired", within_s=4.0 + SOON_S)


# --- refusals ---


def check_wrong_reader(maker: LaneMaker) -> None:
    """A grant serves the agent it names and nobody else."""
    with two_parties(maker) as (source, destination):
        thief = make_party(maker, "thief", PLAIN)
        try:
            introduce(source, thief)
            truth, transfer_id = source.fill(1), fresh_id()
            grant(source, transfer_id, [1, 2])
            pull(maker, thief, source, transfer_id, [1, 2])
            parties = [source, destination, thief]
            expect_outcome(maker, parties, thief, transfer_id, "refused")
            expect_poison(thief)
            pull(maker, destination, source, transfer_id, [1, 2])
            expect_outcome(maker, parties, destination, transfer_id, "committed")
            assert (destination.read([1, 2]) == truth[[1, 2]]).all()
            expect_idle(maker, parties)
        finally:
            thief.transport.close()


def check_incompatible(maker: LaneMaker) -> None:
    """Pools of other records do not exchange a byte."""
    source = make_party(maker, "source", PLAIN)
    other = make_party(maker, "destination", PLAIN, record=dataclasses.replace(RECORD, dtype="float16"))
    try:
        introduce(source, other)
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, [1])
        pull(maker, other, source, transfer_id, [1])
        expect_outcome(maker, [source, other], other, transfer_id, "incompatible")
        expect_poison(other)
        source.transport.revoke_grant(transfer_id)
        expect_idle(maker, [source, other])
    finally:
        source.transport.close()
        other.transport.close()


def check_past_the_end(maker: LaneMaker) -> None:
    """More blocks than the grant has are refused, before and while it waits; the reader then gives the grant up."""
    with two_parties(maker) as (source, destination):
        source.fill(1)
        for is_early in (False, True):
            transfer_id = fresh_id()
            if is_early:
                pull(maker, destination, source, transfer_id, [1, 2, 3], first=1)
                grant(source, transfer_id, [1, 2, 3], ready=0)
            else:
                grant(source, transfer_id, [1, 2, 3])
                pull(maker, destination, source, transfer_id, [1, 2, 3], first=1)
            expect_outcome(maker, [source, destination], destination, transfer_id, "refused")
            expect(maker, [source, destination], "released", has_ended(source, transfer_id), SOON_S)
            assert source.ended[transfer_id.raw] == [GrantState.RELEASED]
        expect_poison(destination)


def check_stranger(maker: LaneMaker) -> None:
    """A peer whose key is another one proves nothing and gets nothing."""
    config = AgentConfig(reconnect_s=0.5)
    source, destination = make_party(maker, "source", PLAIN, config), make_party(maker, "destination", PLAIN, config)
    try:
        introduce(source, destination, other_key=bytes(32))
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, [1])
        pull(maker, destination, source, transfer_id, [1])
        parties = [source, destination]
        expect_outcome(maker, parties, destination, transfer_id, "unauthenticated")
        expect_poison(destination)
        source.transport.revoke_grant(transfer_id)
        expect_idle(maker, parties)
    finally:
        source.transport.close()
        destination.transport.close()


def check_wrong_calls(maker: LaneMaker) -> None:
    """What the caller got wrong is said at once, and changes nothing."""
    with two_parties(maker) as (source, destination):
        transfer_id = fresh_id()
        grant(source, transfer_id, [1, 2])
        with raises(InvalidArgument):
            grant(source, transfer_id, [3])
        with raises(InvalidArgument):
            grant(source, fresh_id(), [16])
        with raises(InvalidArgument):
            pull(maker, destination, source, fresh_id(), [4, 4])
        with raises(InvalidArgument):
            source.transport.ready(transfer_id, 1, layers=0, complete=False)
        unready = fresh_id()
        grant(source, unready, [5, 6], ready=0)
        pull(maker, destination, source, unready, [1, 2])
        with raises(BlocksBusy):
            pull(maker, destination, source, fresh_id(), [2, 3])
        with raises(BlocksBusy):
            destination.transport.grant(fresh_id(), POOL_ID, as_blocks([2]), reader="", ttl_s=1.0, ready_blocks=0)
        source.transport.ready(unready, 2, layers=0, complete=True)
        expect_outcome(maker, [source, destination], destination, unready, "committed")
        pull(maker, destination, source, transfer_id, [1, 2])
        expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
        with raises(InvalidArgument):
            pull(maker, destination, source, transfer_id, [1, 2])
        destination.transport.peer_dead(source.ref)
        with raises(PeerGone):
            pull(maker, destination, source, fresh_id(), [1])


# --- transfers that end ---


def check_deadline(maker: LaneMaker) -> None:
    with two_parties(maker) as (source, destination):
        transfer_id = fresh_id()
        pull(maker, destination, source, transfer_id, [1], deadline_s=0.2)
        expect_outcome(maker, [source, destination], destination, transfer_id, "deadline")
        expect_poison(destination)


def check_cancel_then_reuse(maker: LaneMaker) -> None:
    """Once a cancelled transfer drained, its blocks are the owner's: nothing lands in them, come what may."""
    with two_parties(maker) as (source, destination):
        parties = [source, destination]
        for ready in (0, 4):
            source.fill(1)
            transfer_id = fresh_id()
            grant(source, transfer_id, range(8), ready=ready)
            pull(maker, destination, source, transfer_id, range(8))
            expect(maker, parties, "begun", has_done(destination, transfer_id, ready), SOON_S)
            destination.transport.cancel(transfer_id)
            destination.transport.cancel(transfer_id)
            expect_outcome(maker, parties, destination, transfer_id, "cancelled")
            destination.poison()
            with contextlib.suppress(GrantGone):
                source.transport.ready(transfer_id, 8, layers=0, complete=True)
            maker.wait(parties, lambda: False, 0.05)
            expect_poison(destination)
            source.transport.revoke_grant(transfer_id)
            again = fresh_id()
            grant(source, again, range(8))
            pull(maker, destination, source, again, range(8))
            expect_outcome(maker, parties, destination, again, "committed")
            destination.poison()


def check_cancel_races_the_read(maker: LaneMaker) -> None:
    """Cancel at any moment: after it drained, not one more byte lands."""
    with two_parties(maker, Layout.plain(32, 20_000)) as (source, destination):
        parties = [source, destination]
        source.fill(1)
        for moment in range(12):
            transfer_id = fresh_id()
            grant(source, transfer_id, range(32))
            pull(maker, destination, source, transfer_id, range(32))
            maker.wait(parties, lambda: False, moment * 0.0002)
            destination.transport.cancel(transfer_id)
            expect_outcome(maker, parties, destination, transfer_id, "cancelled", "committed")
            destination.poison()
            maker.wait(parties, lambda: False, 0.005)
            expect_poison(destination)
            source.transport.revoke_grant(transfer_id)


def check_source_closed(maker: LaneMaker) -> None:
    """A source that goes away in the middle is noticed in bounded time, and the blocks come back."""
    config = AgentConfig(reconnect_s=0.6, stall_s=0.3)
    source, destination = make_party(maker, "source", PLAIN, config), make_party(maker, "destination", PLAIN, config)
    try:
        introduce(source, destination)
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, range(8), ready=4)
        pull(maker, destination, source, transfer_id, range(8))
        parties = [source, destination]
        expect(maker, parties, "4 blocks", has_done(destination, transfer_id, 4), SOON_S)
        source.transport.close()
        expect_outcome(maker, [destination], destination, transfer_id, "peer_gone")
        expect_idle(maker, [destination])
    finally:
        source.transport.close()
        destination.transport.close()


def check_source_declared_dead(maker: LaneMaker) -> None:
    """The announced death of exactly that life ends its transfers at once."""
    with two_parties(maker) as (source, destination):
        transfer_id = fresh_id()
        pull(maker, destination, source, transfer_id, [1])
        destination.transport.peer_dead(source.ref)
        expect_outcome(maker, [source, destination], destination, transfer_id, "peer_gone")


def check_reader_declared_dead(maker: LaneMaker) -> None:
    """The announced death of the reader ends its grants; a grant that it never touched lives on."""
    with two_parties(maker) as (source, destination):
        source.fill(1)
        touched, untouched = fresh_id(), fresh_id()
        grant(source, touched, range(4), ready=2)
        grant(source, untouched, range(4))
        pull(maker, destination, source, touched, range(4))
        parties = [source, destination]
        expect(maker, parties, "2 blocks", has_done(destination, touched, 2), SOON_S)
        source.transport.peer_dead(destination.ref)
        expect(maker, parties, "ended", lambda: source.ended[touched.raw] == [GrantState.READER_GONE], SOON_S)
        assert source.transport.grant_state(untouched) is GrantState.ALIVE
        source.transport.revoke_grant(untouched)
        destination.transport.cancel(touched)


def check_destination_closed(maker: LaneMaker) -> None:
    """After a destination closed, nothing lands in its memory any more."""
    with two_parties(maker, Layout.plain(32, 20_000)) as (source, destination):
        source.fill(1)
        transfer_id = fresh_id()
        grant(source, transfer_id, range(32), ready=16)
        pull(maker, destination, source, transfer_id, range(32))
        expect(maker, [source, destination], "a block", lambda: destination.done.get(transfer_id.raw, 0) > 0, SOON_S)
        destination.transport.close()
        destination.poison()
        with contextlib.suppress(GrantGone):
            source.transport.ready(transfer_id, 32, layers=0, complete=True)
        maker.wait([source], lambda: False, 0.05)
        expect_poison(destination)
        source.transport.revoke_grant(transfer_id)
        destination.transport = make_party(maker, "destination", PLAIN).transport


# --- notifications ---


def check_notifications(maker: LaneMaker) -> None:
    """Numbered, in order, once; and those to a dead life are reported as failed."""
    with two_parties(maker) as (source, destination):
        parties = [source, destination]
        sent = [(source.transport.notify(destination.ref, b"%d" % n), b"%d" % n) for n in range(50)]
        back = destination.transport.notify(source.ref, b"back")
        expect(
            maker, parties, "delivered", lambda: len(source.delivered) == 50 and destination.delivered == [back], SOON_S
        )
        assert destination.received == sent
        assert [number for number, _ in sent] == list(range(1, 51))
        assert source.received == [(back, b"back")]
        destination.transport.close()
        lost = source.transport.notify(destination.ref, b"lost")
        source.transport.peer_dead(destination.ref)
        expect(maker, [source], "failed", lambda: source.undelivered == [lost], SOON_S)
        destination.transport = make_party(maker, "destination", PLAIN).transport


CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    *(value for name, value in list(globals().items()) if name.startswith("check_")),
    *PROMISE_CHECKS,
)
"""Every check."""
