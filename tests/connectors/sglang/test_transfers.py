"""What is sent arrives, byte for byte and nowhere else, and both sides hear when it has."""

from __future__ import annotations

import asyncio
import pathlib
import threading
import time
from collections.abc import Coroutine

import pytest

from kvxfer.connectors.sglang.source import RoomReader
from kvxfer.types import Lane, Role
from tests.support.sglang_core.cores import (
    Copy,
    Rank,
    begin,
    check,
    committed,
    idle,
    new_id,
    open_room,
    options,
    pair,
    running,
    until,
)


@pytest.mark.parametrize("lane", [Lane.CMA, Lane.UNIX, Lane.STREAM])
def test_one_chunk_arrives_with_its_states_and_auxiliary_row(tmp_path: pathlib.Path, lane: Lane) -> None:
    with pair(tmp_path, lanes=(lane,)) as (p, d):
        p.write(p.kv, (5, 6, 9), 1)
        p.write(p.aux, (2,), 2)
        p.write(p.states[0], (3,), 3)
        p.write(p.states[1], (1, 0), 4)
        open_room(p, d, 7, (1, 30, 2), 4, states=[(6,), (2, 3)])
        p.sources.send(7, 0, (5, 6, 9), is_last=True, aux_row=2, states=[(3,), (1, 0)])
        d.wait("done", 7)
        check(p, d, Copy(((5, 6, 9), (1, 30, 2)), ((2,), (4,)), [((3,), (6,)), ((1, 0), (2, 3))]))
        p.wait("sent", 7)
        assert p.events == [("began", 7), ("sent", 7)]
        assert d.events == [("done", 7)]
        moved, received = p.sources.moved(7), d.destinations.received(7)
        assert moved.bytes == received.bytes == 3 * 1536 + 640 + 512 + 2 * 1024
        assert 0 < moved.seconds < 10
        assert 0 < received.seconds < 10
        for rooms in (p.sources, d.destinations):
            rooms.clear(7)
            rooms.clear(7)
        idle(p, d)


def test_chunks_are_read_while_later_ones_are_computed(p: Rank, d: Rank) -> None:
    source, target = list(range(10, 22)), list(range(24, 12, -1))
    open_room(p, d, 1, target, 0)
    for at in range(0, 12, 4):
        p.write(p.kv, source[at : at + 4], at)
        p.sources.send(1, at, source[at : at + 4], is_last=False)
        until(lambda at=at: committed(d) == at // 4 + 1)
        check(p, d, Copy((source[: at + 4], target[: at + 4])))
    p.write(p.aux, (7,), 99)
    assert d.none("done")
    p.sources.send(1, 12, (), is_last=True, aux_row=7)
    d.wait("done", 1)
    check(p, d, Copy((source, target), ((7,), (0,))))
    p.wait("sent", 1)


def test_many_rooms_at_once(p: Rank, d: Rank) -> None:
    copies = []
    for room in range(8):
        source, target = list(range(room * 4, room * 4 + 4)), list(range(36 - room * 4, 40 - room * 4))
        p.write(p.kv, source, room)
        p.write(p.aux, (room,), 100 + room)
        copies.append(Copy((source, target), ((room,), (7 - room,))))
        if room % 2:
            open_room(p, d, room, target, 7 - room)
        else:
            begin(p, d, room, target, 7 - room)
            p.sources.accept(room)
    for at in (0, 2):
        for room, copy in enumerate(copies):
            p.sources.send(room, at, copy.kv[0][at : at + 2], is_last=at == 2, aux_row=room)
    for room in range(8):
        d.wait("done", room)
        p.wait("sent", room)
    check(p, d, *copies)
    idle(p, d)


def test_an_empty_last_chunk_brings_the_auxiliary_row_alone(p: Rank, d: Rank) -> None:
    """All pages were on decode before."""
    p.write(p.aux, (1,), 5)
    open_room(p, d, 3, (), 6)
    p.sources.send(3, 0, (), is_last=True, aux_row=1)
    d.wait("done", 3)
    p.wait("sent", 3)
    check(p, d, Copy(aux=((1,), (6,))))


def test_only_the_suffix_is_sent_that_decode_wants(p: Rank, d: Rank) -> None:
    p.write(p.kv, (4, 5, 6), 1)
    p.write(p.aux, (0,), 2)
    open_room(p, d, 3, (11, 12, 13), 0)
    p.sources.send(3, 0, (4,), is_last=False)
    p.sources.send(3, 1, (5, 6), is_last=True, aux_row=0)
    d.wait("done", 3)
    check(p, d, Copy(((4, 5, 6), (11, 12, 13)), ((0,), (0,))))


def test_it_is_done_only_after_the_auxiliary_row(p: Rank, d: Rank) -> None:
    p.write(p.kv, (4, 5), 1)
    open_room(p, d, 3, (1, 2), 0)
    p.sources.send(3, 0, (4, 5), is_last=False)
    until(lambda: committed(d) == 1)
    time.sleep(0.2)
    assert d.none("done")
    assert p.none("sent")
    assert not d.destinations.is_drained(3)
    p.write(p.aux, (0,), 2)
    p.sources.send(3, 2, (), is_last=True, aux_row=0)
    d.wait("done", 3)
    check(p, d, Copy(((4, 5), (1, 2)), ((0,), (0,))))
    assert d.destinations.is_drained(3)


def test_pages_behind_a_fence_are_read_once_it_is_passed(p: Rank, d: Rank) -> None:
    written = threading.Event()
    open_room(p, d, 3, (1, 2), 0)
    started_s = time.monotonic()
    p.sources.send(3, 0, (4, 5), is_last=True, aux_row=0, fence=lambda: written.wait(10))
    assert time.monotonic() - started_s < 1, "send waits for nothing"
    time.sleep(0.2)
    check(p, d)
    p.write(p.kv, (4, 5), 1)
    p.write(p.aux, (0,), 2)
    written.set()
    d.wait("done", 3)
    check(p, d, Copy(((4, 5), (1, 2)), ((0,), (0,))))


def test_a_fence_that_fails_fails_the_room(p: Rank, d: Rank) -> None:

    def fence() -> None:
        raise RuntimeError("the GPU is on fire")

    open_room(p, d, 3, (1, 2), 0)
    p.sources.send(3, 0, (4, 5), is_last=True, aux_row=0, fence=fence)
    assert "on fire" in p.wait("unsent", 3)[3]
    assert d.wait("failed", 3)[2] in ("internal", "grant_revoked")
    check(p, d)


def test_two_decode_ranks_read_one_room(tmp_path: pathlib.Path) -> None:
    chosen = options(tmp_path)
    p = Rank("p", Role.PREFILL, chosen)
    one, other = Rank("d", Role.DECODE, chosen), Rank("d.1", Role.DECODE, chosen, rank=1)
    with running(p, one, other):
        p.write(p.kv, (4, 5), 1)
        p.write(p.aux, (0,), 2)
        open_room(p, one, 3, (1, 2), 0)
        begin(p, other, 3, (8, 7), 5)
        p.sources.send(3, 0, (4, 5), is_last=True, aux_row=0)
        for d in (one, other):
            d.wait("done", 3)
        p.wait("sent", 3)
        check(p, one, Copy(((4, 5), (1, 2)), ((0,), (0,))))
        check(p, other, Copy(((4, 5), (8, 7)), ((0,), (5,))))


def test_a_room_is_used_again_after_it_was_cleared(p: Rank, d: Rank) -> None:
    for round_ in range(3):
        p.write(p.kv, (4, 5), round_)
        p.write(p.aux, (0,), 10 + round_)
        open_room(p, d, 3, (1, 2), 0)
        p.sources.send(3, 0, (4, 5), is_last=True, aux_row=0)
        d.wait("done", 3)
        p.wait("sent", 3)
        check(p, d, Copy(((4, 5), (1, 2)), ((0,), (0,))))
        p.sources.clear(3)
        d.destinations.clear(3)
        p.events.clear()
        d.events.clear()


def test_a_room_without_readers_is_done_when_all_is_sent(p: Rank) -> None:
    """All its peers are dummies."""
    p.sources.accept(3)
    p.sources.send(3, 0, (4,), is_last=True, aux_row=0)
    p.wait("sent", 3)


def test_agent_metadata_after_the_room_began_is_used(tmp_path: pathlib.Path) -> None:
    chosen = options(tmp_path)
    p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen)
    with running(p), running(d):
        p.core.add_remote_agent(d.core.export_metadata(), "d")
        p.write(p.aux, (1,), 5)
        p.sources.accept(3)
        transfer_id = new_id()
        d.destinations.begin(3, transfer_id, [("p", 0)], (1,), 6)
        p.sources.reader(3, RoomReader(transfer_id, "d", 0, 1))
        p.sources.send(3, 0, (9,), is_last=True, aux_row=1)
        time.sleep(0.3)
        assert d.none("failed")
        d.core.add_remote_agent(p.core.export_metadata(), "p")
        d.wait("done", 3)
        check(p, d, Copy(((9,), (1,)), ((1,), (6,))))


def test_messages_of_an_unknown_sender_are_handled_once_it_is_known(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(tmp_path)
    p, d = Rank("p", Role.PREFILL, chosen), Rank("d", Role.DECODE, chosen)
    start = d.destinations._start

    def start_late(work: Coroutine[None, None, None]) -> None:
        is_late = work.__name__ == "_learn"
        asyncio.get_running_loop().call_later(0.3 if is_late else 0, start, work)

    monkeypatch.setattr(d.destinations, "_start", start_late)
    with running(p), running(d):
        p.core.add_remote_agent(d.core.export_metadata(), "d")
        p.write(p.kv, (9, 4), 1)
        p.sources.accept(3)
        transfer_id = new_id()
        d.destinations.begin(3, transfer_id, [("p", 0)], (1, 2), 6)
        p.sources.reader(3, RoomReader(transfer_id, "d", 0, 2))
        p.sources.send(3, 0, (9,), is_last=False)
        (leg,) = d.destinations.legs()
        until(lambda: leg.waiting)
        d.core.add_remote_agent(p.core.export_metadata(), "p")
        until(lambda: leg.is_asked)
        p.sources.send(3, 1, (4,), is_last=True, aux_row=1)
        until(lambda: len(leg.waiting) == 3)
        d.wait("done", 3)
        check(p, d, Copy(((9, 4), (1, 2)), ((1,), (6,))))
