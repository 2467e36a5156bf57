"""The quota of one peer in limits that all peers share, and how transfers spread over the sessions with one peer."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane, SessionKind
from kvxfer.testing.sim.virtual_clock import S
from tests.support.limits import endpoint_limits
from tests.support.machines.admissions import ADMISSIONS
from tests.support.machines.endpoint_pair import KEY, Pair
from tests.support.machines.region_pair import RegionPair

ID = b"t" * 16


def connected() -> tuple[Pair, int]:
    """A pair with a session; ``a``'s side of it."""
    pair = Pair()
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"x", pair.now)[1])
    pair.pump()
    return pair, next(session for name, session in pair.peer_session if name == "a")


def visit(end: Any, name: str, now: int, kind: str = "bearer") -> int:
    """``end``'s session with one more agent, which is admitted or was registered with the key that it would prove."""
    visitor = _core.Endpoint(_core.AgentRef(name, 1, name[:1].encode() * 16), _core.EndpointLimits())
    visitor.set_peer(end.agent, ADMISSIONS[kind].key(end.agent, visitor.agent), SessionKind.TCP)
    mine, hello = visitor.dialed(end.agent, SessionKind.TCP, b"1" * 32, now)
    session, _ = end.accepted(SessionKind.TCP, b"2" * 32, now)
    (accept,) = end.on_frame(session, hello[0].frame, now)
    prove = next(e for e in visitor.on_frame(mine, accept.frame, now) if isinstance(e, _core.SendFrame))
    end.on_frame(session, prove.frame, now)
    return int(session)


def host(limits: Any, kind: str = "bearer") -> Any:
    """An endpoint with region 9 that admits unregistered peers."""
    end = _core.Endpoint(_core.AgentRef("host", 1, b"h" * 16), limits)
    end.admit(ADMISSIONS[kind].admission)
    end.add_region(_core.RegionInfo(9, 256))
    return end


def push(id_: bytes) -> Any:
    return _core.Push(id_, Lane.STREAM, _core.WireList([(1, 0, 16, 16, 1)]), _core.WireList([(9, 0, 16, 16, 1)]))


def code_of(effects: list[Any]) -> str:
    answer = effects[0].frame
    return str(answer.code.name) if isinstance(answer, (_core.Done, _core.ErrorFrame)) else "taken"


@pytest.mark.parametrize("kind", ADMISSIONS)
def test_all_admitted_peers_share_one_quota(kind: str) -> None:
    """Flaw: a bearer peer chooses its name, and had a new quota under each."""
    end = host(endpoint_limits(grants_max=64, transfers_max=64), kind)
    codes: dict[str, list[str]] = {"push": [], "fetch": []}
    for n in range(20):
        session = visit(end, f"admitted{n}", 1, kind)
        codes["push"].append(code_of(end.on_frame(session, push(bytes([n]) * 16), 1)))
        pull = _core.Pull(bytes([100 + n]) * 16, 1, 5, Lane.STREAM, 0, 1, 0, bytes(32), 0)
        fetch = _core.Fetch(pull, _core.WireList([(9, 0, 16, 16, 1)]))
        codes["fetch"].append(code_of(end.on_frame(session, fetch, 1)))
    assert codes == {what: ["taken"] * 16 + ["overloaded"] * 4 for what in ("push", "fetch")}
    # a peer that was registered has a quota of its own
    named = _core.AgentRef("named", 1, b"n" * 16)
    end.set_peer(named, ADMISSIONS[kind].key(end.agent, named), SessionKind.TCP)
    assert code_of(end.on_frame(visit(end, "named", 1, kind), push(b"n" * 16), 1)) == "taken"


def test_ended_pushes_of_one_peer_push_out_no_other() -> None:
    """Flaw: a PUSH that came again after another peer's thousand was taken for a new one."""
    end = host(endpoint_limits(finished_max=64))
    sessions = {}
    for name in "cdefg":
        end.set_peer(_core.AgentRef(name, 1, name.encode() * 16), KEY, SessionKind.TCP)
        sessions[name] = visit(end, name, 1)

    def end_push(name: str, n: int) -> None:
        id_ = name.encode() * 15 + bytes([n])
        assert code_of(end.on_frame(sessions[name], push(id_), 1)) == "taken"
        end.on_frame(sessions[name], _core.ErrorFrame(id_, 1, Code.grant_expired, b"no"), 1)

    end_push("c", 0)
    for name in "defg":
        for n in range(100):
            end_push(name, n)
    assert code_of(end.on_frame(sessions["c"], push(b"c" * 15 + bytes([0])), 1)) == "grant_expired"
    assert code_of(end.on_frame(sessions["g"], push(b"g" * 15 + bytes([99])), 1)) == "grant_expired"
    assert code_of(end.on_frame(sessions["g"], push(b"g" * 15 + bytes([0])), 1)) == "taken"


def test_waiting_pulls_of_one_peer() -> None:
    limits = _core.GrantLimits()
    limits.waiting_max = 100
    table = _core.GrantTable(limits)
    peers = [_core.AgentRef(name, 1, name.encode() * 16) for name in "cd"]
    answers: dict[str, list[Any]] = {"c": [], "d": []}
    for n in range(30):
        for peer in peers:
            pull = _core.Pull(bytes([n]) * 15 + peer.agent_id.encode(), 1, 1, Lane.STREAM, 0, 1, 16, bytes(32), 1000)
            answers[peer.agent_id] += table.on_pull(1, peer, pull, 1)
    assert table.counts().waiting_pulls == 50
    told = [e.frame for e in answers["c"]]
    assert [frame.code for frame in told if not isinstance(frame, _core.Queued)] == [Code.overloaded] * 5
    table.session_closed(1, 1)  # what is kept of readers that may come back takes no room from others
    [queued] = table.on_pull(1, peers[0], _core.Pull(ID, 1, 1, Lane.STREAM, 0, 1, 16, bytes(32), 1000), 1)
    assert isinstance(queued.frame, _core.Queued)
    assert table.counts().waiting_pulls == 26


def test_sessions_of_one_peer() -> None:
    pair = Pair(endpoint_limits(sessions_max=64))
    a = pair.ends["a"]
    for _ in range(20):
        mine, effects = pair.ends["b"].dialed(pair.refs["a"], SessionKind.MEMORY, b"1" * 32, pair.now)
        theirs, accepted = a.accepted(SessionKind.MEMORY, b"2" * 32, pair.now)
        pair.peer_session["b", mine], pair.peer_session["a", theirs] = ("a", theirs), ("b", mine)
        pair.do("b", effects)
        pair.do("a", accepted)
        pair.pump()
    assert a.counts().sessions_up == 16
    assert [e.code for e in pair.take("a", _core.Hangup)] == [Code.overloaded] * 4


def test_connections_that_prove_nothing() -> None:
    pair = Pair(endpoint_limits(sessions_max=64))
    accepted, hung_up = [], []
    for _ in range(20):
        session, effects = pair.ends["a"].accepted(SessionKind.TCP, b"2" * 32, pair.now)
        accepted.append(session)
        hung_up += effects
    assert pair.ends["a"].counts().sessions_opening == 16
    assert [(e.session, e.code) for e in hung_up] == [(session, Code.overloaded) for session in accepted[:4]]
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"hello", pair.now)[1])
    pair.pump()
    assert [e.payload for e in pair.take("a", _core.NotifReceived)] == [b"hello"], "they kept others out"
    pair.now += 2 * S
    pair.do("a", pair.ends["a"].tick(pair.now))
    assert pair.ends["a"].counts().sessions_opening == 0
    assert pair.ends["a"].accepted(SessionKind.TCP, b"2" * 32, pair.now)[1] == []


def test_releases_of_unknown_grants_evict_only_each_other() -> None:
    limits = _core.GrantLimits()
    limits.tombstones_max = 8
    table = _core.GrantTable(limits)
    ledger = _core.Ledger(_core.PoolInfo(1, 8, 16, bytes(32), True))
    peer = _core.AgentRef("c", 1, b"c" * 16)
    table.grant(ID, ledger, [0], "c", S, 1)
    table.end(ID, _core.GrantEvent.REVOKE, 1)
    for n in range(100):
        table.on_release(peer, bytes([n]) * 16, 1)
    assert table.state(ID, 1) == _core.GrantState.REVOKED
    assert table.state(b"\x63" * 16, 1) == _core.GrantState.RELEASED
    assert table.state(b"\x00" * 16, 1) is None


def test_fetches_push_out_no_tombstone_of_a_grant_of_blocks() -> None:
    limits = endpoint_limits(tombstones_max=8)
    pair = RegionPair(limits)
    pair.add_region("a", 7, bytes(256))
    pair.add_region("b", 9, bytes(256))
    a = pair.ends["a"]
    pair.do("a", a.grant(ID, 1, [0], "b", 10 * S, 1, pair.now))
    pair.do("a", a.end_grant(ID, _core.GrantEvent.REVOKE, pair.now)[1])
    for n in range(50):
        pair.post("b", "fetch", bytes([n]) * 16, [(9, 0, 16, 16, 1)], [(7, 0, 16, 16, 1)])
        pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")] * 50
    assert a.grant_state(ID, pair.now) == _core.GrantState.REVOKED


class StripedPair(RegionPair):
    def __init__(self, stripes: int) -> None:
        super().__init__(endpoint_limits(stripes=stripes))
        for name in "ab":
            self.ends[name].set_peer(self.refs[self.other(name)], KEY, SessionKind.TCP)
        self.add_region("a", 7, bytes(256))
        self.add_region("b", 9, bytes(256))

    def fetch(self, n: int, lane: Any) -> None:
        self.post("b", "fetch", bytes([n]) * 16, [(9, 0, 16, 16, 1)], [(7, 0, 16, 16, 1)], lanes=[lane])
        self.pump()


def test_transfers_spread_over_stripes() -> None:
    pair = StripedPair(3)
    for n in range(9):
        pair.fetch(n, Lane.STREAM)
    sessions = [effect.session for effect in pair.take("a", _core.SendData)]
    assert pair.ends["b"].counts().sessions_up == 3
    assert sorted(sessions.count(session) for session in set(sessions)) == [3, 3, 3]


def test_one_at_a_time_needs_one_session() -> None:
    pair = StripedPair(3)
    for n in range(5):
        pair.fetch(n, Lane.STREAM)
        pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")] * 5
    assert pair.ends["b"].counts().sessions_up == 1


def test_one_sided_lanes_have_one_session() -> None:
    pair = StripedPair(3)
    for n in range(9):
        pair.fetch(n, Lane.UCX)
    assert pair.ends["b"].counts().sessions_up == 1
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")] * 9


def test_a_lost_stripe_moves_its_transfers() -> None:
    pair = StripedPair(2)
    for n in range(4):
        pair.fetch(n, Lane.STREAM)
    session = next(session for name, session in pair.peer_session if name == "b")
    pair.cut("b", session)
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")] * 4
