"""A session that was idle is asked whether it is there before anybody waits long for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane, SessionKind
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.machines.endpoint_pair import KEY
from tests.support.machines.region_pair import RegionPair

DATA = bytes(range(256))
STALL = 1 * S  # the default


class FarPair(RegionPair):
    """By TCP. What goes over the `swallowed` sessions of ``b`` gets nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.swallowed: set[int] = set()
        self.pings, self.dials = 0, 0
        self.add_region("a", 7, DATA)
        self.add_region("b", 9, bytes(256))

    def introduce(self, name: str) -> None:
        self.ends[name].set_peer(self.refs[self.other(name)], KEY, SessionKind.TCP)

    def do(self, name: str, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, _core.SendFrame):
                self.pings += isinstance(effect.frame, _core.Ping) and effect.frame.kind == _core.PingKind.ASK
                here = effect.session if name == "b" else self.peer_session.get((name, effect.session), ("", 0))[1]
                if here in self.swallowed:
                    continue
            self.dials += isinstance(effect, _core.Dial)
            super().do(name, [effect])

    def sessions(self) -> set[int]:
        return {session for name, session in self.peer_session if name == "b"}

    def swallow(self) -> None:
        self.swallowed = self.sessions()

    def fetch(self, number: int) -> int:
        """How long it takes, in steps of 10 ms."""
        self.memory["b"][9][:] = bytes(256)
        self.post("b", "fetch", bytes([number]) * 16, [(9, 0, 16, 16, 8)], [(7, 0, 16, 16, 8)], lanes=[Lane.STREAM])
        begun = self.now
        self.run()
        while not (finals := self.finals("b")):
            self.advance(10 * MS)
            self.run()
        assert finals == [("COMMITTED", "ok")]
        assert self.memory["b"][9][:128] == DATA[:128]
        return self.now - begun


@pytest.fixture
def pair() -> FarPair:
    """With a session that one fetch has used."""
    made = FarPair()
    made.fetch(1)
    return made


def test_a_session_that_does_not_answer_after_idleness_is_replaced_within_a_fifth_of_the_stall(pair: FarPair) -> None:
    pair.advance(60 * S)
    pair.swallow()
    assert pair.fetch(2) <= STALL // 5 + 20 * MS
    assert pair.dials == 2
    assert not pair.sessions() & pair.swallowed
    assert pair.ends["b"].counts().sessions_up == 1


def test_one_that_answers_is_kept_and_asked_once(pair: FarPair) -> None:
    pings = pair.pings
    for number in range(2, 6):
        pair.advance(60 * S)
        assert pair.fetch(number) == 0
    assert pair.pings - pings == 4
    assert pair.dials == 1


def test_idle_session_sends_no_ping_and_sets_no_deadline(pair: FarPair) -> None:
    pair.advance(20 * S)  # the grant's end is the last that is due
    pings = pair.pings
    assert min(end.next_deadline() for end in pair.ends.values()) > pair.now + 3600 * S
    pair.advance(3600 * S)
    assert pair.pings == pings


def test_transfers_without_a_pause_ask_nothing(pair: FarPair) -> None:
    pings = pair.pings
    for number in range(2, 30):
        pair.advance(STALL // 5)
        pair.fetch(number)
    assert pair.pings == pings


def test_a_slow_answer_costs_one_session_too_many_and_no_more(pair: FarPair) -> None:
    """It comes after another was dialed: both are good, and the next time a late answer ends one of them."""
    for number in range(2, 8):
        pair.advance(60 * S)
        pair.post("b", "fetch", bytes([number]) * 16, [(9, 0, 16, 16, 8)], [(7, 0, 16, 16, 8)], lanes=[Lane.STREAM])
        held, pair.wire = pair.wire, []
        pair.advance(STALL // 5 + 10 * MS)
        pair.wire = held + pair.wire
        pair.run()
        pair.advance(100 * MS)
        pair.run()
        assert pair.finals("b") == [("COMMITTED", "ok")]
        assert pair.ends["b"].counts().sessions_up <= 2


def test_a_notification_probes_too_and_a_session_that_stays_silent_ends(pair: FarPair) -> None:
    pair.advance(60 * S)
    pair.swallow()
    _, effects = pair.ends["b"].notify(pair.refs["a"], b"n", pair.now)
    pair.do("b", effects)
    pair.run()
    pair.advance(STALL // 5 + 10 * MS)
    pair.run()
    assert [event.payload for event in pair.take("a", _core.NotifReceived)] == [b"n"]
    assert pair.ends["b"].counts().sessions_up == 1
    pair.advance(60 * S)
    assert pair.ends["b"].counts().sessions_up == 1


def test_operations_that_move_to_an_overdue_session_set_no_past_deadline(pair: FarPair) -> None:
    """Two sessions were asked, and no operation waited for their answers: the next fetch finds the one, then the
    other."""
    pair.advance(60 * S)
    pair._dial("b", SimpleNamespace(peer=pair.refs["a"], kind=SessionKind.TCP))
    pair.run()
    assert pair.ends["b"].counts().sessions_up == 2
    pair.advance(60 * S)
    pair.swallow()
    for number in (2, 3):  # one on each
        pair.post("b", "fetch", bytes([number]) * 16, [(9, 0, 16, 16, 8)], [(7, 0, 16, 16, 8)], lanes=[Lane.STREAM])
    for number in (2, 3):
        pair.do("b", pair.ends["b"].cancel(bytes([number]) * 16, pair.now))
    assert len(pair.finals("b")) == 2
    pair.advance(60 * S)
    assert pair.fetch(4) <= STALL // 5 + 20 * MS  # advance() asserts that no wake lies in the past
    assert pair.ends["b"].counts().sessions_up == 1


def test_where_no_other_can_be_dialed_the_old_patience_holds(pair: FarPair) -> None:
    pair.advance(60 * S)
    pair.swallow()
    pair.reachable = False
    pair.post("b", "fetch", b"x" * 16, [(9, 0, 16, 16, 8)], [(7, 0, 16, 16, 8)], lanes=[Lane.STREAM])
    begun = pair.now
    while not (finals := pair.finals("b")):
        pair.advance(10 * MS)
    assert finals == [("FAILED", Code.peer_gone.name)]
    assert pair.now - begun <= 2 * STALL + 3 * S + 100 * MS
