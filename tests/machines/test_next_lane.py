"""A lane lost in the middle: the next one is asked for what is missing, and for nothing that has landed."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer._native import _core
from kvxfer._native._core import Lane, SessionKind
from kvxfer.testing.sim.virtual_clock import MS, S
from tests.support.machines.lane_pair import (
    COUNT,
    DATA,
    ID,
    LANDED,
    MARK,
    SOURCE,
    TARGET,
    LanePair,
    asked,
    cut,
    lose,
    prefix_landed,
)

ways = pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("stopped", Lane.MAPPED, Lane.CMA),
        ("stopped", Lane.CMA, Lane.STREAM),
        ("stopped", Lane.UCX, Lane.STREAM),
        ("answered", Lane.MAPPED, Lane.STREAM),
        ("answered", Lane.UNIX, Lane.UCX),
        ("answered", Lane.STREAM, Lane.UCX),
        ("unreachable", Lane.MAPPED, Lane.STREAM),
        ("unreachable", Lane.CMA, Lane.UCX),
        ("unreachable", Lane.UNIX, Lane.STREAM),
    ],
)
each_verb = pytest.mark.parametrize("verb", ["pull", "fetch", "push"])
each_read = pytest.mark.parametrize("verb", ["pull", "fetch"])


@ways
@each_verb
def test_only_what_is_missing_is_asked_for(verb: str, how: str, first: Any, second: Any) -> None:
    pair = prefix_landed(verb, [first, second])
    lose(pair, how, first)
    pair.lost.add(_core.Verdict)
    pair.advance(100 * MS)
    pair.run()
    again = [(first, LANDED, COUNT - LANDED)] if how == "answered" else []
    assert asked(pair, verb) == [(first, 0, COUNT), *again, (second, LANDED, COUNT - LANDED)]
    assert [pull.attempt for pull in pair.asked] == list(range(1, len(pair.asked) + 1))
    assert len({pull.nonce for pull in pair.asked}) == len(pair.asked)
    assert bytes(pair.into[pair.at : pair.at + 128]) == MARK + DATA[32:]
    assert pair.filled == len(DATA)

    # All of it is there, by two lanes, and it is worth nothing until the source has confirmed.
    assert pair.finals(pair.poster) == []
    if verb != "push":
        assert pair.ends["b"].transfer_state(ID) == _core.TransferState.CONFIRMING
    pair.lost.clear()
    pair.advance(2 * S)
    (final,) = pair.take(pair.poster, _core.TransferFinal)
    assert (final.state.name, final.lane, final.blocks_done) == ("COMMITTED", second, COUNT)
    assert final.lane_notes != ""
    assert verb == "push" or final.attempts == len(pair.asked)
    assert len(pair.take(pair.poster, _core.TransferDrained)) == 1
    assert [e.bytes for e in pair.take("b", _core.OfferEnded)] == ([len(DATA)] if verb == "push" else [])
    assert len(pair.asked) == 2 + len(again)
    assert pair.filled == len(DATA)
    for name in "ab":
        counts = pair.ends[name].counts()
        assert (counts.grants.alive, counts.transfers_live, counts.transfers_draining) == (0, 0, 0)


@pytest.mark.parametrize("first", [Lane.MAPPED, Lane.CMA])
@each_verb
def test_a_read_outlives_its_lane_and_counts(verb: str, first: Any) -> None:
    """Two reads into one block are never under way: the next lane waits for the last of the one before."""
    pair = prefix_landed(verb, [first, Lane.STREAM])
    pair.pump()
    pair.closed.add(SessionKind.UNIX)
    (read,) = cut(pair)
    pair.advance(10 * MS)
    pair.run()
    assert asked(pair, verb) == [(first, 0, COUNT)]
    pair.arrive("b", ID, read.token, read.to, pair.bytes_of("a", read.source), [])
    pair.run()
    assert asked(pair, verb)[1:] == [(Lane.STREAM, 2 * LANDED, COUNT - 2 * LANDED)]
    assert bytes(pair.into[pair.at : pair.at + 128]) == MARK + DATA[32:]
    assert (pair.finals(pair.poster), pair.filled) == ([("COMMITTED", "ok")], len(DATA))


@each_verb
def test_fully_landed_write_is_confirmed_by_the_next_lane(verb: str) -> None:
    pair = prefix_landed(verb, [Lane.CMA, Lane.STREAM])
    pair.lost.add(_core.Verdict)
    pair.run()
    pair.closed.add(SessionKind.UNIX)
    assert cut(pair) == []
    pair.lost.clear()
    pair.run()
    assert pair.finals(pair.poster) == [("COMMITTED", "ok")]
    assert asked(pair, verb) == [(Lane.CMA, 0, COUNT)]
    assert (bytes(pair.into[pair.at : pair.at + 128]), pair.filled) == (MARK + DATA[32:], len(DATA))


@each_read
def test_a_grant_that_ended_between_two_lanes_confirms_nothing(verb: str) -> None:
    """What landed by the first one is as good as its grant, and that is over."""
    pair = prefix_landed(verb, [Lane.CMA, Lane.STREAM])
    lose(pair, "stopped", Lane.CMA)
    pair.lost |= {_core.Revoke, _core.ErrorFrame}
    while pair.filled < len(DATA):
        pair.land_one()
    if verb == "pull":
        pair.do("a", pair.ends["a"].end_grant(ID, _core.GrantEvent.REVOKE, pair.now)[1])
    else:
        assert pair.remove_region("a", SOURCE)
    pair.wire.clear()  # the trailer of the second lane among it, whatever it said
    pair.advance(4 * S)
    assert pair.finals("b") == [("FAILED", "grant_revoked")]


def test_posts_with_neighbouring_ids_are_not_taken_for_one() -> None:
    pair = LanePair()
    pair.add_region("a", SOURCE, DATA, is_shareable=True)
    pair.add_region("b", TARGET, bytes(128), is_shareable=True)
    for i in range(4):
        at = 32 * i
        id_ = ID[:-1] + bytes([ID[-1] ^ i])
        pair.post("a", "push", id_, [(SOURCE, at, 16, 16, 2)], [(TARGET, at, 16, 16, 2)], lanes=[Lane.STREAM])
    pair.run()
    assert pair.finals("a") == [("COMMITTED", "ok")] * 4
    assert pair.memory["b"][TARGET] == DATA


def test_bytes_read_before_the_source_knew_the_fetch_are_not_read_again() -> None:
    """A region that is mapped is read at once, and the FETCH was lost: the next lane is told of all of it, and has to
    send but one element."""
    pair = LanePair()
    pair.start("fetch", [Lane.CMA, Lane.STREAM])
    pair.run()
    assert pair.finals("b") == [("COMMITTED", "ok")]  # the map is here now
    pair.asked.clear()
    second = b"s" * 16
    elements = ([(TARGET, 0, 16, 16, COUNT)], [(SOURCE, 0, 16, 16, COUNT)])
    pair.post("b", "fetch", second, *elements, lanes=[Lane.CMA, Lane.STREAM])
    while pair.perform("b"):
        pass
    pair.closed.add(SessionKind.UNIX)
    cut(pair)
    pair.advance(10 * MS)
    pair.run()
    assert asked(pair, "fetch") == [(Lane.STREAM, COUNT - 1, 1)]
    assert pair.finals("b") == [("COMMITTED", "ok")]
