"""Notifications through two endpoints on a wire that loses and doubles frames and connections, with incarnations that
end or are only thought to have ended: once, in order, and never called delivered when they are not.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvxfer._native import _core
from kvxfer.errors import InvalidArgumentError, LimitExceededError
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.endpoint_pair import KEY, Pair


def test_delivered_once_in_order() -> None:
    pair = Pair()
    for n in range(3):
        _, effects = pair.ends["a"].notify(pair.refs["b"], bytes([n]), pair.now)
        pair.do("a", effects)
    pair.pump(lambda frame: 1 if isinstance(frame, _core.Hello) else 2)
    assert [(e.seq, e.payload) for e in pair.take("b", _core.NotifReceived)] == [(1, b"\0"), (2, b"\1"), (3, b"\2")]
    assert [e.seq for e in pair.take("a", _core.NotifDelivered)] == [1, 2, 3]
    assert pair.ends["a"].counts().notifications_pending == 0


def test_failed_when_the_incarnation_ended() -> None:
    pair = Pair()
    pair.reachable = False
    _, effects = pair.ends["a"].notify(pair.refs["b"], b"x", pair.now)
    pair.do("a", effects)
    pair.do("a", pair.ends["a"].peer_dead(pair.refs["b"], pair.now))
    assert [(e.seq, e.code) for e in pair.take("a", _core.NotifFailed)] == [(1, _core.Code.peer_gone)]


@pytest.mark.parametrize("mourner", ["a", "b"])
def test_an_incarnation_that_comes_back_is_not_answered_for_the_old(mourner: str) -> None:
    """Whichever side thought the other dead: numbers go on, and later notifications are delivered."""
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
"""How many dead incarnations, not used since, keep their numbers."""


@pytest.mark.parametrize("is_used", [False, True], ids=["known", "used"])
@pytest.mark.parametrize("mourner", ["a", "b"])
def test_an_incarnation_that_came_back_is_not_forgotten_for_others(mourner: str, is_used: bool) -> None:
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
    """A receiver that has more than we know of says so, and the numbers go on behind that."""
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


def test_acknowledgement_of_an_unused_number_ends_the_session() -> None:
    pair = Pair()
    a = pair.ends["a"]
    pair.do("a", a.notify(pair.refs["b"], b"1", pair.now)[1])
    pair.pump()
    assert a.counts().sessions_up == 1
    (session,) = [session for name, session in pair.peer_session if name == "a"]
    pair.do("a", a.on_frame(session, _core.Notif(_core.NotifKind.ACK, 2**63, 0, b""), pair.now))
    assert a.counts().sessions_up == 0


def test_bounds() -> None:
    pair = Pair(endpoint_limits(notifications_max=2, notification_bytes_max=4))
    a = pair.ends["a"]
    with pytest.raises(InvalidArgumentError, match="notification_bytes_max"):
        a.notify(pair.refs["b"], b"12345", pair.now)
    for _ in range(2):
        a.notify(pair.refs["b"], b"1", pair.now)
    with pytest.raises(LimitExceededError, match="notifications_max"):
        a.notify(pair.refs["b"], b"1", pair.now)


def test_bytes_that_wait_for_one_peer_are_bounded_and_named() -> None:
    pair = Pair(endpoint_limits(notification_bytes_max=1000, notification_queue_bytes_max=3000))
    a = pair.ends["a"]
    pair.reachable = False
    for _ in range(2):
        pair.do("a", a.notify(pair.refs["b"], bytes(1000), pair.now)[1])
    with pytest.raises(
        LimitExceededError, match=r"notification_queue_bytes_max \(3000\) is reached by what waits for b"
    ):
        a.notify(pair.refs["b"], bytes(1000), pair.now)
    pair.reachable = True
    pair.advance(3 * S)
    assert len(pair.take("b", _core.NotifReceived)) == 2
    a.notify(pair.refs["b"], bytes(1000), pair.now)


PIECE = 8
WINDOW = 16 * PIECE
BYTES_MAX = (16 << 20) + 8192


def parted() -> Pair:
    """A pair that sends more than PIECE bytes in parts."""
    return Pair(endpoint_limits(notification_piece_bytes=PIECE, notification_bytes_max=BYTES_MAX))


def post(pair: Pair, payload: bytes) -> None:
    pair.do("a", pair.ends["a"].notify(pair.refs["b"], payload, pair.now)[1])


def received(pair: Pair) -> list[bytes]:
    return [effect.payload for effect in pair.take("b", _core.NotifReceived)]


def parts_on(pair: Pair) -> list[_core.Notif]:
    return [f for _, _, f in pair.wire if isinstance(f, _core.Notif) and f.kind == _core.NotifKind.PART]


def session_up(pair: Pair, name: str) -> int:
    return next(session for owner, session in pair.peer_session if owner == name)


def test_long_notification_arrives_whole_and_in_order() -> None:
    pair = parted()
    messages = [b"first", bytes(range(256)) * 3, b"", b"x" * PIECE, b"y" * (PIECE + 1), b"last"]
    for message in messages:
        post(pair, message)
    pair.advance(3 * S)
    assert received(pair) == messages
    assert [e.seq for e in pair.take("a", _core.NotifDelivered)] == [1, 2, 3, 4, 5, 6]


def test_no_more_than_a_window_is_under_way() -> None:
    pair = parted()
    post(pair, b"up")
    pair.pump()
    for _ in range(3):
        post(pair, bytes(10 * WINDOW))
    assert sum(len(part.payload) for part in parts_on(pair)) == WINDOW
    pair.pump()
    assert [len(payload) for payload in received(pair)] == [2, *[10 * WINDOW] * 3]


@pytest.mark.parametrize("lost", [0, 3, 15])
def test_a_part_that_was_lost_comes_again(lost: int) -> None:
    pair = parted()
    post(pair, b"up")
    pair.pump()
    message = bytes(i % 251 for i in range(5 * WINDOW))
    seen = 0

    def fate(frame: object) -> int:
        nonlocal seen
        if isinstance(frame, _core.Notif) and frame.kind == _core.NotifKind.PART:
            seen += 1
            return int(seen != lost + 1)
        return 1

    post(pair, message)
    pair.pump(fate)
    assert received(pair) == [b"up"]
    pair.advance(3 * S)
    assert received(pair) == [message]


def test_a_new_session_goes_on_behind_what_came() -> None:
    pair = parted()
    post(pair, b"up")
    pair.pump()
    message = bytes(i % 251 for i in range(20 * PIECE))
    post(pair, message)
    arrived = 0

    def fate(frame: object) -> int:
        nonlocal arrived
        is_part = isinstance(frame, _core.Notif) and frame.kind == _core.NotifKind.PART
        arrived += is_part
        return int(not is_part or arrived <= 10)

    pair.pump(fate)
    pair.cut_all()
    post(pair, b"after")
    sent: list[int] = []

    def look(frame: object) -> int:
        if isinstance(frame, _core.Notif) and frame.kind == _core.NotifKind.PART:
            sent.append(frame.begin)
        return 1

    pair.advance(3 * S, look)
    assert received(pair) == [b"up", message, b"after"]
    assert min(sent) == 10 * PIECE


def test_parts_that_claim_too_much_end_the_session() -> None:
    pair = Pair(endpoint_limits(notification_bytes_max=64))
    post(pair, b"up")
    pair.pump()
    b, session = pair.ends["b"], session_up(pair, "b")
    b.on_frame(session, _core.Notif(_core.NotifKind.PART, 2, 1, b"x", 0, 64), pair.now)
    assert b.counts().sessions_up == 1
    b.on_frame(session, _core.Notif(_core.NotifKind.PART, 2, 1, b"x", 0, 65), pair.now)
    assert b.counts().sessions_up == 0


def test_parts_of_all_peers_are_bounded_and_the_stalest_makes_room() -> None:
    """What a peer left lying keeps others out for a moment only; what comes for it then is asked for anew."""
    limits = endpoint_limits(notification_bytes_max=BYTES_MAX)
    here = _core.AgentRef("host", 1, b"h" * 16)
    host = _core.Endpoint(here, limits)
    now, piece, total = 10 * MS, bytes(256 * 1024), 16 << 20
    sessions = []
    for number in range(5):
        there = _core.AgentRef(f"bearer-{number}", 1, bytes([number] * 16))
        bearer = _core.Endpoint(there, limits)
        kind = _core.SessionKind.MEMORY
        bearer.set_peer(here, KEY, kind)
        host.set_peer(there, KEY, kind)
        mine, effects = bearer.dialed(here, kind, b"1" * 32, now)
        session, others = host.accepted(kind, b"2" * 32, now)
        for _ in range(3):
            effects, others = (
                [e for o in others if isinstance(o, _core.SendFrame) for e in bearer.on_frame(mine, o.frame, now)],
                [e for o in effects if isinstance(o, _core.SendFrame) for e in host.on_frame(session, o.frame, now)],
            )
        sessions.append(session)
    assert host.counts().sessions_up == 5

    def part(session: int, begin: int, at: int) -> int:
        frame = _core.Notif(_core.NotifKind.PART, 1, 1, piece, begin, total)
        (ack,) = [e.frame for e in host.on_frame(session, frame, at) if isinstance(e, _core.SendFrame)]
        return int(ack.begin)

    taken = [0] * 5
    for number, session in enumerate(sessions):
        for begin in range(0, total - len(piece), len(piece)):
            taken[number] = part(session, begin, now + number)
    assert taken[:4] == [total - len(piece)] * 4
    assert sum(taken) == 64 << 20, "no more is kept"
    assert part(sessions[4], taken[4], now + S) == taken[4], "no other is stale yet"
    assert part(sessions[4], taken[4], now + 3 * S) == taken[4] + len(piece)
    assert part(sessions[0], taken[0], now + 3 * S) == 0, "this one made room"


def test_parts_out_of_place_are_not_kept() -> None:
    """Each is answered with how much there is, and only what follows that is taken."""
    pair = parted()
    post(pair, b"up")
    pair.pump()
    received(pair)
    b, session = pair.ends["b"], session_up(pair, "b")
    kind = _core.NotifKind
    for part, there in (
        (_core.Notif(kind.PART, 2, 2, b"cd", 2, 6), 0),
        (_core.Notif(kind.PART, 2, 2, b"ab", 0, 6), 2),
        (_core.Notif(kind.PART, 2, 2, b"ab", 0, 6), 2),
        (_core.Notif(kind.PART, 3, 2, b"zz", 0, 4), 2),
        (_core.Notif(kind.PART, 2, 2, b"ef", 4, 6), 2),
        (_core.Notif(kind.PART, 2, 2, b"cd", 2, 6), 4),
        (_core.Notif(kind.PART, 2, 2, b"ef", 4, 6), 0),
    ):
        effects = b.on_frame(session, part, pair.now)
        (ack,) = [e.frame for e in effects if isinstance(e, _core.SendFrame)]
        assert (ack.kind, ack.begin) == (kind.ACK, there)
        pair.told["b"] += [e for e in effects if isinstance(e, _core.NotifReceived)]
    assert received(pair) == [b"abcdef"]


class NotifierMachine(RuleBasedStateMachine):
    """Both sides post, some of it in parts; frames are lost and doubled, connections break, either side takes the other
    for dead and finds it back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair = parted()
        self.sent: dict[str, dict[int, bytes]] = {"a": {}, "b": {}}
        self.last = {"a": 0, "b": 0}
        self.settled: dict[str, dict[int, str]] = {"a": {}, "b": {}}
        self.count = 0

    @rule(name=st.sampled_from("ab"), length=st.sampled_from([0, 0, PIECE, 3 * PIECE, 2 * WINDOW]))
    def notify(self, name: str, length: int) -> None:
        self.count += 1
        payload = self.count.to_bytes(2, "big") + bytes(i % 251 for i in range(length))
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
