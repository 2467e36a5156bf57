"""A write whose lane goes in the middle. The writer says which comes next, by PUSH; the reader keeps what it
has, and what is still under way."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane, SessionKind
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.machines.lane_pair import (
    COUNT,
    DATA,
    ID,
    LANDED,
    SOURCE,
    TARGET,
    LanePair,
    asked,
    cut,
    lose,
    prefix_landed,
)


def pushing(lanes: list[Any], **options: Any) -> LanePair:
    """``a`` has posted a write, and nothing has arrived yet."""
    pair = options.pop("kind", LanePair)(options.pop("reads_by", None))
    pair.add_region("a", SOURCE, DATA, **{"is_shareable": True, "is_exposed": True, **options.pop("source", {})})
    pair.add_region("b", TARGET, bytes(128), is_shareable=True)
    elements = ([(SOURCE, 0, 16, 16, COUNT)], [(TARGET, 0, 16, 16, COUNT)])
    pair.post("a", "push", ID, *elements, lanes=lanes, notification=b"n", **options)
    pair.poster, pair.into, pair.at = "a", pair.memory["b"][TARGET], 0
    return pair


def is_written_once(pair: LanePair) -> bool:
    """All of it arrived, was told once at both ends, and neither holds anything of it."""
    assert pair.finals("a") == [("COMMITTED", "ok")]
    assert [e.payload for e in pair.take("b", _core.NotifReceived)] == [b"n"]
    assert [e.state.name for e in pair.take("b", _core.OfferEnded)] == ["COMMITTED"]
    counts = [pair.ends[name].counts() for name in "ab"]
    assert [(c.grants.alive, c.transfers_live, c.transfers_draining) for c in counts] == [(0, 0, 0)] * 2
    return bytes(pair.into) == DATA


@pytest.mark.parametrize("how", ["landed", "cut", "no lane"])
def test_a_write_waits_for_the_read_of_its_last_lane(how: str) -> None:
    """Its next PUSH comes while that one is under way. Nothing else is read before it is over, and it counts."""
    pair = pushing([Lane.CMA, Lane.STREAM])
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    pair.closed.add(SessionKind.UNIX)
    cut(pair)
    for _ in range(3):
        pair.advance(2 * S)
        pair.run()
    assert (pair.finals("a"), pair.filled) == ([], 0)
    assert pair.take("b", _core.NotifReceived) == []
    assert pair.ends["b"].is_landing(read.id, read.token)
    if how == "landed":
        pair.arrive("b", read.id, read.token, read.to, pair.bytes_of("a", read.source), [])
    else:
        code = Code.transport if how == "cut" else Code.no_lane
        pair.do("b", pair.ends["b"].read_stopped(read.id, read.token, code, how, pair.now))
    pair.run()
    landed = LANDED if how == "landed" else 0
    assert asked(pair, "push") == [(Lane.CMA, 0, COUNT), (Lane.STREAM, landed, COUNT - landed)]
    assert is_written_once(pair)
    assert pair.filled == len(DATA)


def test_a_write_whose_last_read_lands_after_its_next_lane_was_named() -> None:
    """All of it is there then, by the old lane: only the word for it is asked for over the new one."""
    pair = prefix_landed("push", [Lane.CMA, Lane.STREAM])
    for _ in range(2):
        pair.land_one()
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    session = next(session for name, session in pair.peer_session if name == "a")
    pair.do("a", pair.ends["a"].on_frame(session, _core.Done(ID, Code.no_lane, b"", 0), pair.now))
    pair.pump()
    assert pair.filled == len(DATA) - 32
    pair.arrive("b", read.id, read.token, read.to, pair.bytes_of("a", read.source), [])
    pair.run()
    assert asked(pair, "push") == [(Lane.CMA, 0, COUNT)]
    assert (pair.finals("a"), pair.filled) == ([("COMMITTED", "ok")], len(DATA))


@pytest.mark.parametrize("is_over", [False, True], ids=["live", "ended"])
def test_an_earlier_lane_of_a_write_that_comes_late_is_nothing_new(is_over: bool) -> None:
    """The PUSH of the first lane lay in its socket while that of the second was served: ``b`` has not heard that the
    session of it went.
    """
    pair = pushing([Lane.CMA, Lane.STREAM])
    while not any(isinstance(frame, _core.Push) for _, _, frame in pair.wire):
        name, session, frame = pair.wire.pop(0)
        other, theirs = pair.peer_session[name, session]
        pair.do(other, pair.ends[other].on_frame(theirs, frame, pair.now))
    late = [frame for name, _, frame in pair.wire if name == "a"]  # what proves the session, and PUSH
    pair.closed.add(SessionKind.UNIX)
    pair.wire.clear()
    (_, mine), (_, unix) = sorted(pair.peer_session)
    pair.peer_session.clear()
    pair.do("a", pair.ends["a"].closed(mine, pair.now))
    pair.pump()
    if is_over:
        pair.run()
        assert is_written_once(pair)
    effects = [effect for frame in late for effect in pair.ends["b"].on_frame(unix, frame, pair.now)]
    said = [effect.frame for effect in effects if isinstance(effect, _core.SendFrame)]
    assert [(type(frame), frame.code, frame.turn) for frame in said] == ([(_core.Done, Code.ok, 1)] if is_over else [])
    pair.run()
    assert is_over or is_written_once(pair)
    assert asked(pair, "push") == [(Lane.STREAM, 0, COUNT)]


def test_a_lane_that_is_refused_twice_costs_one_lane() -> None:
    """PUSH was said again before its answer came: the second DONE is of a lane that was left with the first."""
    pair = pushing([Lane.UCX, Lane.STREAM])
    pair.unmappable.add(Lane.UCX)
    pair.lost.add(_core.Done)
    pair.run()
    pair.lost.clear()
    assert pair.finals("a") == []
    answers: list[Any] = []

    def twice(frame: Any) -> int:
        if isinstance(frame, _core.Done) and frame.code == Code.no_lane:
            answers.append(frame)
            return 2
        return pair.fate(frame)

    pair.now += 2 * S
    for name in "ab":
        pair.do(name, pair.ends[name].tick(pair.now))
    super(LanePair, pair).pump(twice)
    pair.run()
    assert [(answer.code, answer.turn) for answer in answers] == [(Code.no_lane, 0)]
    assert is_written_once(pair)


def test_a_write_whose_last_lane_is_refused_ends_at_once() -> None:
    """The destination does not wait for a lane that will not come, and landed bytes are worth nothing."""
    pair = prefix_landed("push", [Lane.MAPPED, Lane.CMA])
    pair.unmappable |= {Lane.MAPPED, Lane.CMA}
    pair.run()
    assert pair.finals("a") == [("FAILED", "no_lane")]
    assert [(e.state.name, e.code.name) for e in pair.take("b", _core.OfferEnded)] == [("FAILED", "no_lane")]
    assert pair.remove_region("b", TARGET)


def without_lane() -> LanePair:
    """A write of which two elements are in place, and whose reader waits for a lane that is not named."""
    pair = prefix_landed("push", [Lane.CMA, Lane.STREAM])
    pair.unmappable.add(Lane.CMA)
    pair.lost.add(_core.Push)
    pair.land_one()
    pair.pump()
    assert pair.ends["b"].counts().transfers_live == 1
    return pair


def test_transfer_without_a_lane_sets_no_deadline_for_it() -> None:
    """Flaw: it asked for a session, once a millisecond, and had no lane to have it by."""
    pair = without_lane()
    end, wakes = pair.ends["b"], 0
    while end.next_deadline() < pair.now + 2 * S and wakes < 100:
        wakes += 1
        pair.do("b", end.tick(end.next_deadline()))
    assert wakes <= 2


@pytest.mark.parametrize("how", ["cancel", "remove"])
def test_transfer_without_a_lane_ends_with_its_push(how: str) -> None:
    """No read is under way that the end of the grant would have been told to."""
    pair = without_lane()
    if how == "cancel":
        pair.do("a", pair.ends["a"].cancel(ID, pair.now))
    else:
        assert pair.remove_region("a", SOURCE)
    pair.run()
    assert [(e.state.name, e.code.name) for e in pair.take("b", _core.OfferEnded)] == [("FAILED", "grant_revoked")]
    assert pair.remove_region("b", TARGET)


def test_a_last_lane_that_its_reader_may_not_use_ends_a_write() -> None:
    """Part of it is in place, and what it is asked to go on by is not allowed in its process."""
    pair = pushing([Lane.CMA, Lane.STREAM], reads_by=[Lane.CMA])
    pair.land_one()
    pair.unmappable.add(Lane.CMA)
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state.name, final.code) == ("FAILED", Code.no_lane)
    assert final.text.count("does not read by this lane") == 1
    assert [(e.state.name, e.code.name) for e in pair.take("b", _core.OfferEnded)] == [("FAILED", "no_lane")]
    assert pair.remove_region("b", TARGET)


def test_a_lane_between_that_its_reader_may_not_use_costs_nothing() -> None:
    pair = pushing([Lane.CMA, Lane.UNIX, Lane.STREAM], reads_by=[Lane.CMA, Lane.STREAM])
    pair.land_one()
    pair.unmappable.add(Lane.CMA)
    pair.run()
    assert is_written_once(pair)
    assert pair.filled == len(DATA)


def committed_and_lost(lanes: list[Any], **options: Any) -> LanePair:
    """It is committed, and the answer went with the session."""
    pair = pushing(lanes, **options)
    pair.lost |= {_core.Done, _core.Release}
    pair.run()
    pair.lost.clear()
    assert [e.state.name for e in pair.take("b", _core.OfferEnded)] == ["COMMITTED"]
    pair.closed.add(SessionKind.UNIX)
    cut(pair)
    return pair


def test_a_write_that_may_be_committed_is_asked_for_by_a_lane_that_could_not_read_it() -> None:
    """Flaw: it was called failed for want of a lane, by one whose session was there to ask over."""
    pair = committed_and_lost([Lane.MAPPED, Lane.CMA], source={"is_exposed": False})
    assert pair.finals("a") == []
    pair.closed.clear()
    pair.advance(S)
    assert pair.finals("a") == [("COMMITTED", "ok")]


def test_a_write_that_may_be_committed_and_cannot_be_asked_for_says_so() -> None:
    """Flaw: ``no_lane``, which says that nothing was written."""
    pair = pushing([Lane.CMA])
    pair.lost |= {_core.Done, _core.Release}
    pair.run()
    pair.dials_fail_as = Code.no_lane
    cut(pair)
    pair.advance(S)
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.code, "may have committed" in final.text) == (Code.peer_gone, True)


def test_write_that_failed_at_the_reader_was_not_committed() -> None:
    """It had a verdict, and says that it failed: nothing is left open."""
    pair = committed_and_lost([Lane.CMA, Lane.STREAM])
    pair.lost.add(_core.Push)
    pair.pump()
    session = next(session for name, session in pair.peer_session if name == "a")
    pair.do("a", pair.ends["a"].on_frame(session, _core.Done(ID, Code.deadline, b"late", 1), pair.now))
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.code, final.text) == (Code.deadline, "late")


def test_a_lane_that_is_refused_while_it_is_read_by_is_nonsense() -> None:
    """Flaw: the reader called it ``no_lane`` of a lane that was left since, and its writer never believed that."""
    pair = pushing([Lane.CMA, Lane.STREAM])
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    session = next(session for name, session in pair.peer_session if name == "b")
    pair.do("b", pair.ends["b"].on_frame(session, _core.ErrorFrame(ID, 1, Code.no_lane, b"x"), pair.now))
    pair.do("b", pair.ends["b"].read_stopped(ID, read.token, Code.transport, "stopped", pair.now))
    pair.run()
    assert pair.finals("a") == [("FAILED", "protocol")]


def test_a_lane_that_cannot_serve_is_not_one_to_wait_for() -> None:
    """Flaw: the last that could was refused, and its grant released; the next was asked for all the same, for ever."""
    pair = pushing([Lane.CMA, Lane.MAPPED], source={"is_shareable": False})
    pair.unmappable.add(Lane.CMA)
    pair.run()
    assert pair.finals("a") == [("FAILED", "no_lane")]
    assert [e.code.name for e in pair.take("b", _core.OfferEnded)] == ["no_lane"]


def test_a_write_that_never_names_another_lane_ends() -> None:
    pair = prefix_landed("push", [Lane.CMA, Lane.STREAM])
    pair.unmappable.add(Lane.CMA)
    pair.land_one()
    pair.lost.add(_core.Push)
    pair.pump()
    cut(pair)
    pair.reachable = False
    pair.closed |= {SessionKind.UNIX, SessionKind.TCP}
    for _ in range(8):
        pair.advance(S)
    assert pair.finals("a") == [("FAILED", "peer_gone")]
    assert [(e.state.name, e.code.name) for e in pair.take("b", _core.OfferEnded)] == [("FAILED", "peer_gone")]
    assert pair.remove_region("b", TARGET)


def test_a_grant_that_ended_between_two_lanes_of_a_write_confirms_nothing() -> None:
    pair = prefix_landed("push", [Lane.CMA, Lane.STREAM])
    lose(pair, "stopped", Lane.CMA)
    pair.lost |= {_core.Revoke, _core.ErrorFrame}
    while pair.filled < len(DATA):
        pair.land_one()
    assert pair.remove_region("a", SOURCE)
    pair.wire.clear()  # the trailer of the second lane among it, whatever it said
    pair.advance(4 * S)
    assert pair.finals("a") == [("FAILED", "grant_revoked")]
    assert [e.code.name for e in pair.take("b", _core.OfferEnded)] == ["grant_revoked"]
    assert pair.take("b", _core.NotifReceived) == []


def test_push_reports_the_elements_that_its_reader_checked() -> None:
    """The lane that served in the end may check, and the one before did not."""
    pair = pushing([Lane.CMA, Lane.STREAM], wants_checksums=True)
    pair.pump()
    pair.perform("b")
    lose(pair, "stopped", Lane.CMA)
    pair.run()
    (final,) = pair.take("a", _core.TransferFinal)
    assert (final.state.name, final.blocks_done, final.blocks_checked) == ("COMMITTED", COUNT, COUNT - LANDED)


def pushing_the_next(pair: LanePair) -> None:
    """``a`` writes something else to the same place."""
    pair.add_region("a", SOURCE + 1, DATA[::-1], is_shareable=True)
    elements = ([(SOURCE + 1, 0, 16, 16, COUNT)], [(TARGET, 0, 16, 16, COUNT)])
    pair.post("a", "push", b"u" * 16, *elements, lanes=[Lane.CMA, Lane.STREAM], notification=b"n")


def test_a_write_that_was_cancelled_does_not_land_behind_the_next() -> None:
    """Flaw: its session was cut, so its end was never reported, and its read went on beside that of the next one."""
    pair = pushing([Lane.CMA, Lane.STREAM])
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    cut(pair)
    pair.do("a", pair.ends["a"].cancel(ID, pair.now))
    assert pair.finals("a") == [("CANCELLED", "cancelled")]
    pushing_the_next(pair)
    pair.run()
    assert not pair.ends["b"].is_landing(read.id, read.token)
    assert [effect.id for effect in pair.take("b", _core.StopRead)] == [ID]
    assert [pull.id for pull in pair.asked] == [ID], "no other read beside one that may still land"
    pair.fill("b", read.to, b"".join(pair.bytes_of("a", read.source)))  # it could not be stopped
    pair.do("b", pair.ends["b"].read_landed(read.id, read.token, pair.now))
    pair.advance(3 * S)
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")]
    assert bytes(pair.into) == DATA[::-1]
    assert [e.state.name for e in pair.take("b", _core.OfferEnded)] == ["FAILED", "COMMITTED"]


def test_a_write_that_is_heard_of_after_its_end_is_not_read() -> None:
    """Flaw: its PUSH waited in one session, its REVOKE came by another, and was ignored. The next write was committed,
    and then it was taken for a new one, and read over that."""
    pair = pushing([Lane.CMA])
    late: list[Any] = []

    def hold_back(frame: Any) -> int:
        if isinstance(frame, _core.Push) and frame.id == ID:
            late.append(frame)
            return 0
        return pair.fate(frame)

    super(LanePair, pair).pump(hold_back)
    assert late
    pair.do("a", pair.ends["a"].cancel(ID, pair.now))
    pushing_the_next(pair)
    pair.run()
    assert pair.finals("a") == [("CANCELLED", "cancelled"), ("COMMITTED", "ok")]
    session = next(session for name, session in pair.peer_session if name == "b")
    effects = pair.ends["b"].on_frame(session, late[0], pair.now)
    assert [(type(effect), effect.frame.code) for effect in effects] == [(_core.SendFrame, Code.grant_revoked)]
    pair.do("b", effects)
    pair.run()
    assert [pull.id for pull in pair.asked] == [b"u" * 16]
    assert bytes(pair.into) == DATA[::-1]


def test_a_write_is_ended_over_whichever_session_there_is() -> None:
    """Flaw: its reader had not heard that the session which it read on was gone, and took no word by another."""
    pair = pushing([Lane.CMA])
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    (_, mine), _ = sorted(pair.peer_session)
    pair.peer_session.clear()
    pair.do("a", pair.ends["a"].closed(mine, pair.now))
    pair.run()
    assert pair.ends["b"].is_landing(read.id, read.token)
    pair.do("a", pair.ends["a"].cancel(ID, pair.now))
    pair.run()
    assert not pair.ends["b"].is_landing(read.id, read.token)


def test_the_end_of_a_write_that_went_with_its_session_is_said_again() -> None:
    pair = pushing([Lane.CMA])
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    pair.do("a", pair.ends["a"].cancel(ID, pair.now))
    cut(pair)
    pair.do("a", pair.ends["a"].notify(pair.refs["b"], b"hello", pair.now)[1])
    pair.run()
    assert not pair.ends["b"].is_landing(read.id, read.token)


class BearerLanes(LanePair):
    """``b`` knows ``a`` as a bearer peer, by any name that it claims."""

    def introduce(self, name: str) -> None:
        if name == "a":
            self.ends["a"].set_peer(self.refs["b"], b"g" * 32, SessionKind.TCP)
        else:
            self.ends["b"].admit(_core.PeerAdmission.bearer_key(b"g" * 32))


def test_a_bearer_peer_goes_on_by_another_lane() -> None:
    """Flaw: it was forgotten with its only session, and what it had begun to write with it."""
    pair = pushing([Lane.CMA, Lane.STREAM], kind=BearerLanes)
    pair.land_one()
    lose(pair, "unreachable", Lane.CMA)
    pair.run()
    assert asked(pair, "push")[-1] == (Lane.STREAM, LANDED, COUNT - LANDED)
    assert is_written_once(pair)
    assert pair.filled == len(DATA)


def test_a_bearer_peer_whose_last_read_is_slow_goes_on_where_it_asked() -> None:
    """Flaw: its next PUSH had come while that read was under way, and the session that it came by was forgotten."""
    pair = pushing([Lane.CMA, Lane.STREAM], kind=BearerLanes)
    pair.pump()
    (read,) = pair.take("b", _core.ReadBlocks)
    pair.closed.add(SessionKind.UNIX)
    cut(pair)
    pair.advance(3200 * MS)
    pair.run()
    pair.lost.add(_core.Push)  # it does not come again
    pair.arrive("b", read.id, read.token, read.to, pair.bytes_of("a", read.source), [])
    pair.run()
    assert is_written_once(pair)
