"""The part of the lane contract about pulls that come before their grants: their blocks, their answers, and when
they are given up. Must never know how a lane is made.
"""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.config import AgentConfig
from kvxfer.errors import BlocksBusyError, InvalidArgumentError
from kvxfer.testing.contract.parties import POOL_ID, LaneMaker, LaneParty, fresh_id
from kvxfer.testing.contract.steps import (
    SOON_S,
    expect,
    expect_outcome,
    expect_poison,
    grant,
    has_ended,
    raises,
    two_parties,
)
from kvxfer.transport.base import as_blocks
from kvxfer.types import GrantState, TransferId, TransferState

COMMITTED = "committed"
QUICK = AgentConfig(unknown_wait_s=0.3, engine_silent_s=0.6)


def _ask(
    maker: LaneMaker, source: LaneParty, destination: LaneParty, transfer_id: TransferId, count: int, **more: float
) -> None:
    destination.transport.pull(
        transfer_id,
        source.ref,
        POOL_ID,
        as_blocks([0])[:0],
        first=0,
        lanes=[maker.lane],
        deadline_s=60.0,
        granted_s=30.0,
        count=count,
    )


def _is_granted(party: LaneParty, transfer_id: TransferId) -> Callable[[], bool]:
    return lambda: party.transport.transfer_state(transfer_id) is TransferState.GRANTED


def _is_told(party: LaneParty, transfer_id: TransferId) -> Callable[[], bool]:
    return lambda: party.granted[transfer_id.raw] > 0


def check_asked_then_reserved(maker: LaneMaker) -> None:
    """A pull without blocks learns of its grant, early or late, moves nothing, and then fills the blocks that it
    gets."""
    for is_early in (True, False):
        with two_parties(maker) as (source, destination):
            parties, transfer_id, data = [source, destination], fresh_id(), source.fill(3)
            if not is_early:
                grant(source, transfer_id, [1, 2, 3])
            _ask(maker, source, destination, transfer_id, 3)
            if is_early:
                expect(maker, parties, "asked", lambda: source.transport.counts().grants.waiting_pulls == 1, SOON_S)
                grant(source, transfer_id, [1, 2, 3])
            expect(maker, parties, "granted", _is_granted(destination, transfer_id), SOON_S)
            expect(maker, parties, "told", _is_told(destination, transfer_id), SOON_S)
            assert destination.transport.counts().pools[0].reserved == 0
            assert not source.transport.has_begun(transfer_id)
            assert source.transport.counts().grants.unread_blocks == 3
            expect_poison(destination)
            destination.transport.reserve(transfer_id, as_blocks([7, 6]), first=1)
            expect_outcome(maker, parties, destination, transfer_id, COMMITTED)
            assert (destination.read([7, 6]) == data[[2, 3]]).all()
            expect_poison(destination, [block for block in range(16) if block not in (6, 7)])
            expect(maker, parties, "released", has_ended(source, transfer_id), SOON_S)
            assert source.ended[transfer_id.raw] == [GrantState.RELEASED]


def check_early_blocks_go_back(maker: LaneMaker) -> None:
    """Blocks that a waiting pull had are the owner's at once, whatever is granted later; used ones stay."""
    with two_parties(maker) as (source, destination):
        parties, transfer_id, data = [source, destination], fresh_id(), source.fill(4)
        destination.transport.pull(
            transfer_id, source.ref, POOL_ID, as_blocks([1, 2]), first=0, lanes=[maker.lane], deadline_s=60.0
        )
        expect(maker, parties, "asked", lambda: source.transport.counts().grants.waiting_pulls == 1, SOON_S)
        assert destination.transport.unreserve(transfer_id)
        assert not destination.transport.unreserve(transfer_id)
        assert destination.transport.counts().pools[0].reserved == 0
        destination.write([1, 2], 0x11)
        grant(source, transfer_id, [1, 2])
        expect(maker, parties, "granted", _is_granted(destination, transfer_id), SOON_S)
        maker.wait(parties, lambda: False, 0.02)
        assert (destination.read([1, 2]) == 0x11).all(), "a byte landed in blocks that were taken back"
        destination.transport.reserve(transfer_id, as_blocks([3, 4]), first=0)
        assert not destination.transport.unreserve(transfer_id)
        expect_outcome(maker, parties, destination, transfer_id, COMMITTED)
        assert (destination.read([3, 4]) == data[[1, 2]]).all()


def check_races_of_taking_back(maker: LaneMaker) -> None:
    """Taken back while the grant is on its way: either the pull has no blocks, and nothing lands, or it keeps them."""
    for wait_s in (0.0, 0.0002, 0.001, 0.003):
        with two_parties(maker) as (source, destination):
            parties, transfer_id, data = [source, destination], fresh_id(), source.fill(5)
            destination.transport.pull(
                transfer_id, source.ref, POOL_ID, as_blocks([1, 2]), first=0, lanes=[maker.lane], deadline_s=60.0
            )
            expect(maker, parties, "asked", lambda: source.transport.counts().grants.waiting_pulls == 1, SOON_S)
            grant(source, transfer_id, [1, 2])
            maker.wait(parties, lambda: False, wait_s)
            blocks = [1, 2]
            if destination.transport.unreserve(transfer_id):
                destination.write([1, 2], 0x22)
                expect(maker, parties, "granted", _is_granted(destination, transfer_id), SOON_S)
                blocks = [8, 9]
                destination.transport.reserve(transfer_id, as_blocks(blocks), first=0)
            expect_outcome(maker, parties, destination, transfer_id, COMMITTED)
            assert (destination.read(blocks) == data[[1, 2]]).all()
            if blocks != [1, 2]:
                assert (destination.read([1, 2]) == 0x22).all(), "a byte landed in blocks that were taken back"


def check_what_a_source_knows(maker: LaneMaker) -> None:
    """A prompt that the source's engine accepted is waited for; one that it was never asked for is not."""
    with two_parties(maker, config=QUICK) as (source, destination):
        parties, known, unknown = [source, destination], fresh_id(), fresh_id()
        source.transport.expect(known, reader="destination")
        for transfer_id in (known, unknown):
            _ask(maker, source, destination, transfer_id, 1)

        def is_over() -> bool:
            source.transport.pulse(has_work=True)
            return bool(destination.outcome(unknown))

        expect(maker, parties, "refused", is_over, SOON_S)
        assert destination.outcome(unknown) == "grant_unknown"
        assert destination.transport.transfer_state(known) is TransferState.WAITING
        expect(maker, parties, "queued", lambda: destination.transport.counts().pulls_queued == 1, SOON_S)
        source.transport.abort_grant(known)
        expect_outcome(maker, parties, destination, known, "grant_revoked")


def check_a_hung_engine(maker: LaneMaker) -> None:
    """An engine that has work and makes no step ends the wait, though its agent goes on to answer."""
    with two_parties(maker, config=QUICK) as (source, destination):
        parties, transfer_id = [source, destination], fresh_id()
        source.transport.expect(transfer_id, reader="destination")
        source.transport.pulse(has_work=True)
        _ask(maker, source, destination, transfer_id, 1)
        expect_outcome(maker, parties, destination, transfer_id, "peer_gone")
        source.transport.abort_grant(transfer_id)


def check_the_reason_of_a_revocation(maker: LaneMaker) -> None:
    """The reader gets the owner's reason of a revocation, waiting or late."""
    with two_parties(maker) as (source, destination):
        parties, waiting, late = [source, destination], fresh_id(), fresh_id()
        for transfer_id in (waiting, late):
            grant(source, transfer_id, [1])
        _ask(maker, source, destination, waiting, 1)
        expect(maker, parties, "granted", _is_granted(destination, waiting), SOON_S)
        for transfer_id in (waiting, late):
            assert source.transport.revoke_grant(transfer_id, "no_room: here") is GrantState.REVOKED
        _ask(maker, source, destination, late, 1)
        for transfer_id in (waiting, late):
            expect_outcome(maker, parties, destination, transfer_id, "grant_revoked")
            assert "no_room: here" in destination.finals[transfer_id.raw][0].text


def check_wrong_reservations(maker: LaneMaker) -> None:
    with two_parties(maker) as (source, destination):
        parties, first, second = [source, destination], fresh_id(), fresh_id()
        with raises(InvalidArgumentError):
            destination.transport.reserve(first, as_blocks([1]), first=0)
        with raises(InvalidArgumentError):
            _ask(maker, source, destination, first, 0)
        for transfer_id in (first, second):
            _ask(maker, source, destination, transfer_id, 1)
        destination.transport.reserve(first, as_blocks([1]), first=0)
        with raises(InvalidArgumentError):
            destination.transport.reserve(first, as_blocks([2]), first=0)
        with raises(BlocksBusyError):
            destination.transport.reserve(second, as_blocks([1]), first=0)
        for transfer_id in (first, second):
            destination.transport.cancel(transfer_id)
            expect_outcome(maker, parties, destination, transfer_id, "cancelled")
        expect_poison(destination)


WAITING_CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    check_asked_then_reserved,
    check_early_blocks_go_back,
    check_races_of_taking_back,
    check_what_a_source_knows,
    check_a_hung_engine,
    check_the_reason_of_a_revocation,
    check_wrong_reservations,
)
