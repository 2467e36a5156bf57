"""A transfer whose memory is not there any more ends by name at once, whichever side finds it, and never commits."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Code, Lane
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.limits import endpoint_limits
from tests.support.machines.region_pair import RegionPair

ID = b"t" * 16
DATA = bytes(range(256))
POISON = b"\xee" * 256
ROWS = [(9, 0, 16, 16, 8)], [(7, 0, 16, 16, 8)]
GONE = [("FAILED", "memory_gone")]
each_verb = pytest.mark.parametrize("verb", ["fetch", "push"])


def reading(verb: str, lanes: list[Lane]) -> RegionPair:
    """Region 7 of ``a`` is on its way to region 9 of ``b``, and the wire is still."""
    pair = RegionPair()
    pair.add_region("a", 7, DATA)
    pair.add_region("b", 9, POISON)
    local, remote = ROWS if verb == "fetch" else ROWS[::-1]
    pair.post("b" if verb == "fetch" else "a", verb, ID, local, remote, lanes=lanes)
    pair.pump()
    return pair


def ends_of(pair: RegionPair, verb: str) -> list[tuple[str, str]]:
    return pair.finals("b" if verb == "fetch" else "a")


def find_gone(pair: RegionPair, text: str = "region 7") -> None:
    """``b``'s read finds nothing."""
    (read,) = pair.take("b", _core.ReadBlocks)
    pair.do("b", pair.ends["b"].read_stopped(read.id, read.token, Code.memory_gone, text, pair.now))


def is_idle(pair: RegionPair) -> bool:
    counts = [pair.ends[name].counts() for name in "ab"]
    return all(c.grants.alive == c.transfers_live == c.transfers_draining == 0 for c in counts)


@each_verb
def test_a_one_sided_read_that_finds_nothing_fails_by_name_once_the_source_has_nothing_to_say(verb: str) -> None:
    pair = reading(verb, [Lane.CMA])
    find_gone(pair)
    pair.run()
    assert ends_of(pair, verb) == GONE
    assert is_idle(pair)


@each_verb
def test_the_source_has_ended_the_grant_and_its_word_is_on_the_way_names_that(verb: str) -> None:
    """An owner takes its region back, as it should, and then unmaps it: the reader sees the second before the first."""
    pair = reading(verb, [Lane.CMA, Lane.STREAM])
    assert pair.remove_region("a", 7)
    revoke = list(pair.wire)
    pair.wire.clear()
    find_gone(pair)
    if verb == "fetch":
        pair.run()
        assert pair.finals("b") == [("FAILED", "grant_revoked")]
    else:
        pair.wire += revoke
        pair.run()
        assert pair.finals("a") == [("FAILED", "grant_revoked")]


@each_verb
def test_another_lane_is_tried_which_may_read_what_this_one_cannot(verb: str) -> None:
    pair = reading(verb, [Lane.CMA, Lane.STREAM])
    find_gone(pair)
    for _ in range(3):
        pair.run()
        pair.advance(100 * MS)
    assert ends_of(pair, verb) == [("COMMITTED", "ok")]
    assert pair.memory["b"][9][:128] == DATA[:128]
    assert pair.memory["b"][9][128:] == POISON[128:]


@each_verb
def test_a_source_that_says_nothing_costs_one_patience(verb: str) -> None:
    pair = reading(verb, [Lane.CMA])
    find_gone(pair)
    pair.wire.clear()
    begun = pair.now
    while not (finals := ends_of(pair, verb)):
        pair.advance(50 * MS, lambda frame: not isinstance(frame, _core.Verdict))
    assert finals == GONE
    assert pair.now - begun <= 2 * S


@each_verb
def test_no_verdict_of_before_commits_afterwards(verb: str) -> None:
    """The one that was asked for to learn whether the source knows of it says ok: of bytes that never came."""
    pair = reading(verb, [Lane.CMA])
    find_gone(pair)
    pair.pump(lambda frame: 3)
    pair.run()
    assert ends_of(pair, verb) == GONE
    assert pair.memory["b"][9] == POISON


@each_verb
def test_a_lost_session_forgets_what_was_found(verb: str) -> None:
    """What was read over it may have been another process's: the next session shows."""
    pair = reading(verb, [Lane.CMA])
    find_gone(pair)
    pair.cut_all()
    pair.advance(100 * MS)
    pair.run()
    pair.advance(2 * S)
    pair.run()
    assert ends_of(pair, verb) == [("COMMITTED", "ok")]
    assert pair.memory["b"][9][:128] == DATA[:128]


@each_verb
def test_bytes_that_the_source_cannot_read_end_its_grant_and_name_the_memory(verb: str) -> None:
    pair = reading(verb, [Lane.STREAM])
    (send,) = pair.take("a", _core.SendData)
    pair.do("a", pair.ends["a"].data_failed(ID, Code.memory_gone, "region 7 at byte 0", pair.now, send.serial))
    pair.run()
    assert ends_of(pair, verb) == GONE
    assert is_idle(pair)


@each_verb
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "the word is lost"])
@pytest.mark.parametrize("is_second_lane", [False, True], ids=["stream", "cma before"])
def test_zeros_sent_for_unreadable_bytes_are_never_committed(verb: str, is_told: bool, is_second_lane: bool) -> None:
    """Zeros, all of which land. The word may be lost with its session, and the verdict be asked for in the next. What
    the source had confirmed before, when another lane found the memory gone, says nothing of these bytes.
    """
    pair = reading(verb, [Lane.CMA, Lane.STREAM] if is_second_lane else [Lane.STREAM])
    if is_second_lane:
        find_gone(pair)
        for _ in range(5):
            pair.pump()
            pair.advance(20 * MS)
        pair.pump()
    (send,) = pair.take("a", _core.SendData)
    frame = send.frame
    pair.do("a", pair.ends["a"].data_failed(ID, Code.memory_gone, "region 7", pair.now, send.serial))
    (_, theirs) = pair.peer_session["a", send.session]
    landing = pair.ends["b"].data_arrives(theirs, frame, pair.now)
    pair.fill("b", landing.to, bytes(128))
    if not is_told:
        pair.wire.clear()
    pair.do("b", pair.ends["b"].read_landed(ID, landing.token, pair.now))
    pair.do("a", pair.ends["a"].data_sent(send.session, ID, frame.attempt, frame.count, pair.now, serial=send.serial))
    if not is_told:
        pair.cut_all()
    for _ in range(20):
        pair.run()
        pair.advance(1 * S)
    (final,) = ends_of(pair, verb)
    assert final == GONE[0] if is_told else final[0] == "FAILED"
    assert final[1] in ("memory_gone", "grant_revoked")


def test_a_grant_of_blocks_ends_with_its_memory_and_its_owner_is_told() -> None:
    pair = RegionPair()
    a = pair.ends["a"]
    pair.do("a", a.grant(ID, 1, [0, 1, 2], "b", 10 * S, 3, pair.now))
    pair.do(
        "b", pair.ends["b"].pull(ID, pair.refs["a"], 1, [4, 5, 6], 0, [Lane.STREAM], pair.now + 60 * S, 7, pair.now)
    )
    pair.pump()
    (send,) = pair.take("a", _core.SendData)
    pair.do("a", a.data_failed(ID, Code.memory_gone, "block 0 of pool 1", pair.now, send.serial + 1))
    assert pair.take("a", _core.GrantEnded) == []  # of an earlier grant by that id
    pair.do("a", a.data_failed(ID, Code.memory_gone, "block 0 of pool 1", pair.now, send.serial))
    pair.do("a", a.data_failed(ID, Code.memory_gone, "block 0 of pool 1", pair.now, send.serial))
    pair.pump()
    assert [e.state.name for e in pair.take("a", _core.GrantEnded)] == ["REVOKED"]
    (final,) = pair.take("b", _core.TransferFinal)
    assert (final.code, final.text) == (Code.memory_gone, "block 0 of pool 1")
    assert is_idle(pair)


@pytest.mark.parametrize("verb", ["fetch", "push"])
def test_a_reader_whose_own_memory_is_gone_fails_at_once(verb: str) -> None:
    pair = reading(verb, [Lane.STREAM])
    (send,) = pair.take("a", _core.SendData)
    (_, theirs) = pair.peer_session["a", send.session]
    landing = pair.ends["b"].data_arrives(theirs, send.frame, pair.now)
    pair.do("b", pair.ends["b"].read_stopped(ID, landing.token, Code.memory_gone, "region 9", pair.now))
    pair.pump()
    assert ends_of(pair, verb) == GONE


def test_sessions_that_end_before_anything_is_read_do_not_come_for_ever() -> None:
    """Whatever ends them: a peer with which no session lasts is out of reach."""
    pair = reading("fetch", [Lane.STREAM])
    begun, dials = pair.now, 0
    while pair.now - begun < 60 * S and not (finals := pair.finals("b")):
        dials += len(pair.take("b", _core.SessionUp))
        if pair.peer_session:
            pair.cut_all()
        pair.advance(10 * MS)
    assert finals == [("FAILED", "peer_gone")]
    assert pair.now - begun < 8 * S
    assert dials < 25


def test_sessions_that_end_are_forgiven_once_something_was_read() -> None:
    pair = RegionPair(endpoint_limits(read_bytes_max=16))
    pair.add_region("a", 7, DATA)
    pair.add_region("b", 9, POISON)
    pair.post("b", "fetch", ID, [(9, 0, 8, 8, 32)], [(7, 0, 8, 8, 32)], deadline_s=3000)
    finals: list[Any] = []
    for step in range(2000):
        pair.advance(20 * MS)
        for read in pair.take("b", _core.ReadBlocks):
            pair.arrive("b", read.id, read.token, read.to, pair.bytes_of("a", read.source), read.checksums)
        if step % 3 == 0:
            pair.cut_all()
        finals += pair.finals("b")
    assert finals == [("COMMITTED", "ok")]
    assert pair.memory["b"][9] == DATA
