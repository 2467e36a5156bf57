"""A reader's RELEASE that was lost with its connection is said again over the next session."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import GrantState
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.endpoint_pair import Pair
from tests.support.machines.pulls import ID, finals, grant, land, pull


def commit_and_cut(pair: Pair) -> None:
    """``b`` has committed; its RELEASE is lost."""
    grant(pair)
    pull(pair)
    pair.pump()
    land(pair)
    pair.pump(lambda frame: 0 if isinstance(frame, _core.Release) else 1)
    assert finals(pair) == [("COMMITTED", "ok")]
    pair.cut_all()
    assert pair.ends["a"].counts().grants.alive == 1


@pytest.mark.parametrize("dialer", ["a", "b"])
def test_said_again_over_the_next_session(dialer: str) -> None:
    pair = Pair()
    commit_and_cut(pair)
    assert not pair.peer_session, "no dial for that alone"
    pair.do(dialer, pair.ends[dialer].notify(pair.refs[pair.other(dialer)], b"", pair.now)[1])
    said: list[Any] = []
    pair.pump(lambda frame: said.append(frame) or 1)
    assert [frame.id for frame in said if isinstance(frame, _core.Release)] == [ID]
    assert [e.state for e in pair.take("a", _core.GrantEnded)] == [GrantState.RELEASED]


def test_release_goes_over_another_session_at_once() -> None:
    pair = Pair(endpoint_limits(stripes=2))
    b, ids = pair.ends["b"], [b"1" * 16, b"2" * 16]
    for at, id_ in enumerate(ids):
        pull(pair, id_, at=at, count=1, lane=_core.Lane.STREAM)
        pair.pump()
    assert b.counts().sessions_up == 2
    for id_ in ids:
        pair.do("b", b.cancel(id_, pair.now))
    lost = {session for name, session, frame in pair.wire if isinstance(frame, _core.Release)}
    assert len(lost) == 1
    pair.wire.clear()
    pair.cut("b", *lost)
    assert [frame.id for name, _, frame in pair.wire if isinstance(frame, _core.Release)] == ids


def test_not_when_the_grant_must_be_over() -> None:
    pair = Pair(endpoint_limits(lifetime_max_ns=20 * S))
    commit_and_cut(pair)
    pair.advance(20 * S)
    assert [e.state for e in pair.take("a", _core.GrantEnded)] == [GrantState.EXPIRED]
    pair.do("b", pair.ends["b"].notify(pair.refs["a"], b"", pair.now)[1])
    said: list[Any] = []
    pair.pump(lambda frame: said.append(frame) or 1)
    assert not [frame for frame in said if isinstance(frame, _core.Release)]


def test_only_so_many() -> None:
    pair = Pair()
    b = pair.ends["b"]
    for number in range(3000):
        pair.do("b", b.abort_pull(number.to_bytes(16, "big"), pair.refs["a"], pair.now))
    pair.cut_all()
    pair.do("b", b.notify(pair.refs["a"], b"", pair.now)[1])
    said: list[Any] = []
    pair.pump(lambda frame: said.append(frame) or 1)
    ids = [int.from_bytes(frame.id, "big") for frame in said if isinstance(frame, _core.Release)]
    assert ids == list(range(3000 - 1024, 3000))


@pytest.mark.parametrize("seed", range(200))
def test_no_grant_outlives_its_reader_past_the_next_session(seed: int) -> None:
    """Connections cut between any two frames, some dialed again, transfers that commit, fail or are given up: after one
    session that holds, the source has nothing alive of what is over, long before it would expire.
    """
    rng = random.Random(seed)
    pair = Pair(endpoint_limits(stripes=rng.choice((1, 2))))
    b = pair.ends["b"]
    ids = [bytes([number]) * 16 for number in range(12)]
    for number, id_ in enumerate(ids):
        grant(pair, id_, count=2, at=2 * number, ttl_ns=60 * S)
    posted = 0

    def fate(frame: Any) -> int:
        if rng.random() < 0.15:
            pair.cut_all()
            return 0
        return 1

    for _ in range(60):
        if posted < len(ids) and rng.random() < 0.5:
            pull(pair, ids[posted], at=2 * posted, lane=_core.Lane.MEMORY)
            posted += 1
        pair.reachable = rng.random() < 0.8
        pair.advance(rng.randrange(1, 40) * MS, fate)
        land(pair)
        if posted and rng.random() < 0.1:
            pair.do("b", b.cancel(rng.choice(ids[:posted]), pair.now))
    pair.reachable = True
    for id_ in ids[posted:]:
        pair.do("b", b.abort_pull(id_, pair.refs["a"], pair.now))
    for _ in range(20):
        pair.advance(500 * MS)
        land(pair)
    pair.do("b", b.notify(pair.refs["a"], b"", pair.now)[1])
    pair.pump()
    assert all(b.transfer_state(id_) is not None for id_ in ids[:posted])
    assert pair.now < 20 * S
    assert pair.ends["a"].counts().grants.alive == 0
    assert {e.state for e in pair.take("a", _core.GrantEnded)} == {GrantState.RELEASED}
