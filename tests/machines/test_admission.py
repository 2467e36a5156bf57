"""Unregistered peers that prove what the admission asks for: what holds for every kind of it, and for derived keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane
from kvxfer.errors import InvalidArgumentError, PeerGoneError
from kvxfer.protocol.handshake import session_key
from kvxfer.testing.sim.virtual_clock import MS, S
from kvxfer.transport.base import read_ref
from tests.support.machines.admissions import ADMISSIONS, AdmittingPair, amid, ready_pair

ID = b"t" * 16
OWN_KEY = b"n" * 32
DATA = bytes(range(256))


@pytest.fixture(params=ADMISSIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_admitted_peer_reads_writes_and_notifies_both_ways(kind: str) -> None:
    pair = ready_pair(kind)
    pair.post("b", "fetch", ID, [(9, 0, 16, 16, 1)], [(7, 0, 16, 16, 1)])
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]
    assert [event.peer for event in pair.take("a", _core.SessionUp)] == [pair.refs["b"]]
    pair.post("b", "push", b"u" * 16, [(9, 0, 16, 16, 1)], [(7, 32, 16, 16, 1)], notification=b"n")
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]
    assert pair.memory["a"][7][32:48] == DATA[:16]
    assert [e.payload for e in pair.take("a", _core.NotifReceived)] == [b"n"]
    # and the agent that admitted it may do the same, over the session that the peer opened
    pair.post("a", "push", b"v" * 16, [(7, 64, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.post("a", "fetch", b"w" * 16, [(7, 0, 16, 16, 1)], [(9, 16, 16, 16, 1)])
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")] * 2
    pair.do("a", pair.ends["a"].notify(pair.refs["b"], b"back", pair.now)[1])
    pair.run()
    assert [e.payload for e in pair.take("b", _core.NotifReceived)] == [b"back"]


def test_a_lane_of_another_kind_of_session_is_passed_over(kind: str) -> None:
    """No agent knows an address of an unregistered peer."""
    pair = ready_pair(kind)
    pair.meet()
    pair.post("a", "push", ID, [(7, 64, 16, 16, 1)], [(9, 0, 16, 16, 1)], lanes=[Lane.CMA, Lane.STREAM, Lane.MEMORY])
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state.name, final.lane) == ("COMMITTED", Lane.MEMORY)
    assert "unregistered" in final.lane_notes


def test_an_idle_peer_is_forgotten_with_its_last_session_and_may_come_again(kind: str) -> None:
    pair = ready_pair(kind)
    session = pair.meet()
    pair.do("a", pair.ends["a"].accepted(_core.SessionKind.MEMORY, b"3" * 32, pair.now)[1])
    pair.post("a", "push", ID, [(7, 64, 16, 16, 1)], [(9, 0, 16, 16, 1)])
    pair.cut("a", session)
    assert not pair.ends["a"].knows(pair.refs["b"])
    assert pair.finals("a") == [("FAILED", "peer_gone")]
    assert pair.ends["a"].counts().peers == 0
    pair.take("a", _core.NotifReceived)
    assert pair.greet() == [b"hello"], "and what it said before is not heard again"


@pytest.mark.parametrize("op", ["fetch", "push"])
def test_transfers_of_a_peer_outlive_its_session(kind: str, op: str) -> None:
    """Flaw: its grants and its writes ended with the session, and it had to begin anew."""
    pair = amid(kind, op)
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
def test_a_peer_that_stays_away_is_forgotten(kind: str, op: str) -> None:
    pair = amid(kind, op)
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


def test_many_peers_that_left_are_not_kept(kind: str) -> None:
    """Each had something under way; the first that left goes first, and all of them once their time is over."""
    limits = _core.EndpointLimits()
    limits.sessions_max = 64
    pair = AdmittingPair(kind, limits)
    pair.add_region("a", 7, DATA)
    a, count = pair.ends["a"], 40
    for i in range(count):
        peer = _core.AgentRef(f"g{i}", 1, bytes([i]) * 16)
        end = _core.Endpoint(peer, _core.EndpointLimits())
        end.set_peer(pair.refs["a"], pair.kind.key(pair.refs["a"], peer), _core.SessionKind.MEMORY)
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
    assert a.knows(peer)
    assert a.counts().grants.alive == kept
    pair.advance(11 * S)
    assert (a.counts().peers, a.counts().grants.alive) == (0, 0)


def test_a_peer_that_is_registered_while_it_is_away_stays(kind: str) -> None:
    pair = amid(kind, "fetch")
    pair.reachable = False
    pair.cut_all()
    pair.ends["a"].set_peer(pair.refs["b"], OWN_KEY, _core.SessionKind.MEMORY)
    pair.advance(60 * S)
    assert pair.ends["a"].knows(pair.refs["b"])


def test_a_peer_that_is_registered_stays_after_its_last_session(kind: str) -> None:
    """What agent discovery does when it hears of the session."""
    pair = ready_pair(kind)
    session = pair.meet()
    key = pair.kind.key(pair.refs["a"], pair.refs["b"])
    pair.ends["a"].set_peer(pair.refs["b"], key, _core.SessionKind.MEMORY)
    pair.cut("a", session)
    assert pair.ends["a"].knows(pair.refs["b"])


def test_a_peer_with_another_secret_is_refused(kind: str) -> None:
    pair = ready_pair(kind)
    pair.ends["a"].admit(pair.kind.other)
    assert pair.greet() == []
    assert not pair.ends["a"].knows(pair.refs["b"])
    assert [e.code for e in pair.take("b", _core.Hangup)] == [Code.unauthenticated]


def test_kinds_exclude_each_other(kind: str) -> None:
    """And the refused one changes nothing."""
    pair = AdmittingPair(kind)
    pair.ends["a"].admit(pair.kind.admission)
    for other in ADMISSIONS.keys() - {kind}:
        with pytest.raises(InvalidArgumentError):
            pair.ends["a"].admit(ADMISSIONS[other].admission)
    assert pair.greet() == [b"hello"]


# --- derived keys prove a name ---


def test_derived_key_opens_what_was_granted_to_the_name() -> None:
    pair = AdmittingPair("derived")
    pair.meet()
    pair.do("a", pair.ends["a"].grant(ID, 1, [3], reader="b", ttl_ns=S, ready_blocks=1, now_ns=pair.now))
    pair.do("b", pair.ends["b"].pull(ID, pair.refs["a"], 1, [5], 0, [Lane.MEMORY], pair.now + S, 1, pair.now))
    pair.pump()
    assert len(pair.take("b", _core.ReadBlocks)) == 1


def test_pull_of_an_admitted_peer_goes_on_waiting_after_its_session() -> None:
    pair = AdmittingPair("derived")
    session = pair.meet()
    pull: Any = _core.Pull(ID, 1, 5, Lane.MEMORY, 0, 2, 16, b"d" * 32, 60_000)
    pair.do("a", pair.ends["a"].on_frame(session, pull, pair.now))
    pair.reachable = False
    pair.cut_all()
    assert pair.ends["a"].knows(pair.refs["b"])
    assert pair.ends["a"].counts().grants.waiting_pulls == 1
    pair.advance(11 * S)
    assert (pair.ends["a"].counts().peers, pair.ends["a"].counts().grants.waiting_pulls) == (0, 0)


def test_registered_peer_does_not_prove_a_derived_key() -> None:
    """An incarnation that is known to be dead is kept out by a key that no process has."""
    pair = AdmittingPair("derived")
    pair.ends["a"].set_peer(pair.refs["b"], OWN_KEY, _core.SessionKind.MEMORY)
    assert pair.greet() == []
    assert [e.code for e in pair.take("b", _core.Hangup)] == [Code.unauthenticated]


refs = st.builds(
    _core.AgentRef,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.integers(0, (1 << 64) - 1),
    st.binary(min_size=16, max_size=16),
)


@given(refs, refs, st.binary(min_size=32, max_size=32))
def test_the_core_derives_the_keys_that_python_does(ours: Any, theirs: Any, root: bytes) -> None:
    if ours == theirs:
        return
    end = _core.Endpoint(ours, _core.EndpointLimits())
    end.admit(_core.PeerAdmission.derived_keys(root))
    dialer = _core.Endpoint(theirs, _core.EndpointLimits())
    dialer.set_peer(ours, session_key(root, read_ref(ours), read_ref(theirs)), _core.SessionKind.TCP)
    mine, (hello,) = dialer.dialed(ours, _core.SessionKind.TCP, b"1" * 32, 1)
    other, _ = end.accepted(_core.SessionKind.TCP, b"2" * 32, 1)
    (accept,) = end.on_frame(other, hello.frame, 1)
    prove = dialer.on_frame(mine, accept.frame, 1)[0]
    end.on_frame(other, prove.frame, 1)
    assert end.is_connected(theirs)
