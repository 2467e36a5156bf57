"""The part of the lane contract about reads and writes that end early or are interrupted: cancelled, cut, past their
deadline, without their memory or their peer. Decides when memory is its owner's again; must never know how a lane is
made.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvxfer.config import AgentConfig
from kvxfer.errors import BlocksBusyError
from kvxfer.testing.contract.parties import LaneMaker, LaneParty
from kvxfer.testing.contract.post_checks import BOTH, COMMITTED
from kvxfer.testing.contract.posted_memory import PostedMemory, expect_post, outcome, peer_of, post
from kvxfer.testing.contract.steps import SOON_S, expect, expect_idle, mortal_parties, two_parties
from kvxfer.transport.batch import TransferBatch
from kvxfer.transport.plan import Op
from kvxfer.types import Lane, TransferState

SIZE, ELEMENT = 640_000, 20_000
OFFSETS = np.arange(0, SIZE, ELEMENT)
MOMENT_S = 0.0002
"""Between the moments at which a check interrupts; together they meet every phase."""
MOMENTS = 12
BRIEF = AgentConfig(reconnect_s=0.6, stall_s=0.3)


def _pair(one: LaneParty, other: LaneParty) -> tuple[PostedMemory, PostedMemory]:
    return PostedMemory.register(one, SIZE), PostedMemory.register(other, SIZE)


def _start(
    maker: LaneMaker,
    op: Op,
    one: LaneParty,
    other: LaneParty,
    mine: PostedMemory,
    theirs: PostedMemory,
    **options: object,
) -> TransferBatch:
    return post(maker, op, one, mine.rows(OFFSETS, ELEMENT), other, theirs.rows(OFFSETS, ELEMENT), **options)


def check_post_cancel_races_the_bytes(maker: LaneMaker) -> None:
    """Cancel at any moment: once a read drained, not one more byte lands here; once a write drained, nothing that is
    written to our memory afterwards arrives as committed there."""
    with two_parties(maker) as (one, other):
        mine, theirs = _pair(one, other)
        parties = [one, other]
        for moment in range(MOMENTS):
            truth = theirs.fill(moment)
            mine.poison()
            read = _start(maker, Op.READ, one, other, mine, theirs)
            maker.wait(parties, lambda: False, moment * MOMENT_S)
            read.cancel()
            expect_post(maker, parties, read, "cancelled", COMMITTED)
            if outcome(read) == COMMITTED:
                assert (mine.array == truth).all(), "bytes differ"
            mine.poison()
            maker.wait(parties, lambda: False, 0.005)
            mine.expect_poison()
        for moment in range(MOMENTS):
            truth = mine.fill(moment)
            theirs.poison()
            told: list[bool] = []
            other.on_received = _compare(theirs, truth, told)
            write = _start(maker, Op.WRITE, one, other, mine, theirs, notification=b"told")
            maker.wait(parties, lambda: False, moment * MOMENT_S)
            write.cancel()
            expect_post(maker, parties, write, "cancelled", COMMITTED)
            mine.poison()
            expect_idle(maker, parties)
            maker.wait(parties, lambda: False, 0.005)
            assert told in ([], [True]), "committed with bytes that were not promised any more"
            assert told or outcome(write) == "cancelled", "committed without a notification"


def _compare(memory: PostedMemory, truth: npt.NDArray[np.uint8], told: list[bool]) -> Callable[[bytes], None]:
    return lambda _: told.append(bool((memory.array == truth).all()))


def check_region_taken_back_while_it_is_read(maker: LaneMaker) -> None:
    """Deregister at any moment and overwrite: a peer's read either has the earlier bytes, or is not committed."""
    for moment in range(MOMENTS):
        with two_parties(maker) as (one, other):
            mine, theirs = _pair(one, other)
            truth = theirs.fill(moment)
            read = _start(maker, Op.READ, one, other, mine, theirs)
            maker.wait([one, other], lambda: False, moment * MOMENT_S)
            other.poster.deregister(theirs.registration)
            theirs.poison()
            expect_post(maker, [one, other], read, COMMITTED, "grant_revoked", "refused")
            if outcome(read) == COMMITTED:
                assert (mine.array == truth).all(), "a commit of bytes that were overwritten"


def check_region_taken_back_while_it_is_written(maker: LaneMaker) -> None:
    """Deregister at any moment: it is refused until nothing can land, and then nothing lands."""
    for moment in range(MOMENTS):
        with two_parties(maker) as (one, other):
            mine, theirs = _pair(one, other)
            mine.fill(moment)
            write = _start(maker, Op.WRITE, one, other, mine, theirs)
            parties = [one, other]
            maker.wait(parties, lambda: False, moment * MOMENT_S)
            expect(maker, parties, "taken back", lambda: _is_taken_back(other, theirs), SOON_S)  # noqa: B023
            theirs.poison()
            expect_post(maker, parties, write, COMMITTED, "cancelled", "grant_revoked", "refused")
            maker.wait(parties, lambda: False, 0.005)
            theirs.expect_poison()


def _is_taken_back(party: LaneParty, memory: PostedMemory) -> bool:
    try:
        party.poster.deregister(memory.registration)
    except BlocksBusyError:
        return False
    return True


def check_post_past_its_deadline(maker: LaneMaker) -> None:
    """A post whose peer does not answer ends at its deadline, and leaves nothing."""
    config = AgentConfig(reconnect_s=30.0)
    with mortal_parties(maker, config=config) as (one, other):
        mine, theirs = _pair(one, other)
        peer = peer_of(other)
        other.transport.close()
        for op in BOTH:
            late = post(maker, op, one, mine.rows([0], 64), peer, theirs.rows([0], 64), deadline_s=0.2)
            expect_post(maker, [one], late, "deadline")
        mine.expect_poison()
        expect_idle(maker, [one])


def check_peer_closes_under_a_post(maker: LaneMaker) -> None:
    """A peer that goes away at any moment is noticed in bounded time, and our memory comes back."""
    for op in BOTH:
        for moment in (0, 2, 5):
            with mortal_parties(maker, config=BRIEF) as (one, other):
                mine, theirs = _pair(one, other)
                source, destination = (theirs, mine) if op is Op.READ else (mine, theirs)
                truth = source.fill(moment)
                left = _start(maker, op, one, other, mine, theirs)
                maker.wait([one, other], lambda: False, moment * MOMENT_S)
                other.transport.close()
                # UCX may find before the session does that the peer is gone.
                endings = ["peer_gone", "transport", COMMITTED, *(["no_lane"] if maker.lane is Lane.UCX else [])]
                expect_post(maker, [one], left, *endings)
                if outcome(left) == COMMITTED:
                    assert (destination.array == truth).all(), "bytes differ"
                expect_idle(maker, [one])
                one.poster.deregister(mine.registration)


def check_peer_declared_dead_under_a_post(maker: LaneMaker) -> None:
    """The announced death of exactly that incarnation ends its posts at once; and its writes here end too."""
    for op in BOTH:
        with mortal_parties(maker) as (one, other):
            mine, theirs = _pair(one, other)
            dead = _start(maker, op, one, other, mine, theirs)
            one.transport.peer_dead(other.ref)
            other.transport.peer_dead(one.ref)
            expect_post(maker, [one, other], dead, "peer_gone", COMMITTED)
            expect_idle(maker, [one, other])
            for memory in (mine, theirs):
                memory.poison()
            maker.wait([one, other], lambda: False, 0.005)
            for memory in (mine, theirs):
                memory.expect_poison()


def check_cut_posts_go_on(maker: LaneMaker) -> None:
    """A connection that breaks at any moment costs time: the post ends as it would have, and reports that once."""
    config = AgentConfig(stall_s=0.3, reconnect_s=10.0, grant_ttl_s=1.0)  # a RELEASE may be cut off
    for op in BOTH:
        with two_parties(maker, config=config) as (one, other):
            mine, theirs = _pair(one, other)
            source, destination = (theirs, mine) if op is Op.READ else (mine, theirs)
            parties = [one, other]
            for moment in range(MOMENTS):
                truth = source.fill(moment)
                destination.poison()
                other.received.clear()
                cut = _start(maker, op, one, other, mine, theirs, notification=b"told")
                maker.wait(parties, lambda: False, moment * MOMENT_S)
                maker.cut(one, other)
                expect_post(maker, parties, cut, COMMITTED)
                assert (destination.array == truth).all(), "bytes differ"
                expect(maker, parties, "told", lambda: bool(other.received), SOON_S)
                expect_idle(maker, parties)
                assert [payload for _, payload in other.received] == [b"told"]


def check_offers_are_told(maker: LaneMaker) -> None:
    """The destination learns of each write that ended, once; the writer learns only of its own post."""
    with two_parties(maker) as (one, other):
        mine, theirs = _pair(one, other)
        mine.fill(1)
        for number in range(3):
            write = _start(maker, Op.WRITE, one, other, mine, theirs)
            expect_post(maker, [one, other], write, COMMITTED)
            expect(maker, [one, other], "told", lambda: len(other.offers) > number, SOON_S)  # noqa: B023
            offer = other.offers[-1]
            assert TransferState(int(offer.state)) is TransferState.COMMITTED
            assert offer.bytes == SIZE
            assert write.transfer_ids[0][:15] == offer.id[:15]
        assert not one.offers
        assert not other.finals


POST_ENDING_CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    check_post_cancel_races_the_bytes,
    check_region_taken_back_while_it_is_read,
    check_region_taken_back_while_it_is_written,
    check_post_past_its_deadline,
    check_peer_closes_under_a_post,
    check_peer_declared_dead_under_a_post,
    check_cut_posts_go_on,
    check_offers_are_told,
)
