"""The one safety rule on real threads: nothing lands after drained, nothing commits after the grant ended."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import numpy as np
import pytest

from kvxfer._native import _core as native
from kvxfer.errors import BlocksBusyError, GrantExpiredError, GrantRevokedError
from tests.support.limits import endpoint_limits
from tests.support.native.nodes import NewId

MAPPED, STREAM = native.Lane.MAPPED, native.Lane.STREAM
COMMITTED, FAILED = native.TransferState.COMMITTED, native.TransferState.FAILED
CANCELLED = native.TransferState.CANCELLED
REVOKE = native.GrantEvent.REVOKE
READY = (256, 512, 512, 512)
"""Of 512 blocks: what a busy machine would commit before it is interrupted stays in the middle every fourth time."""
each_lane = pytest.mark.parametrize("lane", [MAPPED, STREAM], ids=["mapped", "stream"])


@each_lane
def test_nothing_lands_after_drained(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    """Cancels at random moments; the blocks are poisoned at drained and looked at again much later."""
    p, d = nodes.pair(block_bytes=16384, blocks=512)
    rng = random.Random(4)
    ends = set()
    for i in range(40):
        transfer = new_id()
        p.grant(transfer, np.arange(512), ttl_s=1.0, ready=READY[i % 4])
        d.pull(transfer, p, np.arange(512), lanes=[lane])
        time.sleep(rng.choice([0, 0.0002, 0.001, 0.002]) * rng.random())
        d.core.cancel(transfer)
        ends.add(d.wait_drained(transfer).state)
        d.fill(0x55)
        time.sleep(0.002)
        assert np.all(d.memory == 0x55)
        p.wait_for(native.GrantEnded, id=transfer)
    assert CANCELLED in ends
    assert p.is_idle()
    assert d.is_idle()


@each_lane
def test_revoked_in_the_middle_never_commits(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    """The owner overwrites the moment that revoke returns; a commit would show either old bytes or a late revoke."""
    p, d = nodes.pair(block_bytes=16384, blocks=512)
    rng = random.Random(5)
    states = []
    for i in range(40):
        transfer = new_id()
        p.fill(i + 1)
        p.grant(transfer, np.arange(512), ready=READY[i % 4])
        d.pull(transfer, p, np.arange(512), lanes=[lane])
        time.sleep(rng.choice([0, 0.0005, 0.001, 0.003]) * rng.random())
        after = p.core.end_grant(transfer, REVOKE)
        p.fill(0xAA)
        final = d.wait_drained(transfer)
        states.append(final.state)
        if final.state == COMMITTED:
            assert np.all(d.memory == i + 1)
            assert after in (native.GrantState.RELEASED, native.GrantState.REVOKED)
        else:
            assert (final.state, final.code) == (FAILED, native.Code.grant_revoked)
        if lane == STREAM:
            assert not np.any(d.memory == 0xAA), "bytes written after the revoke left the source"
        with (
            pytest.raises(GrantRevokedError)
            if after == native.GrantState.REVOKED
            else pytest.raises(Exception, match="ended")
        ):
            p.core.ready(transfer, 512, complete=True)
    assert FAILED in states
    assert p.is_idle()
    assert d.is_idle()


@each_lane
def test_expiry(p: Any, d: Any, new_id: NewId, lane: native.Lane) -> None:
    expired, late = new_id(), new_id()
    p.grant(expired, [1, 2], ttl_s=0.05)
    p.wait_for(native.GrantEnded, id=expired, state=native.GrantState.EXPIRED)
    d.pull(expired, p, [3, 4], lanes=[lane])
    final = d.wait_drained(expired)
    assert (final.state, final.code) == (FAILED, native.Code.grant_expired)
    p.core.grant(late, 7, np.array([1, 2], np.uint32), reader="", ttl_ns=20_000_000_000, ready_blocks=1)
    d.pull(late, p, [3, 4], lanes=[lane], deadline_s=0.4)
    assert d.wait_drained(late).state == FAILED
    p.wait_for(native.GrantEnded, id=late, state=native.GrantState.RELEASED)
    assert p.is_idle()


def test_a_live_reader_renews(nodes: Any, new_id: NewId) -> None:
    assert outlives_its_grant(*nodes.pair(), new_id)


def outlives_its_grant(p: Any, d: Any, new_id: NewId, **options: Any) -> bool:
    """Whether a pull waits longer than its grant (0.6 s) would live, were it not renewed each 0.2 s. One that a stalled
    machine ended says nothing."""
    for ours, theirs in (([1, 2], [3, 4]), ([5, 6], [7, 8]), ([9, 10], [11, 12])):
        transfer = new_id()
        p.grant(transfer, ours, ttl_s=0.6, ready=1)
        d.pull(transfer, p, theirs, **options)
        time.sleep(1.3)
        with contextlib.suppress(GrantExpiredError):
            p.core.ready(transfer, 2, complete=True)
        final = d.wait_drained(transfer)
        if final.state == COMMITTED:
            return True
        assert final.code == native.Code.grant_expired, final.text
    return False


@each_lane
def test_a_live_reader_renews_as_often_as_the_source_asks_for(nodes: Any, new_id: NewId, lane: native.Lane) -> None:
    """The reader's own idea of a grant's lifetime (10 s) is not the source's (0.6 s)."""
    limits = endpoint_limits(ttl_ns=600_000_000)
    p, d = nodes.pair(source={"limits": limits})
    assert outlives_its_grant(p, d, new_id, lanes=[lane])


@each_lane
def test_deadline_and_waiting(p: Any, d: Any, new_id: NewId, lane: native.Lane) -> None:
    transfer = new_id()
    d.pull(transfer, p, [1], lanes=[lane], deadline_s=0.2)
    final = d.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.deadline)
    assert d.is_idle()


@each_lane
def test_wrong_reader_is_refused(p: Any, d: Any, new_id: NewId, lane: native.Lane) -> None:
    transfer = new_id()
    p.grant(transfer, [1], reader="another-reader")
    d.pull(transfer, p, [1], lanes=[lane])
    final = d.wait_drained(transfer)
    assert (final.state, final.code) == (FAILED, native.Code.refused)
    assert set(d.block(1)) == {0xEE}


def test_blocks_in_use(p: Any, d: Any, new_id: NewId) -> None:
    transfer, other = new_id(), new_id()
    d.pull(transfer, p, [1, 2])
    with pytest.raises(BlocksBusyError, match="reserved"):
        d.pull(other, p, [2, 3])
    with pytest.raises(BlocksBusyError, match="reserved"):
        d.grant(other, [1])
    with pytest.raises(BlocksBusyError):
        d.core.remove_pool(7)
    d.core.cancel(transfer)
    assert d.wait_drained(transfer).state == CANCELLED
    d.core.remove_pool(7)
