"""Bearer peers: unregistered peers that hold this agent's metadata and prove it by its key."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane
from kvxfer.errors import PeerGoneError
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.region_pair import RegionPair

ID = b"t" * 16
BEARER_KEY = b"g" * 32
OWN_KEY = b"n" * 32
DATA = bytes(range(256))


class BearerPair(RegionPair):
    """``b`` knows ``a`` by its bearer key; ``a`` knows no peer."""

    def introduce(self, name: str) -> None:
        if name == "b":
            self.ends["b"].set_peer(self.refs["a"], BEARER_KEY, _core.SessionKind.MEMORY)
        else:
            self.ends["a"].accept_bearer_key(BEARER_KEY)


def ready_pair() -> BearerPair:
    pair = BearerPair()
    pair.add_region("a", 7, DATA)
    pair.add_region("b", 9, bytes(256))
    return pair


def arrive(pair: BearerPair) -> int:
    """The bearer peer dials; ``a``'s session with it."""
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"hello", pair.now)[1])
    pair.run()
    assert pair.ends["a"].knows(pair.refs["b"])
    return next(session for name, session in pair.peer_session if name == "a")


def test_reads_writes_and_notifies_both_ways() -> None:
    pair = ready_pair()
    pair.post("b", "fetch", ID, [(9, 0, 16, 16, 1)], [(7, 0, 16, 16, 1)])
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]
    pair.post("b", "push", b"u" * 16, [(9, 0, 16, 16, 1)], [(7, 32, 16, 16, 1)], notification=b"n")
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]
    assert pair.memory["a"][7][32:48] == DATA[:16]
    assert [e.payload for e in pair.take("a", _core.NotifReceived)] == [b"n"]
    # and the host of a bearer peer may do the same, over the session that the bearer peer opened
    pair.post("a", "push", b"v" * 16, [(7, 64, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.post("a", "fetch", b"w" * 16, [(7, 0, 16, 16, 1)], [(9, 16, 16, 16, 1)])
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")] * 2
    pair.do("a", pair.ends["a"].notify(pair.refs["b"], b"back", pair.now)[1])
    pair.run()
    assert [e.payload for e in pair.take("b", _core.NotifReceived)] == [b"back"]


def test_a_lane_of_another_kind_of_session_is_passed_over() -> None:
    """No agent knows an address of a bearer peer."""
    pair = ready_pair()
    arrive(pair)
    pair.post("a", "push", ID, [(7, 64, 16, 16, 1)], [(9, 0, 16, 16, 1)], lanes=[Lane.CMA, Lane.STREAM, Lane.MEMORY])
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state.name, final.lane) == ("COMMITTED", Lane.MEMORY)
    assert "bearer" in final.lane_notes


def test_an_idle_bearer_peer_is_forgotten_with_its_last_session() -> None:
    pair = ready_pair()
    session = arrive(pair)
    pair.do("a", pair.ends["a"].accepted(_core.SessionKind.MEMORY, b"3" * 32, pair.now)[1])
    pair.post("a", "push", ID, [(7, 64, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.cut("a", session)
    assert not pair.ends["a"].knows(pair.refs["b"])
    assert pair.finals("a") == [("FAILED", "peer_gone")]
    assert pair.ends["a"].counts().peers == 0


def amid(op: str) -> BearerPair:
    """The bearer peer reads or writes eight elements; two of them are in place."""
    pair = BearerPair(endpoint_limits(read_bytes_max=32, data_bytes_max=32))
    pair.add_region("a", 7, DATA)
    pair.add_region("b", 9, DATA[::-1])
    pair.post("b", op, ID, [(9, 0, 16, 16, 8)], [(7, 0, 16, 16, 8)], lanes=[Lane.STREAM], notification=b"n")
    pair.pump()
    assert pair.perform("a") ^ pair.perform("b")
    return pair


@pytest.mark.parametrize("op", ["fetch", "push"])
def test_bearer_peers_transfers_outlive_its_session(op: str) -> None:
    """Flaw: its grants and its writes ended with the session, and it had to begin anew."""
    pair = amid(op)
    pair.cut_all()
    pulls: list[Any] = []

    def note(frame: Any) -> int:
        pull = frame.pull if isinstance(frame, _core.Fetch) else frame
        if isinstance(pull, _core.Pull):
            pulls.append((pull.first, pull.count))
        return 1

    pair.advance(500 * MS, note)
    pair.pump(note)
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]
    assert pulls == [(2, 6)]
    assert [e.payload for e in pair.take("a", _core.NotifReceived)] == [b"n"]
    assert pair.memory["a"][7][:128] == pair.memory["b"][9][:128]
    pair.cut_all()
    assert pair.ends["a"].counts().peers == 0


@pytest.mark.parametrize("op", ["fetch", "push"])
def test_a_bearer_peer_that_stays_away_is_forgotten(op: str) -> None:
    pair = amid(op)
    a = pair.ends["a"]
    pair.do("a", a.notify(pair.refs["b"], b"are you there", pair.now)[1])
    pair.reachable = False
    pair.cut_all()
    assert [e.code for e in pair.take("a", _core.NotifFailed)] == [Code.peer_gone]
    with pytest.raises(PeerGoneError):
        pair.post("a", "push", b"u" * 16, [(7, 64, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    with pytest.raises(PeerGoneError):
        a.notify(pair.refs["b"], b"and now", pair.now)
    pair.advance(4 * S)
    assert a.knows(pair.refs["b"])
    assert pair.finals("b") == [("FAILED", "peer_gone")]
    pair.advance(7 * S)
    counts = a.counts()
    assert (counts.peers, counts.grants.alive, counts.transfers_live, counts.notifications_pending) == (0, 0, 0, 0)
    assert [e.code for e in pair.take("a", _core.OfferEnded)] == ([Code.peer_gone] if op == "push" else [])
    assert pair.remove_region("a", 7)


def test_peer_that_reuses_a_bearer_peers_name_gets_no_answer_of_it() -> None:
    """An answer with the id of a bearer peer's write goes only to the session that asked for that write."""
    pair = amid("push")
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


def test_many_bearer_peers_that_left_are_not_kept() -> None:
    """Each had something under way; the first that left goes first, and all of them once their time is over."""
    pair = BearerPair(endpoint_limits(sessions_max=64))
    pair.add_region("a", 7, DATA)
    a, count = pair.ends["a"], 40
    for i in range(count):
        bearer = _core.AgentRef(f"g{i}", 1, bytes([i]) * 16)
        end = _core.Endpoint(bearer, _core.EndpointLimits())
        end.set_peer(pair.refs["a"], BEARER_KEY, _core.SessionKind.MEMORY)
        theirs, hello = end.dialed(pair.refs["a"], _core.SessionKind.MEMORY, b"1" * 32, pair.now)
        mine, _ = a.accepted(_core.SessionKind.MEMORY, b"2" * 32, pair.now)
        said = [effect.frame for effect in hello]
        while said:
            answers = [e.frame for frame in said for e in a.on_frame(mine, frame, pair.now) if hasattr(e, "frame")]
            said = [e.frame for frame in answers for e in end.on_frame(theirs, frame, pair.now) if hasattr(e, "frame")]
        pull = _core.Pull(bytes([i]) * 16, 1, 5, Lane.MEMORY, 0, 1, 16, b"d" * 32, 0)
        pair.do("a", a.on_frame(mine, _core.Fetch(pull, _core.WireList([(7, 0, 16, 16, 1)])), pair.now))
        pair.do("a", a.closed(mine, pair.now))
    kept = a.counts().peers
    assert 0 < kept < count
    assert not a.knows(_core.AgentRef("g0", 1, bytes(16)))
    assert a.knows(bearer)
    assert a.counts().grants.alive == kept
    pair.advance(11 * S)
    assert (a.counts().peers, a.counts().grants.alive) == (0, 0)


def test_a_bearer_peer_that_is_named_while_it_is_away_stays() -> None:
    pair = amid("fetch")
    pair.reachable = False
    pair.cut_all()
    pair.ends["a"].set_peer(pair.refs["b"], OWN_KEY, _core.SessionKind.MEMORY)
    pair.advance(60 * S)
    assert pair.ends["a"].knows(pair.refs["b"])


def test_peer_with_a_wrong_bearer_key_is_refused() -> None:
    pair = ready_pair()
    pair.ends["a"].accept_bearer_key(b"x" * 32)
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"hello", pair.now)[1])
    pair.run()
    assert not pair.ends["a"].knows(pair.refs["b"])
    assert pair.take("a", _core.NotifReceived) == []
    assert [e.code for e in pair.take("b", _core.Hangup)] == [Code.unauthenticated]


def test_two_that_hold_each_others_metadata_dial_each_other() -> None:
    """Each names the other with the other's key; the dialer proves the key of the agent that it dials."""
    pair = ready_pair()
    pair.ends["b"].accept_bearer_key(b"n" * 32)
    pair.ends["a"].set_peer(pair.refs["b"], b"n" * 32, _core.SessionKind.MEMORY)
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"hello", pair.now)[1])
    pair.run()
    assert [event.payload for event in pair.take("a", _core.NotifReceived)] == [b"hello"]
    pair.cut("a", pair.take("a", _core.SessionUp)[0].session)
    pair.do("a", pair.ends["a"].notify(pair.refs["b"], b"and you", pair.now)[1])
    pair.run()
    assert [event.payload for event in pair.take("b", _core.NotifReceived)] == [b"and you"]


def test_a_name_opens_no_grant() -> None:
    """A grant of blocks names its reader; a bearer peer may call itself what it likes."""
    pair = ready_pair()
    a = pair.ends["a"]
    pair.do("a", a.grant(ID, 1, [0, 1], "b", 10 * S, 2, pair.now))
    session = arrive(pair)
    pull = _core.Pull(ID, 1, 5, Lane.MEMORY, 0, 2, 16, b"d" * 32, 0)
    (answer,) = a.on_frame(session, pull, pair.now)
    assert answer.frame.code == Code.refused
    assert a.counts().grants.refused == 1
    assert a.on_frame(session, _core.Release(ID), pair.now) == []
    assert a.grant_state(ID, pair.now) == _core.GrantState.ALIVE
    waiting: Any = _core.Pull(b"n" * 16, 1, 5, Lane.MEMORY, 0, 2, 16, b"d" * 32, 1000)
    (answer,) = a.on_frame(session, waiting, pair.now)
    assert answer.frame.code == Code.refused
    assert a.counts().grants.waiting_pulls == 0


def claimed_pair() -> BearerPair:
    """``a`` named an agent ``b`` whose own key is another: the ``b`` here only holds ``a``'s metadata, and its name."""
    pair = ready_pair()
    pair.ends["a"].set_peer(pair.refs["b"], OWN_KEY, _core.SessionKind.MEMORY)
    return pair


def test_a_claimed_name_gets_nothing_that_was_posted_to_it() -> None:
    """Flaw: a session proven by the bearer key carried what was for the named peer."""
    pair = claimed_pair()
    a = pair.ends["a"]
    pair.reachable = False
    pair.do("a", a.notify(pair.refs["b"], b"secret", pair.now)[1])
    pair.post("a", "push", ID, [(7, 0, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.post("a", "fetch", b"u" * 16, [(7, 0, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.reachable = True
    session = arrive(pair)
    assert [event.payload for event in pair.take("a", _core.NotifReceived)] == [b"hello"]
    pair.do("a", a.notify(pair.refs["b"], b"secret too", pair.now)[1])
    pair.run()
    assert a.on_frame(session, _core.Notif(_core.NotifKind.ACK, 2, 0, b""), pair.now) == []
    pair.advance(10 * S)
    assert a.counts().notifications_pending == 2
    assert pair.take("a", _core.NotifDelivered) == pair.take("b", _core.NotifReceived) == []
    assert pair.finals("a") == [("FAILED", "unauthenticated")] * 2
    assert pair.memory["b"][9] == bytes(256)


def test_a_claimed_name_opens_no_grant() -> None:
    pair = claimed_pair()
    a = pair.ends["a"]
    pair.do("a", a.grant(ID, 1, [0, 1], "b", 10 * S, 2, pair.now))
    session = arrive(pair)
    for wait_ms, id_ in ((0, ID), (1000, b"n" * 16)):
        pull = _core.Pull(id_, 1, 5, Lane.MEMORY, 0, 2, 16, b"d" * 32, wait_ms)
        (answer,) = a.on_frame(session, pull, pair.now)
        assert answer.frame.code == Code.refused
    assert a.on_frame(session, _core.Release(ID), pair.now) == []
    assert a.grant_state(ID, pair.now) == _core.GrantState.ALIVE
    assert a.counts().grants.waiting_pulls == 0


def mutual_pair() -> BearerPair:
    """Each holds the other's metadata."""
    pair = claimed_pair()
    pair.ends["b"].accept_bearer_key(OWN_KEY)
    return pair


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
