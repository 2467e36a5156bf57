"""How the machines of two endpoints meet: what a slow wire, an idle session, a lost answer or a second incarnation mean
to a transfer. Each test that names a flaw is the smallest history that the simulation's find came down to.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import GrantEvent, GrantState, TransferState
from kvxfer.errors import InvalidArgumentError, PeerGoneError
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.endpoint_pair import Pair
from tests.support.machines.pulls import ID, finals, grant, land, pull


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_commits(pair: Pair) -> None:
    pull(pair)
    pair.pump()
    grant(pair)
    pair.pump()
    land(pair)
    pair.pump()
    assert finals(pair) == [("COMMITTED", "ok")]
    assert [e.state for e in pair.take("a", _core.GrantEnded)] == [GrantState.RELEASED]
    assert len(pair.take("b", _core.TransferDrained)) == 1
    for name in "ab":
        (pool,) = pair.ends[name].counts().pools
        assert pool.granted == pool.reserved == pool.quarantined == 0
    assert pair.ends["b"].transfer_state(ID) == TransferState.COMMITTED
    with pytest.raises(InvalidArgumentError):
        pull(pair)


def test_lost_answer_is_asked_for_again_with_the_same_nonce(pair: Pair) -> None:
    """Also after the grant ended: the verdict speaks of the moment in which it was given."""
    grant(pair)
    pull(pair)
    pair.pump()
    land(pair)
    nonces: list[int] = []

    def fate(frame: Any) -> int:
        if isinstance(frame, _core.Confirm):
            nonces.append(frame.nonce)
        return 0 if isinstance(frame, (_core.Revoke,)) or (isinstance(frame, _core.Verdict) and len(nonces) == 1) else 1

    pair.pump(fate)
    assert finals(pair) == []
    pair.do("a", pair.ends["a"].end_grant(ID, GrantEvent.REVOKE, pair.now)[1])
    pair.advance(3 * S, fate)
    assert finals(pair) == [("COMMITTED", "ok")]
    assert len(nonces) == 2
    assert len(set(nonces)) == 1


def test_read_after_the_end_is_not_confirmed(pair: Pair) -> None:
    grant(pair, ttl_ns=50 * MS)
    pull(pair)
    pair.pump()
    pair.now += 50 * MS
    land(pair)
    pair.pump()
    assert finals(pair) == [("FAILED", "grant_expired")]


def test_blocks_of_a_read_under_way_are_quarantined(pair: Pair) -> None:
    grant(pair)
    pull(pair)
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    b = pair.ends["b"]
    pair.do("b", b.cancel(ID, pair.now))
    assert finals(pair) == [("CANCELLED", "cancelled")]
    assert not b.is_landing(ID, read.token)
    assert pair.take("b", _core.TransferDrained) == []
    assert b.counts().pools[0].quarantined == 2
    pair.do("b", b.read_landed(ID, read.token, pair.now))
    assert len(pair.take("b", _core.TransferDrained)) == 1
    assert b.counts().pools[0].quarantined == 0


def test_another_incarnation_of_the_source_ends_the_transfer(pair: Pair) -> None:
    pull(pair)
    pair.pump()
    new = _core.AgentRef("a", 2, b"A" * 16)
    b = pair.ends["b"]
    b.set_peer(new, b"n" * 32, _core.SessionKind.MEMORY)
    pair.do("b", b.peer_dead(pair.refs["a"], pair.now))
    assert finals(pair) == [("FAILED", "peer_gone")]
    with pytest.raises(PeerGoneError):
        pull(pair, b"u" * 16)


def test_an_idle_session_is_not_a_silent_one(pair: Pair) -> None:
    """Flaw: a pull on a session that was unused for a while hung it up at once, because its silence was counted
    from the last word that anybody had waited for.
    """
    grant(pair)
    pull(pair)
    pair.pump()
    land(pair)
    pair.pump()
    pair.advance(60 * S)
    assert finals(pair) == [("COMMITTED", "ok")]
    pair.told["b"].clear()
    grant(pair, b"u" * 16, at=4)
    pull(pair, b"u" * 16, at=4)
    pair.do("b", pair.ends["b"].tick(pair.now))
    assert pair.take("b", _core.Hangup) == []
    assert pair.ends["b"].next_deadline() > pair.now
    pair.pump()
    land(pair)
    pair.pump()
    assert finals(pair) == [("COMMITTED", "ok")]


def test_a_silent_peer_is_pinged_and_then_given_up(pair: Pair) -> None:
    pull(pair)
    pair.pump()
    pings = 0

    def fate(frame: Any) -> int:
        nonlocal pings
        pings += isinstance(frame, _core.Ping)
        return 0

    pair.reachable = False
    pair.advance(2500 * MS, fate)
    assert pings == 1
    assert [e.code.name for e in pair.take("b", _core.Hangup)] == ["transport"]
    pair.advance(4 * S, fate)
    assert finals(pair) == [("FAILED", "peer_gone")]


class SlowWire:
    """A source's connection that takes ``block_ns`` for each block, one SendData after the other, as TCP would; frames
    queue behind payloads.
    """

    def __init__(self, pair: Any, block_ns: int) -> None:
        self.pair, self.block_ns = pair, block_ns
        self.queue: list[tuple[int, Any]] = []
        self.busy_until = 0
        self.sent_blocks = 0

    def step(self, until: int) -> None:
        pair = self.pair
        a, b = pair.ends["a"], pair.ends["b"]
        while pair.now < until:
            for effect in pair.take("a", _core.SendData):
                self.queue.append((effect.session, effect))
            for entry in [entry for entry in pair.wire if entry[0] == "a"]:
                pair.wire.remove(entry)
                self.queue.append((entry[1], entry[2]))
            pair.pump()
            if not self.queue:
                pair.now += 10 * MS
            else:
                session, head = self.queue.pop(0)
                _, theirs = pair.peer_session["a", session]
                if isinstance(head, _core.SendData):
                    landing = b.data_arrives(theirs, head.frame, pair.now)
                    for _ in head.blocks:
                        pair.now += self.block_ns
                        self.sent_blocks += 1
                        b.heard(theirs, pair.now)
                    if landing.token:
                        pair.do("b", b.read_landed(head.frame.id, landing.token, pair.now))
                    frame = head.frame
                    pair.do("a", a.data_sent(session, frame.id, frame.attempt, len(head.blocks), pair.now))
                else:
                    pair.do("b", b.on_frame(theirs, head, pair.now))
            for name in "ab":
                if pair.ends[name].next_deadline() <= pair.now:
                    pair.do(name, pair.ends[name].tick(pair.now))


def test_a_slow_wire_is_slow_and_not_stuck() -> None:
    """Flaw: ten transfers share a wire on which a round of one payload each takes longer than their patience. Each
    asked again before its bytes came, so that what came was of an attempt given up, for ever.
    """
    pair = Pair(endpoint_limits(data_bytes_max=16))
    ids = [bytes([n]) * 16 for n in range(10)]
    for n, id_ in enumerate(ids):
        grant(pair, id_, count=4, at=4 * n)
        pull(pair, id_, count=4, lane=_core.Lane.STREAM, at=4 * n)
    wire = SlowWire(pair, 250 * MS)
    wire.step(pair.now + 120 * S)
    assert finals(pair) == [("COMMITTED", "ok")] * len(ids)
    assert wire.sent_blocks < 5 * 4 * len(ids)


def test_waking_never_turns_into_a_busy_loop(pair: Pair) -> None:
    """``advance`` asserts it after every tick; here with all kinds of deadlines at once, and no answer."""
    grant(pair, b"u" * 16, ttl_ns=700 * MS, at=8)
    pull(pair)
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"x", pair.now)[1])
    pair.pump()
    pair.advance(5 * S, lambda frame: 0)
    pair.cut_all()
    pair.advance(5 * S)
    pair.reachable = False
    pair.cut_all()
    pair.advance(30 * S)
    assert finals(pair) == [("FAILED", "peer_gone")]


def test_the_reason_that_a_source_gives_can_always_be_shown(pair: Pair) -> None:
    pull(pair)
    pair.pump()
    said = _core.ErrorFrame(ID, 1, _core.Code.refused, b"\xff\n" * 6)
    session = next(e.session for e in pair.take("b", _core.SessionUp))
    pair.do("b", pair.ends["b"].on_frame(session, said, pair.now))
    (final,) = pair.take("b", _core.TransferFinal)
    assert (final.code, final.text) == (_core.Code.refused, "?" * 12)
