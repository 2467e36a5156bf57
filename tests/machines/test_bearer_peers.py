"""Bearer peers hold this agent's metadata and prove it by its key, which shows no name. test_admission.py has what all
kinds of admission have in common."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.machines.admissions import AdmittingPair, amid, ready_pair

ID = b"t" * 16
OWN_KEY = b"n" * 32
DATA = bytes(range(256))


def claimed_pair() -> AdmittingPair:
    """``a`` named an agent ``b`` whose own key is another: the ``b`` here only holds ``a``'s metadata, and its name."""
    pair = ready_pair("bearer")
    pair.ends["a"].set_peer(pair.refs["b"], OWN_KEY, _core.SessionKind.MEMORY)
    return pair


def mutual_pair() -> AdmittingPair:
    """Each holds the other's metadata."""
    pair = claimed_pair()
    pair.ends["b"].admit(_core.PeerAdmission.bearer_key(OWN_KEY))
    return pair


def test_peer_that_reuses_a_bearer_peers_name_gets_no_answer_of_it() -> None:
    """An answer with the id of a bearer peer's write goes only to the session that asked for that write."""
    pair = amid("bearer", "push")
    pair.reachable = False
    pair.cut_all()
    pair.do("b", pair.ends["b"].cancel(ID, pair.now))
    pair.reachable = True
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"another", pair.now)[1])
    pair.pump(lambda frame: not isinstance(frame, _core.Revoke))
    assert pair.ends["a"].is_connected(pair.refs["b"])
    is_gone, effects = pair.ends["a"].remove_region(7, pair.now)
    assert is_gone
    assert not any(isinstance(effect, _core.SendFrame) for effect in effects)
    pair.do("a", effects)
    assert [e.code for e in pair.take("a", _core.OfferEnded)] == [Code.grant_revoked]


def test_two_that_hold_each_others_metadata_dial_each_other() -> None:
    """Each names the other with the other's key; the dialer proves the key of the agent that it dials."""
    pair = mutual_pair()
    assert pair.greet() == [b"hello"]
    pair.cut("a", pair.take("a", _core.SessionUp)[0].session)
    pair.do("a", pair.ends["a"].notify(pair.refs["b"], b"and you", pair.now)[1])
    pair.run()
    assert [event.payload for event in pair.take("b", _core.NotifReceived)] == [b"and you"]


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_name_opens_no_grant(is_registered: bool) -> None:
    """A grant of blocks names its reader; a bearer peer may call itself what it likes."""
    pair = claimed_pair() if is_registered else ready_pair("bearer")
    a = pair.ends["a"]
    pair.do("a", a.grant(ID, 1, [0, 1], "b", 10 * S, 2, pair.now))
    session = pair.meet()
    for count, wait_ms, id_ in ((1, 0, ID), (2, 1000, b"n" * 16)):
        pull = _core.Pull(id_, 1, 5, Lane.MEMORY, 0, 2, 16, b"d" * 32, wait_ms)
        (answer,) = a.on_frame(session, pull, pair.now)
        assert answer.frame.code == Code.refused
        assert a.counts().grants.refused == count
    assert a.on_frame(session, _core.Release(ID), pair.now) == []
    assert a.grant_state(ID, pair.now) == _core.GrantState.ALIVE
    assert a.counts().grants.waiting_pulls == 0


def test_a_claimed_name_gets_nothing_that_was_posted_to_it() -> None:
    """Flaw: a session proven by the bearer key carried what was for the named peer."""
    pair = claimed_pair()
    a = pair.ends["a"]
    pair.reachable = False
    pair.do("a", a.notify(pair.refs["b"], b"secret", pair.now)[1])
    pair.post("a", "push", ID, [(7, 0, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.post("a", "fetch", b"u" * 16, [(7, 0, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.reachable = True
    session = pair.meet()
    assert [event.payload for event in pair.take("a", _core.NotifReceived)] == [b"hello"]
    pair.do("a", a.notify(pair.refs["b"], b"secret too", pair.now)[1])
    pair.run()
    assert a.on_frame(session, _core.Notif(_core.NotifKind.ACK, 2, 0, b""), pair.now) == []
    pair.advance(10 * S)
    assert a.counts().notifications_pending == 2
    assert pair.take("a", _core.NotifDelivered) == pair.take("b", _core.NotifReceived) == []
    assert pair.finals("a") == [("FAILED", "unauthenticated")] * 2
    assert pair.memory["b"][9] == bytes(256)


def test_two_that_named_each_other_post_both_ways() -> None:
    pair = mutual_pair()
    for name, here, there in (("b", 9, 7), ("a", 7, 9)):
        pair.post(name, "fetch", name.encode() * 16, [(here, 0, 16, 16, 1)], [(there, 16, 16, 16, 1)])
        pair.run()
        rows = [(here, 32, 16, 16, 1)], [(there, 48, 16, 16, 1)]
        pair.post(name, "push", name.upper().encode() * 16, *rows, notification=name.encode())
        pair.do(name, pair.ends[name].notify(pair.refs[pair.other(name)], b"and", pair.now)[1])
        pair.run()
        assert pair.finals(name) == [("COMMITTED", "ok")] * 2
        assert {e.payload for e in pair.take(pair.other(name), _core.NotifReceived)} == {name.encode(), b"and"}
    assert [pair.ends[name].counts().sessions_up for name in "ab"] == [2, 2]


def test_a_push_goes_on_where_its_push_came_again() -> None:
    """And on no other session under that name, which anybody may have opened."""
    pair = mutual_pair()
    pair.post("a", "push", ID, [(7, 0, 16, 16, 2)], [(9, 0, 16, 16, 2)], lanes=[Lane.MEMORY])
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    pair.cut_all()
    pair.do("b", pair.ends["b"].read_stopped(read.id, read.token, Code.transport, "cut", pair.now))
    frames: list[Any] = []

    def lose_push(frame: Any) -> int:
        frames.append(frame)
        return not isinstance(frame, _core.Push)

    pair.advance(500 * MS, lose_push)
    assert any(isinstance(frame, _core.Push) for frame in frames)
    assert not any(isinstance(frame, _core.Pull) for frame in frames)
    pair.advance(2 * S)
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")]
    assert pair.memory["b"][9][:32] == DATA[:32]
