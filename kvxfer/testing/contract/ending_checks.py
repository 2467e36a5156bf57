"""The part of the lane contract about transfers that end early, and about state that outlasts one: an incarnation, a
notification. Decides when memory is its owner's again; must never know how a lane is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvxfer.config import AgentConfig
from kvxfer.errors import GrantGoneError
from kvxfer.testing.contract.parties import LaneMaker, PoolLayout, fresh_id, make_party
from kvxfer.testing.contract.steps import (
    PLAIN,
    SOON_S,
    expect,
    expect_idle,
    expect_outcome,
    expect_poison,
    grant,
    granted_pull,
    has_done,
    mortal_parties,
    pull,
    two_parties,
)
from kvxfer.types import GrantState


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
            transfer_id = granted_pull(maker, source, destination, range(8), ready=ready)
            expect(maker, parties, "begun", has_done(destination, transfer_id, ready), SOON_S)
            destination.transport.cancel(transfer_id)
            destination.transport.cancel(transfer_id)
            expect_outcome(maker, parties, destination, transfer_id, "cancelled")
            destination.poison()
            with contextlib.suppress(GrantGoneError):
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
    with two_parties(maker, PoolLayout.plain(32, 20_000)) as (source, destination):
        parties = [source, destination]
        source.fill(1)
        for moment in range(12):
            transfer_id = granted_pull(maker, source, destination, range(32))
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
    with mortal_parties(maker, config=config) as (source, destination):
        source.fill(1)
        transfer_id = granted_pull(maker, source, destination, range(8), ready=4)
        parties = [source, destination]
        expect(maker, parties, "4 blocks", has_done(destination, transfer_id, 4), SOON_S)
        source.transport.close()
        expect_outcome(maker, [destination], destination, transfer_id, "peer_gone")
        expect_idle(maker, [destination])


def check_source_declared_dead(maker: LaneMaker) -> None:
    """The announced death of exactly that incarnation ends its transfers at once."""
    with two_parties(maker) as (source, destination):
        transfer_id = fresh_id()
        pull(maker, destination, source, transfer_id, [1])
        destination.transport.peer_dead(source.ref)
        expect_outcome(maker, [source, destination], destination, transfer_id, "peer_gone")


def check_reader_declared_dead(maker: LaneMaker) -> None:
    """The announced death of the reader ends its grants; a grant that it never touched stays."""
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
    with two_parties(maker, PoolLayout.plain(32, 20_000)) as (source, destination):
        source.fill(1)
        transfer_id = granted_pull(maker, source, destination, range(32), ready=16)
        expect(maker, [source, destination], "a block", lambda: destination.done.get(transfer_id.raw, 0) > 0, SOON_S)
        destination.transport.close()
        destination.poison()
        with contextlib.suppress(GrantGoneError):
            source.transport.ready(transfer_id, 32, layers=0, complete=True)
        maker.wait([source], lambda: False, 0.05)
        expect_poison(destination)
        source.transport.revoke_grant(transfer_id)
        destination.transport = make_party(maker, "destination", PLAIN).transport


def check_notifications(maker: LaneMaker) -> None:
    """Numbered, in order, once; and those to a dead incarnation are reported as failed."""
    with two_parties(maker) as (source, destination):
        parties = [source, destination]
        sent = [(source.transport.notify(destination.ref, b"%d" % n), b"%d" % n) for n in range(50)]
        back = destination.transport.notify(source.ref, b"back")
        # NotifDelivered may come before the receiver's program took the notification.
        counts = (50, 1, 50, 1)
        heard = (source.delivered, destination.delivered, destination.received, source.received)
        expect(maker, parties, "delivered", lambda: tuple(len(events) for events in heard) == counts, SOON_S)
        assert destination.delivered == [back]
        assert destination.received == sent
        assert [number for number, _ in sent] == list(range(1, 51))
        assert source.received == [(back, b"back")]
        destination.transport.close()
        lost = source.transport.notify(destination.ref, b"lost")
        source.transport.peer_dead(destination.ref)
        expect(maker, [source], "failed", lambda: source.undelivered == [lost], SOON_S)
        destination.transport = make_party(maker, "destination", PLAIN).transport


ENDING_CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    check_deadline,
    check_cancel_then_reuse,
    check_cancel_races_the_read,
    check_source_closed,
    check_source_declared_dead,
    check_reader_declared_dead,
    check_destination_closed,
    check_notifications,
)
