"""The part of the lane contract about promises that are not kept, on purpose: content that differs, a grant aborted, a
transfer given up. Decides what each side learns; must never know how a lane is made.
"""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.errors import GrantReleasedError, InvalidArgumentError
from kvxfer.testing.contract.parties import POOL_ID, LaneMaker, LaneParty, fresh_id
from kvxfer.testing.contract.steps import (
    SOON_S,
    expect,
    expect_outcome,
    expect_poison,
    grant,
    granted_pull,
    has_ended,
    pull,
    raises,
    two_parties,
)
from kvxfer.transport.base import NO_CONTENT_DIGEST, as_blocks
from kvxfer.types import GrantState, TransferId

COMMITTED = "committed"
THIS, THAT = b"\x01" * 32, b"\x02" * 32


def _grant(source: LaneParty, transfer_id: TransferId, content_digest: bytes) -> None:
    source.transport.grant(
        transfer_id,
        POOL_ID,
        as_blocks([1, 2]),
        reader="destination",
        ttl_s=10.0,
        ready_blocks=2,
        content_digest=content_digest,
    )


def _pull(
    maker: LaneMaker, source: LaneParty, destination: LaneParty, transfer_id: TransferId, content_digest: bytes
) -> None:
    destination.transport.pull(
        transfer_id,
        source.ref,
        POOL_ID,
        as_blocks([3, 4]),
        first=0,
        lanes=[maker.lane],
        deadline_s=60.0,
        content_digest=content_digest,
    )


def check_content(maker: LaneMaker) -> None:
    """A pull whose content digest differs from the grant's is refused, whichever comes first; without a digest it is
    served."""
    for ours, theirs, outcome in (
        (THIS, THAT, "incompatible"),
        (THIS, THIS, COMMITTED),
        (THIS, NO_CONTENT_DIGEST, COMMITTED),
        (NO_CONTENT_DIGEST, THAT, COMMITTED),
    ):
        for is_early in (False, True):
            with two_parties(maker) as (source, destination):
                parties, transfer_id = [source, destination], fresh_id()
                source.fill(1)
                if is_early:
                    _pull(maker, source, destination, transfer_id, theirs)
                    maker.wait(parties, lambda: False, 0.02)
                _grant(source, transfer_id, ours)
                if not is_early:
                    _pull(maker, source, destination, transfer_id, theirs)
                expect_outcome(maker, parties, destination, transfer_id, outcome)
                if outcome != COMMITTED:
                    expect_poison(destination)
                expect(maker, parties, "released", has_ended(source, transfer_id), SOON_S)
                assert source.ended[transfer_id.raw] == [GrantState.RELEASED]


def check_aborted_grant(maker: LaneMaker) -> None:
    """A reader that waits for an aborted grant, or asks for it later, gets grant_revoked."""
    with two_parties(maker) as (source, destination):
        parties = [source, destination]
        for is_early in (True, False):
            transfer_id = fresh_id()
            if is_early:
                pull(maker, destination, source, transfer_id, [1])
                maker.wait(parties, lambda: False, 0.02)
            source.transport.abort_grant(transfer_id)
            if not is_early:
                pull(maker, destination, source, transfer_id, [1])
            expect_outcome(maker, parties, destination, transfer_id, "grant_revoked")
            with raises(InvalidArgumentError):
                grant(source, transfer_id, [1])
            with raises(InvalidArgumentError):
                source.transport.abort_grant(transfer_id)
        expect_poison(destination)


def check_aborted_pull(maker: LaneMaker) -> None:
    """A reader that aborts a pull releases the grant at once, also one that is made afterwards."""
    with two_parties(maker) as (source, destination):
        parties, made, late = [source, destination], fresh_id(), fresh_id()
        grant(source, made, [1])
        destination.transport.abort_pull(made, source.ref)
        expect(maker, parties, "released", has_ended(source, made), SOON_S)
        assert source.ended[made.raw] == [GrantState.RELEASED]
        destination.transport.abort_pull(late, source.ref)
        expect(maker, parties, "heard", lambda: source.transport.grant_state(late) is GrantState.RELEASED, SOON_S)
        with raises(GrantReleasedError):
            grant(source, late, [1])


def check_cancelled_before_it_met(maker: LaneMaker) -> None:
    """A pull that is cancelled while its session is still being made releases its grant all the same."""
    with two_parties(maker) as (source, destination):
        transfer_id = granted_pull(maker, source, destination, [1, 2])
        destination.transport.cancel(transfer_id)
        parties = [source, destination]
        expect_outcome(maker, parties, destination, transfer_id, "cancelled", COMMITTED)
        expect(maker, parties, "released", has_ended(source, transfer_id), SOON_S)
        assert source.ended[transfer_id.raw] == [GrantState.RELEASED]


PROMISE_CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    check_content,
    check_aborted_grant,
    check_aborted_pull,
    check_cancelled_before_it_met,
)
