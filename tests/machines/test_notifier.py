"""Notifications through two endpoints on a wire that loses and doubles frames and connections, with lives that end or
are only thought to have ended: once, in order, and never called delivered when they are not.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvxfer._native import _core
from kvxfer.errors import InvalidArgument, LimitExceeded
from kvxfer.testing.clock import MS, S
from kvxfer.testing.pair import KEY, Pair


def test_delivered_once_in_order() -> None:
    pair = Pair()
    for n in range(3):
        _, effects = pair.ends["a"].notify(pair.refs["b"], bytes([n]), pair.now)
        pair.do("a", effects)
    pair.pump(lambda frame: 1 if isinstance(frame, _core.Hello) else 2)
    assert [(e.seq, e.payload) for e in pair.take("b", _core.NotifReceived)] == [(1, b"\0"), (2, b"\1"), (3, b"\2")]
    assert [e.seq for e in pair.take("a", _core.NotifDelivered)] == [1, 2, 3]
    assert pair.ends["a"].counts().notifications_pending == 0


def test_failed_when_the_life_ended() -> None:
    pair = Pair()
    pair.reachable = False
    _, effects = pair.ends["a"].notify(pair.refs["b"], b"x", pair.now)
    pair.do("a", effects)
    pair.do("a", pair.ends["a"].peer_dead(pair.refs["b"], pair.now))
    assert [(e.seq, e.code) for e in pair.take("a", _core.NotifFailed)] == [(1, _core.Code.peer_gone)]


@pytest.mark.parametrize("mourner", ["a", "b"])
def test_a_life_that_comes_back_is_not_answered_for_the_old(mourner: str) -> None:
    """Whoever thought the other dead: numbers go on, and what comes after is delivered."""
    pair = Pair()
    a, b = pair.ends["a"], pair.ends["b"]
    for payload in (b"1", b"2"):
        pair.do("a", a.notify(pair.refs["b"], payload, pair.now)[1])
    pair.pump()
    pair.cut_all()
    pair.reachable = False
    pair.do("a", a.notify(pair.refs["b"], b"3", pair.now)[1])
    pair.do(mourner, pair.ends[mourner].peer_dead(pair.refs[pair.other(mourner)], pair.now))
    pair.introduce(mourner)
    pair.reachable = True
    seq, effects = a.notify(pair.refs["b"], b"4", pair.now)
    pair.do("a", effects)
    pair.advance(3 * S)
    assert seq == 4
    received = [(e.seq, e.payload) for e in pair.take("b", _core.NotifReceived)]
    expected = [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")]
    assert received == [pair_ for pair_ in expected if mourner == "b" or pair_[0] != 3]
    assert [e.seq for e in pair.take("a", _core.NotifFailed)] == ([3] if mourner == "a" else [])
    assert [e.seq for e in pair.take("a", _core.NotifDelivered)] == [seq for seq, _ in received]
    assert b.counts().peers == 1


DEATHS_KEPT = 4096
"""Of how many lives the numbers are kept that were called dead, and not dealt with since."""


@pytest.mark.parametrize("is_used", [False, True], ids=["known", "used"])
@pytest.mark.parametrize("mourner", ["a", "b"])
def test_a_life_that_came_back_is_not_forgotten_for_others(mourner: str, is_used: bool) -> None:
    """Nor does what is said to it, or by it, begin at 1 again when many others have died meanwhile."""
    pair = Pair()
    a = pair.ends["a"]
    mourning = pair.ends[mourner]
    for payload in (b"1", b"2"):
        pair.do("a", a.notify(pair.refs["b"], payload, pair.now)[1])
    pair.pump()
    pair.do(mourner, mourning.peer_dead(pair.refs[pair.other(mourner)], pair.now))
    pair.introduce(mourner)
    payloads = [b"1", b"2", *([b"3"] if is_used else []), b"last"]
    if is_used:
        pair.do("a", a.notify(pair.refs["b"], b"3", pair.now)[1])
        pair.pump()
    let_die(mourning, pair.now)
    seq, effects = a.notify(pair.refs["b"], b"last", pair.now)
    pair.do("a", effects)
    pair.advance(3 * S)
    assert seq == len(payloads)
    assert [e.payload for e in pair.take("b", _core.NotifReceived)] == payloads
    assert [e.seq for e in pair.take("a", _core.NotifDelivered)] == list(range(1, seq + 1))


def let_die(mourning: _core.Endpoint, now: int) -> None:
    """So many others that the longest dead of all is forgotten."""
    for number in range(DEATHS_KEPT + 1):
        other = _core.AgentRef(f"other-{number}", 1, bytes(16))
        mourning.set_peer(other, KEY, _core.SessionKind.MEMORY)
        mourning.notify(other, b"x", now)
        mourning.peer_dead(other, now)


def test_numbers_that_were_forgotten_are_not_taken_for_delivered() -> None:
    """Whoever was told of more than we know of says so, and the row goes on behind that."""
    pair = Pair()
    a = pair.ends["a"]
    for payload in (b"1", b"2"):
        pair.do("a", a.notify(pair.refs["b"], payload, pair.now)[1])
    pair.pump()
    pair.do("a", a.peer_dead(pair.refs["b"], pair.now))
    let_die(a, pair.now)
    pair.introduce("a")
    pair.take("a", _core.NotifDelivered)
    seq, effects = a.notify(pair.refs["b"], b"lost", pair.now)
    pair.do("a", effects)
    pair.advance(3 * S)
    assert seq == 1
    assert pair.take("a", _core.NotifDelivered) == []
    assert [(e.seq, e.code) for e in pair.take("a", _core.NotifFailed)] == [(1, _core.Code.transport)]
    seq, effects = a.notify(pair.refs["b"], b"next", pair.now)
    pair.do("a", effects)
    pair.advance(3 * S)
    assert seq == 3
    assert [e.seq for e in pair.take("a", _core.NotifDelivered)] == [3]
    assert [e.payload for e in pair.take("b", _core.NotifReceived)] == [b"1", b"2", b"next"]


def test_an_acknowledgement_of_what_no_row_has_ends_the_session() -> None:
    pair = Pair()
    a = pair.ends["a"]
    pair.do("a", a.notify(pair.refs["b"], b"1", pair.now)[1])
    pair.pump()
    assert a.counts().sessions_up == 1
    (session,) = [session for name, session in pair.peer_session if name == "a"]
    pair.do("a", a.on_frame(session, _core.Notif(_core.NotifKind.ACK, 2**63, 0, b""), pair.now))
    assert a.counts().sessions_up == 0


def test_bounds() -> None:
    limits = _core.EndpointLimits()
    limits.notifications_max, limits.notification_bytes_max = 2, 4
    pair = Pair(limits)
    a = pair.ends["a"]
    with pytest.raises(InvalidArgument, match="notification_bytes_max"):
        a.notify(pair.refs["b"], b"12345", pair.now)
    for _ in range(2):
        a.notify(pair.refs["b"], b"1", pair.now)
    with pytest.raises(LimitExceeded, match="notifications_max"):
        a.notify(pair.refs["b"], b"1", pair.now)


class NotifierMachine(RuleBasedStateMachine):
    """Both sides post; frames are lost and doubled, connections break, either side takes the other for dead and finds
    it back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.sent: dict[str, dict[int, bytes]] = {"a": {}, "b": {}}
        self.last = {"a": 0, "b": 0}
        self.settled: dict[str, dict[int, str]] = {"a": {}, "b": {}}
        self.count = 0

    @rule(name=st.sampled_from("ab"))
    def notify(self, name: str) -> None:
        self.count += 1
        payload = self.count.to_bytes(2, "big")
        seq, effects = self.pair.ends[name].notify(self.pair.refs[self.pair.other(name)], payload, self.pair.now)
        assert seq not in self.sent[name]
        self.sent[name][seq] = payload
        self.pair.do(name, effects)

    @rule(copies=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def deliver(self, copies: list[int]) -> None:
        line = iter(copies)
        self.pair.pump(lambda frame: 1 if isinstance(frame, _core.Hello) else next(line, 1))
        self.look()

    @rule()
    def cut(self) -> None:
        self.pair.cut_all()
        self.look()

    @rule(name=st.sampled_from("ab"))
    def mourn_and_find_back(self, name: str) -> None:
        pair = self.pair
        pair.wire.clear()
        pair.do(name, pair.ends[name].peer_dead(pair.refs[pair.other(name)], pair.now))
        pair.introduce(name)
        self.look()

    @rule(ms=st.integers(1, 4000), copies=st.integers(0, 1))
    def time_passes(self, ms: int, copies: int) -> None:
        self.pair.advance(ms * MS, lambda frame: 1 if isinstance(frame, _core.Hello) else copies)
        self.look()

    def look(self) -> None:
        for name in "ab":
            sender = self.pair.other(name)
            for effect in self.pair.take(name, _core.NotifReceived):
                assert effect.payload == self.sent[sender][effect.seq]
                assert effect.seq > self.last[name]
                skipped = range(self.last[name] + 1, effect.seq)
                assert all(self.settled[sender].get(seq) == "failed" for seq in skipped)
                self.last[name] = effect.seq
        for name in "ab":
            for kind, word in ((_core.NotifDelivered, "delivered"), (_core.NotifFailed, "failed")):
                for effect in self.pair.take(name, kind):
                    assert effect.seq not in self.settled[name]
                    self.settled[name][effect.seq] = word
                    assert word == "failed" or effect.seq <= self.last[self.pair.other(name)]

    def teardown(self) -> None:
        self.pair.advance(20 * S)
        self.look()
        for name in "ab":
            assert set(self.settled[name]) == set(self.sent[name])


TestNotifier = NotifierMachine.TestCase
TestNotifier.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
