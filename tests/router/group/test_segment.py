"""Counts in shared memory: each process sees what the others show, and a process that ended is not counted."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.router.fleet.board import InFlight
from kvxfer.router.group.segment import HEADER, INSIDE, SEATS, SERVING, SharedBoard, SharedCounts
from kvxfer.types import AgentRef
from tests.support.fleet import stock

ROWS = 3
REFS = [stock(f"d{number}").ref for number in range(4)]

shows = st.tuples(st.just("show"), st.integers(0, ROWS - 1), st.integers(0, 3), st.integers(0, 5), st.integers(0, 5))
"""Of a worker: its prefills, and as many held; its decodes."""
ends = st.tuples(st.just("end"), st.integers(0, ROWS - 1), st.just(0), st.just(0), st.just(0))
agains = st.tuples(st.just("again"), st.integers(0, ROWS), st.just(0), st.just(0), st.just(0))
moves = st.tuples(st.just("move"), st.just(0), st.integers(0, 3), st.integers(4, 9), st.just(0))


@given(st.lists(st.one_of(shows, shows, ends, agains, moves), max_size=60))
def test_board_equals_a_model(steps: list[tuple[str, int, int, int, int]]) -> None:
    """Whatever is shown, in whatever order: what each process adds up from the changes is the sum of the others."""
    segment = SharedCounts.make(ROWS)
    try:
        boards = [SharedBoard(segment, row) for row in range(ROWS)] + [SharedBoard(segment, None)]
        seats = {ref: seat for seat, ref in enumerate(REFS)}
        for board in boards:
            for ref, seat in seats.items():
                board.seat(ref, seat)
        model: dict[tuple[int, AgentRef], InFlight] = {}
        views: list[dict[AgentRef, InFlight]] = [{} for _ in boards]
        for what, row, worker, prefill, decode in steps:
            ref = REFS[worker]
            if what == "show":
                model[row, ref] = counts = InFlight(prefill, decode, prefill)
                boards[row].show(ref, counts)
            elif what == "end":
                segment.clear(row)
                model = {key: counts for key, counts in model.items() if key[0] != row}
            elif what == "again":
                boards[row].again()
            elif not segment.inflight(seats[ref]) and prefill not in seats.values():
                seats[ref] = prefill
                for board in boards:
                    board.unseat(ref)
                    board.seat(ref, prefill)
            for mine, board in enumerate(boards):
                for changed, seen in board.changed():
                    views[mine][changed] = seen
                for one in REFS:
                    others = [model.get((row, one), InFlight()) for row in range(ROWS) if row != mine]
                    assert views[mine][one] == tuple(map(sum, zip(*others, strict=True)))
    finally:
        segment.close()


def test_board_gives_only_what_changed() -> None:
    segment = SharedCounts.make(2)
    one, other = SharedBoard(segment, 0), SharedBoard(segment, 1)
    for seat, ref in enumerate(REFS):
        one.seat(ref, seat)
        other.seat(ref, seat)
    assert len(list(one.changed())) == len(REFS)
    assert not list(one.changed())
    one.show(REFS[1], InFlight(5, 5))
    assert not list(one.changed())  # its own
    other.show(REFS[2], InFlight(0, 3))
    assert list(one.changed()) == [(REFS[2], InFlight(0, 3, 0))]
    segment.close()


def test_board_does_not_count_a_worker_without_a_seat() -> None:
    segment = SharedCounts.make(2)
    one, other = SharedBoard(segment, 0), SharedBoard(segment, 1)
    other.show(REFS[0], InFlight(1, 1))
    assert not list(one.changed())
    assert not segment.table[:, HEADER:].any()
    with pytest.raises(InvalidArgumentError):
        one.seat(REFS[0], SEATS)
    segment.close()


def test_board_adds_up_only_processes_that_serve() -> None:
    segment = SharedCounts.make(3)
    boards = [SharedBoard(segment, row) for row in range(3)]
    for number, board in enumerate(boards):
        board.show_self(INSIDE, number + 1)
        if number:
            board.show_self(SERVING, 1)
    assert boards[0].elsewhere(INSIDE) == [2, 3]
    assert boards[1].elsewhere(INSIDE) == [3]
    segment.clear(2)
    assert boards[0].elsewhere(INSIDE) == [2]
    segment.close()


def test_segment_has_no_name_and_keeps_its_size() -> None:
    segment = SharedCounts.make(2)
    assert "memfd:" in os.readlink(f"/proc/self/fd/{segment.descriptor}")
    assert not os.get_inheritable(segment.descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)
    with pytest.raises(InvalidArgumentError):
        SharedCounts(segment.descriptor, 3)
    segment.close()


def test_segment_cells_are_aligned_and_stored_whole() -> None:
    """A writer flips a cell between two numbers that differ in every byte; no reader sees a third one."""
    segment = SharedCounts.make(1)
    board = SharedBoard(segment, 0)
    assert segment.table.ctypes.data % 64 == 0
    assert segment.table.strides[0] % 64 == 0
    assert segment.table.itemsize == 8
    board.seat(REFS[0], 0)
    low, high = 0, 0x7EFEFEFEFEFEFEFE
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            board.show(REFS[0], InFlight(low, high))
            board.show(REFS[0], InFlight(high, low))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20000):
            assert int(segment.table[0, HEADER]) in (low, high)
    finally:
        stop.set()
        writer.join()
        segment.close()


def test_segment_is_shared_by_its_descriptor() -> None:
    segment = SharedCounts.make(2)
    again = SharedCounts(os.dup(segment.descriptor), 2)
    again.table[1, HEADER] = 7
    assert segment.inflight(0) == 7
    again.close()
    segment.close()
