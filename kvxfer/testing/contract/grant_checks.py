"""The part of the lane contract about grants that end, and about pulls that must be refused. Decides what a source
may no longer vouch for; must never know how a lane is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvxfer.config import AgentConfig
from kvxfer.errors import BlocksBusyError, GrantGoneError, InvalidArgumentError, PeerGoneError
from kvxfer.testing.contract.parties import POOL_ID, RECORD, LaneMaker, PoolLayout, fresh_id, introduce, make_party
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
    has_ended,
    pull,
    raises,
    two_parties,
)
from kvxfer.transport.base import as_blocks
from kvxfer.types import GrantState


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
        transfer_id = granted_pull(maker, source, destination, range(8), ready=4)
        parties = [source, destination]
        expect(maker, parties, "4 blocks", has_done(destination, transfer_id, 4), SOON_S)
        assert source.transport.revoke_grant(transfer_id) is GrantState.REVOKED
        source.poison()
        with raises(GrantGoneError):
            source.transport.ready(transfer_id, 8, layers=0, complete=True)
        expect_outcome(maker, parties, destination, transfer_id, "grant_revoked")
        assert source.ended[transfer_id.raw] == [GrantState.REVOKED]


def check_revoke_races_the_read(maker: LaneMaker) -> None:
    """Revoke and overwrite at any moment: either nothing commits, or only bytes of before."""
    with two_parties(maker, PoolLayout.plain(32, 20_000)) as (source, destination):
        parties = [source, destination]
        for moment in range(12):
            truth = source.fill(moment)
            transfer_id = granted_pull(maker, source, destination, range(32))
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
        transfer_id = granted_pull(maker, source, destination, [3])
        parties = [source, destination]
        expect_outcome(maker, parties, destination, transfer_id, "committed")
        expect(maker, parties, "released", lambda: bool(source.ended[transfer_id.raw]), SOON_S)
        assert source.transport.revoke_grant(transfer_id) is GrantState.RELEASED
        assert destination.outcome(transfer_id) == "committed"


def check_expiry(maker: LaneMaker) -> None:
    """A grant without a reader expires, at exactly its expiry."""
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
    """A live reader keeps a slow grant alive far past its time; its maximum lifetime ends it all the same."""
    config = AgentConfig(grant_ttl_s=2.0, grant_lifetime_max_s=6.0, stall_s=0.5)
    with two_parties(maker, config=config) as (source, destination):
        truth, transfer_id, endless = source.fill(1), fresh_id(), fresh_id()
        for number, id_ in enumerate((transfer_id, endless)):
            blocks = range(4 * number, 4 * number + 4)
            grant(source, id_, blocks, ready=1, ttl_s=2.0)
            pull(maker, destination, source, id_, blocks)
        parties = [source, destination]
        maker.wait(parties, lambda: bool(destination.finals[transfer_id.raw]), 3.5)
        assert source.transport.grant_state(transfer_id) is GrantState.ALIVE
        source.transport.ready(transfer_id, 4, layers=0, complete=True)
        expect_outcome(maker, parties, destination, transfer_id, "committed")
        assert (destination.read(range(4)) == truth[:4]).all()
        assert source.transport.grant_state(endless) is GrantState.ALIVE
        expect_outcome(maker, parties, destination, endless, "grant_expired", within_s=6.0 + SOON_S)


def check_wrong_reader(maker: LaneMaker) -> None:
    """A grant serves only the agent that it names."""
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
    other = dataclasses.replace(RECORD, dtype="float16")
    with two_parties(maker, destination_record=other) as (source, destination):
        source.fill(1)
        transfer_id = granted_pull(maker, source, destination, [1])
        expect_outcome(maker, [source, destination], destination, transfer_id, "incompatible")
        expect_poison(destination)
        source.transport.revoke_grant(transfer_id)


def check_past_the_end(maker: LaneMaker) -> None:
    """More blocks than the grant has are refused, before and while it waits; the reader then releases the grant."""
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


def check_wrong_key(maker: LaneMaker) -> None:
    """A peer whose key is another one proves nothing and gets nothing."""
    config = AgentConfig(reconnect_s=0.5)
    with two_parties(maker, config=config, destination_key=bytes(32)) as (source, destination):
        source.fill(1)
        transfer_id = granted_pull(maker, source, destination, [1])
        expect_outcome(maker, [source, destination], destination, transfer_id, "unauthenticated")
        expect_poison(destination)
        source.transport.revoke_grant(transfer_id)


def check_wrong_calls(maker: LaneMaker) -> None:
    """A caller's error is raised at once, and changes nothing."""
    with two_parties(maker) as (source, destination):
        transfer_id = fresh_id()
        grant(source, transfer_id, [1, 2])
        with raises(InvalidArgumentError):
            grant(source, transfer_id, [3])
        with raises(InvalidArgumentError):
            grant(source, fresh_id(), [16])
        with raises(InvalidArgumentError):
            pull(maker, destination, source, fresh_id(), [4, 4])
        with raises(InvalidArgumentError):
            source.transport.ready(transfer_id, 1, layers=0, complete=False)
        unready = fresh_id()
        grant(source, unready, [5, 6], ready=0)
        pull(maker, destination, source, unready, [1, 2])
        with raises(BlocksBusyError):
            pull(maker, destination, source, fresh_id(), [2, 3])
        with raises(BlocksBusyError):
            destination.transport.grant(fresh_id(), POOL_ID, as_blocks([2]), reader="", ttl_s=1.0, ready_blocks=0)
        source.transport.ready(unready, 2, layers=0, complete=True)
        expect_outcome(maker, [source, destination], destination, unready, "committed")
        pull(maker, destination, source, transfer_id, [1, 2])
        expect_outcome(maker, [source, destination], destination, transfer_id, "committed")
        with raises(InvalidArgumentError):
            pull(maker, destination, source, transfer_id, [1, 2])
        destination.transport.peer_dead(source.ref)
        with raises(PeerGoneError):
            pull(maker, destination, source, fresh_id(), [1])


GRANT_CHECKS: tuple[Callable[[LaneMaker], None], ...] = (
    check_revoke_before_pull,
    check_revoke_in_the_middle,
    check_revoke_races_the_read,
    check_revoke_after_commit,
    check_expiry,
    check_renewals,
    check_wrong_reader,
    check_incompatible,
    check_past_the_end,
    check_wrong_key,
    check_wrong_calls,
)
