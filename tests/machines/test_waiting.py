"""Pulls that come before their grants: what their source says of them, what bounds the wait, and what blocks they
hold.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import GrantEvent, GrantState, TransferState
from kvxfer.errors import BlocksBusyError, InvalidArgumentError
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.endpoint_pair import Pair

ID = b"t" * 16
LANES = [_core.Lane.MEMORY, _core.Lane.STREAM, _core.Lane.MAPPED]


def ask(pair: Pair, *, timeout_ns: int = 600 * S, lane: Any = _core.Lane.MEMORY, blocks: tuple[int, ...] = ()) -> None:
    end = pair.ends["b"]
    deadline, count = pair.now + timeout_ns, 0 if blocks else 2
    effects = end.pull(
        ID, pair.refs["a"], 1, list(blocks), 0, [lane], deadline, 7, pair.now, count=count, granted_ns=30 * S
    )
    pair.do("b", effects)
    pair.pump()


def grant(pair: Pair, *, is_ready: bool = True) -> None:
    a = pair.ends["a"]
    pair.do("a", a.grant(ID, 1, [0, 1], "b", 10 * S, 2 if is_ready else 0, pair.now))
    if is_ready:
        pair.do("a", a.ready(ID, 2, 0, True, pair.now))
    pair.pump()


def reserve(pair: Pair, blocks: tuple[int, ...] = (4, 5), first: int = 0) -> None:
    pair.do("b", pair.ends["b"].reserve(ID, list(blocks), first, pair.now))
    pair.pump()


def state(pair: Pair) -> Any:
    return pair.ends["b"].transfer_state(ID)


def final(pair: Pair) -> tuple[str, str]:
    [end] = pair.take("b", _core.TransferFinal)
    return end.code.name, end.text


def land(pair: Pair) -> None:
    for read in pair.take("b", _core.ReadBlocks):
        pair.do("b", pair.ends["b"].read_landed(read.id, read.token, pair.now))
    pair.pump()


def reserved(pair: Pair) -> int:
    return int(pair.ends["b"].counts().pools[0].reserved)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_pull_without_blocks_is_granted_then_given_blocks_and_commits(pair: Pair) -> None:
    ask(pair)
    assert (state(pair), reserved(pair)) == (TransferState.WAITING, 0)
    grant(pair)
    assert [told.id for told in pair.take("b", _core.TransferGranted)] == [ID]
    assert state(pair) == TransferState.GRANTED
    assert pair.take("b", _core.ReadBlocks) == []
    assert not pair.ends["a"].has_begun(ID)
    assert pair.ends["a"].counts().grants.unread_blocks == 2
    reserve(pair)
    assert pair.ends["a"].has_begun(ID)
    assert pair.ends["a"].counts().grants.unread_blocks == 0
    assert reserved(pair) == 2
    land(pair)
    assert final(pair) == ("ok", "")
    assert pair.ends["a"].grant_state(ID, pair.now) == GrantState.RELEASED


def test_the_destination_chooses_where_to_begin_when_it_has_blocks(pair: Pair) -> None:
    ask(pair)
    grant(pair)
    reserve(pair, (7,), first=1)
    [read] = pair.take("b", _core.ReadBlocks)
    assert (list(read.from_blocks), list(read.to_blocks)) == ([1], [7])


@pytest.mark.parametrize("lane", LANES)
def test_a_source_tells_a_reader_without_blocks_that_the_grant_exists_and_sends_nothing(pair: Pair, lane: Any) -> None:
    ask(pair, lane=lane)
    grant(pair)
    assert state(pair) == TransferState.GRANTED
    assert pair.take("a", _core.SendData) == []
    assert pair.ends["a"].counts().grants.verdicts_ok == 0
    reserve(pair)
    assert len(pair.take("a", _core.SendData)) == (lane == _core.Lane.STREAM)


def test_an_engine_that_is_silent_is_not_forgiven_with_each_new_session(pair: Pair) -> None:
    pair.ends["a"].expect(ID, "b")
    pair.ends["a"].pulse(True, True, pair.now)
    ask(pair)
    for _ in range(3):
        pair.advance(3 * S)
        pair.cut_all()
    assert pair.take("b", _core.TransferFinal) == []
    pair.advance(2 * S)
    assert final(pair)[0] == "peer_gone"


def test_an_engine_that_stopped_while_it_was_idle_is_noticed_by_what_it_does_not_take_in(pair: Pair) -> None:
    """It said that it had no work, and never will say more: but a prompt was accepted for it."""
    pair.ends["a"].pulse(False, True, pair.now)
    pair.advance(60 * S)
    pair.ends["a"].expect(ID, "b")
    ask(pair)
    pair.advance(9 * S)
    assert state(pair) == TransferState.WAITING
    pair.advance(2 * S)
    code, text = final(pair)
    assert code == "peer_gone"
    assert "sent no heartbeat" in text


def test_waiting_pull_learns_whether_its_prompt_is_known_and_its_position(pair: Pair) -> None:
    pair.ends["a"].pulse(True, True, pair.now)
    pair.ends["a"].expect(b"1" * 16, "b")
    said: list[Any] = []

    def hear(frame: Any) -> int:
        said.extend([frame] if isinstance(frame, _core.Queued) else [])
        return 1

    ask(pair)
    assert pair.ends["b"].counts().pulls_unknown == 1
    pair.ends["a"].expect(ID, "b")
    pair.ends["a"].expect(ID, "b")
    pair.advance(600 * MS, hear)
    assert [(one.is_known, one.position, one.has_work) for one in said] == [(True, 1, True)] * 2
    assert [one.age_ms for one in said] == [250, 500]
    assert pair.ends["b"].counts().pulls_queued == 1
    assert pair.ends["a"].counts().grants.expected == 2
    pair.do("a", pair.ends["a"].abort_grant(b"1" * 16))
    said.clear()
    pair.advance(250 * MS, hear)
    assert [one.position for one in said] == [0]
    grant(pair)
    assert pair.ends["a"].counts().grants.expected == 0


def test_a_prompt_that_a_busy_engine_was_never_asked_for_is_unknown(pair: Pair) -> None:
    ask(pair)
    began = pair.now
    while state(pair) == TransferState.WAITING and pair.now - began < 10 * S:
        pair.ends["a"].pulse(True, True, pair.now)
        pair.advance(10 * MS)
    assert final(pair) == ("grant_unknown", "the source's engine was never asked for this prompt")
    assert 2 * S <= pair.now - began <= 2.5 * S


def test_a_prompt_that_an_idle_engine_was_never_asked_for_is_unknown(pair: Pair) -> None:
    pair.ends["a"].pulse(False, True, pair.now)
    pair.advance(60 * S)
    ask(pair)
    pair.advance(1900 * MS)
    assert state(pair) == TransferState.WAITING
    pair.advance(600 * MS)
    assert final(pair)[0] == "grant_unknown"


def test_one_that_comes_to_the_engine_late_is_waited_for(pair: Pair) -> None:
    ask(pair)
    for step in range(1200):
        pair.ends["a"].pulse(True, True, pair.now)
        if step == 15:
            pair.ends["a"].expect(ID, "b")
        pair.advance(100 * MS)
    assert state(pair) == TransferState.WAITING
    grant(pair)
    assert state(pair) == TransferState.GRANTED


def test_an_owner_without_an_engine_lets_pulls_wait_as_long_as_they_want(pair: Pair) -> None:
    ask(pair, timeout_ns=100 * S)
    pair.advance(99 * S)
    assert state(pair) == TransferState.WAITING
    pair.advance(2 * S)
    assert final(pair) == ("deadline", "no grant came in the time that the request allows")


def test_an_engine_with_work_that_sends_no_heartbeat_ends_the_wait(pair: Pair) -> None:
    pair.ends["a"].expect(ID, "b")
    pair.ends["a"].pulse(True, True, pair.now)
    ask(pair)
    pair.advance(9900 * MS)
    assert state(pair) == TransferState.WAITING
    pair.advance(600 * MS)
    code, text = final(pair)
    assert code == "peer_gone"
    assert "no heartbeat" in text


def test_an_agent_that_says_nothing_of_a_pull_ends_the_wait_too(pair: Pair) -> None:
    ask(pair)
    pair.advance(11 * S, lambda frame: not isinstance(frame, (_core.Queued, _core.ErrorFrame)))
    assert final(pair)[0] == "peer_gone"


def test_the_deadline_of_a_transfer_counts_from_its_grant(pair: Pair) -> None:
    pair.ends["a"].expect(ID, "b")
    ask(pair)
    for _ in range(120):
        pair.ends["a"].pulse(True, True, pair.now)
        pair.advance(1 * S)
    grant(pair)
    pair.advance(29 * S)
    assert state(pair) == TransferState.GRANTED  # and kept alive, though its first lifetime was 10 s
    assert pair.ends["a"].grant_state(ID, pair.now) == GrantState.ALIVE
    pair.advance(2 * S)
    assert final(pair) == ("deadline", "the deadline passed")
    assert pair.ends["a"].grant_state(ID, pair.now) == GrantState.RELEASED


@pytest.mark.parametrize("lane", LANES)
def test_early_blocks_can_be_taken_back_until_the_grant_is_heard_of(pair: Pair, lane: Any) -> None:
    ask(pair, lane=lane, blocks=(4, 5))
    assert reserved(pair) == 2
    is_done, effects = pair.ends["b"].unreserve(ID, pair.now)
    assert is_done
    assert reserved(pair) == 0
    pair.do("b", effects)
    pair.pump()
    grant(pair)
    assert state(pair) == TransferState.GRANTED
    assert not pair.ends["a"].has_begun(ID)
    assert pair.ends["b"].unreserve(ID, pair.now)[0] is False
    reserve(pair, (8, 9))
    assert pair.ends["b"].unreserve(ID, pair.now)[0] is False
    assert pair.ends["a"].has_begun(ID)


def test_blocks_that_were_taken_back_while_the_grant_was_made_are_not_written(pair: Pair) -> None:
    """The source had the old question, and its announcement and bytes are on the way."""
    ask(pair, lane=_core.Lane.STREAM, blocks=(4, 5))
    a, b = pair.ends["a"], pair.ends["b"]
    pair.do("a", a.grant(ID, 1, [0, 1], "b", 10 * S, 2, pair.now))
    [sent] = pair.take("a", _core.SendData)
    is_done, effects = b.unreserve(ID, pair.now)
    assert is_done
    pair.do("b", effects)
    session = next(mine for name, mine in pair.peer_session if name == "b")
    landing = b.data_arrives(session, sent.frame, pair.now)
    assert landing.token == 0
    pair.pump()
    assert state(pair) == TransferState.GRANTED


def test_a_lost_session_tells_of_the_grant_again(pair: Pair) -> None:
    ask(pair)
    grant(pair)
    assert len(pair.take("b", _core.TransferGranted)) == 1
    pair.cut_all()
    pair.advance(1 * S)
    assert len(pair.take("b", _core.TransferGranted)) == 1
    reserve(pair)
    land(pair)
    assert final(pair) == ("ok", "")


def test_owners_reason_of_a_revocation_reaches_the_reader() -> None:
    for comes_first in (True, False):
        pair = Pair()
        if comes_first:
            ask(pair)
        grant(pair)
        state_after, effects = pair.ends["a"].end_grant(ID, GrantEvent.REVOKE, pair.now, "no_room")
        assert state_after == GrantState.REVOKED
        pair.do("a", effects)
        pair.pump()
        if not comes_first:
            ask(pair)
        code, text = final(pair)
        assert code == "grant_revoked"
        assert "no_room" in text


def test_wrong_calls_change_nothing(pair: Pair) -> None:
    end = pair.ends["b"]
    with pytest.raises(InvalidArgumentError):
        end.reserve(ID, [1], 0, pair.now)
    assert end.unreserve(ID, pair.now) == (False, [])
    with pytest.raises(InvalidArgumentError):
        end.pull(ID, pair.refs["a"], 1, [], 0, LANES, pair.now + S, 7, pair.now)
    ask(pair)
    with pytest.raises(InvalidArgumentError):
        end.reserve(ID, [], 0, pair.now)
    reserve(pair)
    with pytest.raises(InvalidArgumentError):
        end.reserve(ID, [1], 0, pair.now)
    other = b"o" * 16
    pair.do("b", end.pull(other, pair.refs["a"], 1, [], 0, LANES, pair.now + S, 7, pair.now, count=2))
    with pytest.raises(BlocksBusyError):
        end.reserve(other, [4, 6], 0, pair.now)
    assert reserved(pair) == 2


def test_a_cancelled_wait_gives_back_what_it_had(pair: Pair) -> None:
    ask(pair, blocks=(4, 5))
    pair.do("b", pair.ends["b"].cancel(ID, pair.now))
    assert reserved(pair) == 0
    assert len(pair.take("b", _core.TransferDrained)) == 1
    pair.pump()
    assert pair.ends["a"].counts().grants.waiting_pulls == 0


def test_a_known_prompt_is_waited_for_as_long_as_its_reader_wants() -> None:
    """However long this source would wait for one that it does not know."""
    limits = endpoint_limits(wait_max_ns=5 * S)
    pair = Pair(limits)
    pair.ends["a"].expect(ID, "b")
    ask(pair, timeout_ns=100 * S)
    for _ in range(99):
        pair.ends["a"].pulse(True, True, pair.now)
        pair.advance(1 * S)
    assert state(pair) == TransferState.WAITING
    pair.advance(2 * S)
    assert final(pair)[0] == "deadline"
    other = Pair(limits)
    ask(other, timeout_ns=100 * S)
    other.advance(6 * S)
    assert final(other)[0] == "grant_unknown"


@pytest.mark.parametrize("tells", [True, False])
def test_a_pull_with_blocks_tells_of_its_grant_where_that_is_wanted(pair: Pair, tells: bool) -> None:
    end = pair.ends["b"]
    effects = end.pull(
        ID, pair.refs["a"], 1, [4, 5], 0, [_core.Lane.MEMORY], pair.now + S, 7, pair.now, tells_granted=tells
    )
    pair.do("b", effects)
    pair.pump()
    grant(pair, is_ready=False)
    pair.do("a", pair.ends["a"].ready(ID, 1, 0, False, pair.now))
    pair.pump()
    assert len(pair.take("b", _core.TransferGranted)) == tells
