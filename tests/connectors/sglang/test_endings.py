"""Rooms that end before they are done: from either side, at each state, and what may be used anew when."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from typing import Any

import pytest

from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.errors import ClosedError, InvalidArgumentError, WeightsUnknownError
from kvxfer.types import Role, unknown_fingerprint
from tests.support.sglang_core.cores import (
    RECORD,
    Copy,
    Rank,
    begin,
    check,
    committed,
    idle,
    introduce,
    new_id,
    open_room,
    options,
    pair,
    running,
    until,
)
from tests.support.sglang_core.held_reads import held_reads

STATES = ("begun", "accepted", "queued", "chunk", "fenced", "all sent")


def bring_to(state: str, p: Rank, d: Rank, room: int = 5) -> threading.Event:
    """The room is in that state; the event lets its fence pass."""
    fence = threading.Event()
    transfer_id = new_id()
    d.destinations.begin(room, transfer_id, [("p", 0)], (1, 2, 3), 0)
    if state == "begun":
        return fence
    p.sources.accept(room)
    if state == "accepted":
        return fence
    p.sources.reader(room, RoomReader(transfer_id, "d", 0, 3))
    until(lambda: d.core.statistics().agent.pulls.queued == 1)
    if state == "queued":
        return fence
    p.write(p.kv, (7, 8, 9), 1)
    if state == "fenced":
        p.sources.send(room, 0, (7, 8), is_last=False, fence=lambda: fence.wait(20))
        until(lambda: d.core.statistics().agent.pools[0].reserved == 2)
        return fence
    p.sources.send(room, 0, (7, 8), is_last=False)
    until(lambda: committed(d) == 1)
    if state == "all sent":  # and not there yet: its last is behind a fence
        p.sources.send(room, 2, (9,), is_last=True, aux_row=0, fence=lambda: fence.wait(20))
    return fence


@pytest.mark.parametrize("state", STATES)
def test_an_abort_by_prefill_ends_the_room_on_both_sides(p: Rank, d: Rank, state: str) -> None:
    fence = bring_to(state, p, d)
    p.sources.abort(5, "the client hung up")
    p.write(p.kv, (7, 8, 9), 2)  # the pages are another prompt's at once
    p.sources.abort(5, "again")
    p.sources.clear(5)
    p.sources.clear(5)
    p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    fence.set()
    if state == "begun":  # prefill has never heard of it: that is decode's to give up
        time.sleep(0.2)
        assert d.none("failed", "done")
        d.destinations.abort(5, "enough")
    elif state == "accepted":  # its reader comes too late, and is told why
        p.sources.reader(5, RoomReader(d.destinations.legs()[0].transfer_id, "d", 0, 3))
    _, _, code, text = d.wait("failed", 5, 3.0)
    assert code in ("cancelled", "grant_revoked")
    assert "the client hung up" in text or state == "begun"
    assert d.destinations.is_drained(5)
    assert p.none("sent", "unsent"), "the side that aborted knows"
    d.destinations.clear(5)
    if state not in ("chunk", "all sent"):
        check(p, d)
    idle(p, d)


@pytest.mark.parametrize("state", STATES)
def test_an_abort_by_decode_ends_the_room_on_both_sides(p: Rank, d: Rank, state: str) -> None:
    fence = bring_to(state, p, d)
    d.destinations.abort(5, "the client hung up")
    d.destinations.abort(5, "again")
    _, _, code, text = d.wait("failed", 5, 3.0)
    assert (code, text) == ("cancelled", "the client hung up")
    assert d.destinations.is_drained(5)
    for row in (1, 2, 3):
        d.kv[0][row] = 0x11  # the pages are another prompt's
    fence.set()
    if state not in ("begun", "accepted"):
        _, _, code, text = p.wait("unsent", 5, 1.0)
        assert code in ("cancelled", "grant_released")
        assert "the client hung up" in text or code == "grant_released"
        p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    time.sleep(0.1)
    assert (d.kv[0][[1, 2, 3]] == 0x11).all()
    assert d.none("done")
    d.destinations.clear(5)
    p.sources.clear(5)
    assert p.none("sent")
    idle(p, d)


def test_a_room_that_decode_gave_up_before_prefill_accepted_it_fails_at_once(p: Rank, d: Rank) -> None:
    begin(p, d, 5, (1,), 0)
    d.destinations.abort(5, "the client hung up")
    d.wait("failed", 5)
    time.sleep(0.1)
    p.sources.accept(5)
    assert p.wait("unsent", 5, 1.0)[2] in ("cancelled", "grant_released")


def test_endings_after_the_end_change_nothing(p: Rank, d: Rank) -> None:
    open_room(p, d, 5, (1,), 0)
    p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    d.wait("done", 5)
    p.wait("sent", 5)
    for _ in range(2):
        p.sources.abort(5, "late")
        d.destinations.abort(5, "late")
    for _ in range(2):
        p.sources.clear(5)
        d.destinations.clear(5)
    for rooms in (p.sources, d.destinations):
        rooms.abort(6, "never heard of")
        rooms.clear(6)
    assert d.destinations.is_drained(6)
    time.sleep(0.1)
    assert p.events == [("began", 5), ("sent", 5)]
    assert d.events == [("done", 5)]


def test_a_room_is_drained_only_once_no_read_is_under_way(p: Rank, d: Rank) -> None:
    with held_reads(d) as release:
        open_room(p, d, 5, (1, 2), 0)
        p.sources.send(5, 0, (7, 8), is_last=False)
        until(lambda: len(d.destinations._rooms[5].filling) == 1)
        assert not d.destinations.is_drained(5)
        d.destinations.abort(5, "the client hung up")
        time.sleep(0.3)
        assert not d.destinations.is_drained(5)
        assert d.none("failed"), "its pages are not free yet"
        with pytest.raises(InvalidArgumentError, match="room 5 is in use"):
            d.destinations.begin(5, new_id(), [("p", 0)], (1,), 0)
        release()
        d.wait("failed", 5)
        assert d.destinations.is_drained(5)


def test_a_room_that_was_cleared_while_it_is_read_drains_all_the_same(p: Rank, d: Rank) -> None:
    with held_reads(d) as release:
        open_room(p, d, 5, (1, 2), 0)
        p.sources.send(5, 0, (7, 8), is_last=False)
        until(lambda: len(d.destinations._rooms[5].filling) == 1)
        d.destinations.clear(5)
        assert not d.destinations.is_drained(5)
        with pytest.raises(InvalidArgumentError, match="has not drained"):
            d.destinations.begin(5, new_id(), [("p", 0)], (1,), 0)
        release()
        until(lambda: d.destinations.is_drained(5))
    p.wait("unsent", 5)
    p.sources.clear(5)
    open_room(p, d, 5, (1,), 0)
    p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    d.wait("done", 5)
    assert d.events == [("done", 5)], "nothing is told of what was cleared"


def test_a_room_that_prefill_was_never_asked_for_is_unknown(tmp_path: pathlib.Path) -> None:
    with pair(tmp_path, unknown_wait_s=0.3) as (p, d):
        d.destinations.begin(5, new_id(), [("p", 0)], (1,), 0)
        assert d.wait("failed", 5, 4.0)[2] == "grant_unknown"
        idle(p, d)


def test_a_room_that_prefill_has_not_begun_is_waited_for(tmp_path: pathlib.Path) -> None:
    with pair(tmp_path, unknown_wait_s=0.3) as (p, d):
        open_room(p, d, 5, (1,), 0)
        for _ in range(20):
            p.core.pulses.step(True)
            time.sleep(0.05)
        assert d.none("failed")
        assert d.core.statistics().agent.pulls.queued == 1
        p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
        d.wait("done", 5)


def test_a_prefill_engine_that_makes_no_step_is_given_up(tmp_path: pathlib.Path) -> None:
    with pair(tmp_path, engine_silent_s=0.5) as (p, d):
        open_room(p, d, 5, (1,), 0)
        p.core.pulses.step(True)
        assert d.wait("failed", 5, 4.0)[2] == "peer_gone"
        assert p.wait("unsent", 5)[2] in ("peer_gone", "grant_released")


def test_a_wait_ends_when_its_time_is_over(p: Rank, d: Rank) -> None:
    open_room(p, d, 5, (1,), 0, timeout_s=0.4)
    assert d.wait("failed", 5, 3.0)[2] == "deadline"
    p.wait("unsent", 5, 1.0)


def test_a_room_in_use_is_refused_by_name(p: Rank, d: Rank) -> None:
    p.sources.accept(5)
    with pytest.raises(InvalidArgumentError, match="room 5 is in use"):
        p.sources.accept(5)
    transfer_id = begin(p, d, 5, (1,), 0)
    with pytest.raises(InvalidArgumentError, match="room 5 is in use"):
        d.destinations.begin(5, new_id(), [("p", 0)], (2,), 1)
    with pytest.raises(InvalidArgumentError, match="is another room's"):
        d.destinations.begin(6, transfer_id, [("p", 0)], (2,), 1)
    p.sources.reader(5, RoomReader(transfer_id, "d", 0, 1))  # again: the same
    p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    d.wait("done", 5)
    p.wait("sent", 5)


def test_another_reader_of_a_room_in_use_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    chosen = options(tmp_path)
    p, d, e = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen), Rank("e", Role.DECODE, chosen)
    with running(p, d, e):
        p.write(p.kv, (7, 8), 1)
        p.write(p.aux, (0,), 1)
        open_room(p, d, 5, (1, 2), 0)
        p.sources.send(5, 0, (7,), is_last=False)
        begin(p, e, 5, (1, 2), 0)
        _, _, code, text = e.wait("failed", 5, 1.0)
        assert code == "refused"
        assert "room 5 is in use" in text
        p.sources.send(5, 1, (8,), is_last=True, aux_row=0)
        d.wait("done", 5)
        p.wait("sent", 5)
        check(p, d, Copy(((7, 8), (1, 2)), ((0,), (0,))))
        check(p, e)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_fingerprint", "w1"),
        ("dtype", "float16"),
        ("block_tokens", 32),
        ("kv_heads", 4),
        ("attention_backend", "flashinfer"),
    ],
)
def test_engines_that_differ_are_refused_with_the_field_and_both_values(
    tmp_path: pathlib.Path, field: str, value: Any
) -> None:
    with pair(tmp_path, record=dataclasses.replace(RECORD, **{field: value})) as (p, d):
        open_room(p, d, 5, (1,), 0)
        _, _, code, text = d.wait("failed", 5, 3.0)
        assert code == "incompatible"
        assert f"{field} is {value!r} here and {getattr(RECORD, field)!r} there" in text
        assert p.wait("unsent", 5, 1.0)[2] in ("incompatible", "grant_released")
        p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
        check(p, d)


def test_weights_that_are_unknown_from_now_on_are_refused(p: Rank, d: Rank) -> None:
    open_room(p, d, 5, (1,), 0)
    p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    d.wait("done", 5)
    unknown = unknown_fingerprint("they were updated", b"n" * 16)
    d.core.describe(dataclasses.replace(RECORD, weights_fingerprint=unknown))
    open_room(p, d, 6, (1,), 0)
    _, _, code, text = d.wait("failed", 6, 3.0)
    assert code == "weights_unknown"
    assert "they were updated" in text


def test_prompts_that_wait_when_weights_change_fail_by_that_name(p: Rank, d: Rank) -> None:
    """What is sent by then was computed with what it says."""
    for room in (5, 6, 7):
        open_room(p, d, room, (room,), room - 5)
    until(lambda: d.core.statistics().agent.pulls.queued == 3)
    p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    p.sources.send(6, 0, (8,), is_last=False)
    p.sources.fail_unsent(WeightsUnknownError("they were updated"))
    for room in (6, 7):
        assert d.wait("failed", room, 1.0)[2] == p.wait("unsent", room, 1.0)[2] == "weights_unknown"
        assert "they were updated" in d.wait("failed", room)[3]
    d.wait("done", 5)
    idle(p, d)


def test_more_pages_than_are_wanted_fail_the_room(p: Rank, d: Rank) -> None:
    open_room(p, d, 5, (1,), 0)
    p.sources.send(5, 0, (7, 8), is_last=True, aux_row=0)
    _, _, code, text = p.wait("unsent", 5, 1.0)
    assert (code, text) == ("invalid_argument", "pages 0 to 2 are sent, and d wants 1")
    assert d.wait("failed", 5, 1.0)[2] == "invalid_argument"


def test_fewer_pages_than_are_wanted_fail_the_room(p: Rank, d: Rank) -> None:
    open_room(p, d, 5, (1, 2), 0)
    p.sources.send(5, 0, (7,), is_last=True, aux_row=0)
    _, _, code, text = d.wait("failed", 5, 1.0)
    assert code == "protocol"
    assert "1 of 2 pages" in text
    p.wait("unsent", 5, 1.0)


@pytest.mark.parametrize("rows", [(99,), (-1,), ((1, 2),), (1.5,)])
def test_rows_that_there_are_none_of_are_refused(p: Rank, d: Rank, rows: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        d.destinations.begin(5, new_id(), [("p", 0)], rows, 0)
    open_room(p, d, 5, (1,), 0)
    p.sources.send(5, 0, rows, is_last=True, aux_row=0)
    assert p.wait("unsent", 5, 1.0)[2] == "invalid_argument"


def test_an_engine_that_stops_tells_its_peers(tmp_path: pathlib.Path) -> None:
    chosen = options(tmp_path)
    p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen)
    with running(p, d):
        open_room(p, d, 5, (1,), 0)
        d.destinations.begin(6, new_id(), [("p", 0)], (2,), 1)
        until(lambda: d.core.statistics().agent.pulls.queued == 1)
        p.core.stop()
        for room in (5, 6):
            _, _, code, text = d.wait("failed", room, 1.0)
            assert (code, text) == ("peer_gone", "p has left: the engine ends")
        assert p.wait("unsent", 5)[2] == "closed"
        with pytest.raises(ClosedError):
            p.sources.accept(6)
        p.core.stop()
        d.destinations.begin(7, new_id(), [("p", 0)], (2,), 1)
        assert d.wait("failed", 7, 3.0)[2] == "peer_gone"
        d.core.stop()
        with pytest.raises(ClosedError):
            d.destinations.begin(8, new_id(), [("p", 0)], (2,), 1)


def test_an_engine_that_stops_tells_those_whose_prompt_it_has_not_begun(p: Rank, d: Rank) -> None:
    begin(p, d, 5, (1,), 0)
    until(lambda: p.core.statistics().agent.grants.pulls_waiting == 1)
    p.core.stop()
    assert d.wait("failed", 5, 0.5)[3] == "p has left: the engine ends"


@pytest.mark.parametrize("side", ["p", "d"])
def test_an_engine_that_starts_again_under_its_name_works(tmp_path: pathlib.Path, side: str) -> None:
    chosen = options(tmp_path)
    ranks = {"p": Rank("p", Role.PREFILL, chosen), "d": Rank("d", Role.DECODE, chosen)}
    with running(*ranks.values()):
        for round_ in range(3):
            p, d = ranks["p"], ranks["d"]
            p.write(p.kv, (7, 8), round_)
            p.write(p.aux, (0,), round_)
            open_room(p, d, round_, (1, 2), 0)
            p.sources.send(round_, 0, (7, 8), is_last=True, aux_row=0)
            d.wait("done", round_)
            p.wait("sent", round_)
            check(p, d, Copy(((7, 8), (1, 2)), ((0,), (0,))))
            ranks[side].core.stop()
            ranks[side] = Rank(side, Role.PREFILL if side == "p" else Role.DECODE, chosen)
            ranks[side].core.start()
            introduce(*ranks.values())
        ranks[side].core.stop()


def test_a_room_that_decode_gave_up_before_prefill_heard_of_its_reader_fails_at_once(p: Rank, d: Rank) -> None:
    transfer_id = new_id()
    p.sources.accept(5)
    d.destinations.begin(5, transfer_id, [("p", 0)], (1,), 0)
    d.destinations.abort(5, "the client hung up")
    d.wait("failed", 5)
    time.sleep(0.1)
    p.sources.reader(5, RoomReader(transfer_id, "d", 0, 1))
    assert p.wait("unsent", 5, 1.0)[2] == "cancelled"
