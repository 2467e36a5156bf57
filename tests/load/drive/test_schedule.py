"""What is due when, in which process, and that nothing is lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.load.drive.schedule import BodyStore, Schedule, due_times, process_count, shares
from kvxfer.workload.request import DispatchMode, Workload, WorkloadRequest
from tests.support.load_server import sessions_of, workload_of


def request(
    number: int, due_s: float | None, session: int | None = None, turn: int = 0, **more: Any
) -> WorkloadRequest:
    return WorkloadRequest(number, 5, 2, due_s, session=session, turn=turn, **more)


@pytest.mark.parametrize(
    ("requests", "span_s", "asked", "expected"),
    [(10, 10, 0, 1), (5000, 10, 0, 1), (5001, 10, 0, 2), (100_000, 10, 0, 4), (3, 1, 8, 3), (100, 0, 0, 1)],
)
def test_process_count(requests: int, span_s: float, asked: int, expected: int) -> None:
    workload = workload_of([place * span_s / max(requests - 1, 1) for place in range(requests)])
    assert process_count(workload, asked, 4) == expected


def test_a_session_stays_in_its_process() -> None:
    workload = sessions_of(7, 3, think_s=1.0, mode=DispatchMode.THINK)
    found = shares(workload, 3)
    assert sorted(one.number for share in found for one in share) == list(range(21))
    assert [sorted({one.session for one in share}) for share in found] == [[0, 3, 6], [1, 4], [2, 5]]


def test_turns_by_their_time() -> None:
    schedule = Schedule([request(0, 0.0, 1), request(1, 5.0, 1, 1)], DispatchMode.TIMESTAMP)
    assert [schedule.take()[0], schedule.take()[0]] == [0.0, 5.0]
    assert schedule.due_s == math.inf


@pytest.mark.parametrize("due_s", [None, 5.0])
def test_turns_after_the_turn_before(due_s: float | None) -> None:
    schedule = Schedule([request(0, 1.0, 1), request(1, due_s, 1, 1, think_s=2.0)], DispatchMode.THINK)
    assert schedule.take()[0] == 1.0
    assert schedule.due_s == math.inf
    assert not list(schedule.ended(0, 8.0, is_good=True))
    assert schedule.due_s == 10.0


def test_a_broken_session_is_left() -> None:
    schedule = Schedule(
        [request(0, 1.0, 1), *(request(n, None, 1, n, think_s=2.0) for n in (1, 2))], DispatchMode.THINK
    )
    schedule.take()
    assert [(due_s, one.number) for due_s, one in schedule.ended(0, 8.0, is_good=False)] == [(10.0, 1), (12.0, 2)]


def test_turns_that_nobody_sent_are_due_one_after_another() -> None:
    session = [request(0, 9.0, 0), request(1, None, 0, 1, think_s=2.0), request(2, 10.0, 0, 2, think_s=3.0)]
    for mode, expected in ((DispatchMode.THINK, [9.0, 11.0, 14.0]), (DispatchMode.TIMESTAMP, [9.0, 11.0, 10.0])):
        assert [due_s for due_s, _ in due_times(session, mode, 5.0)] == expected
    assert [due_s for due_s, _ in due_times(session[1:], DispatchMode.THINK, 20.0)] == [22.0, 25.0]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    requests: list[WorkloadRequest] = []
    turns: dict[int, int] = {}
    for number in range(draw(st.integers(1, 30))):
        session = draw(st.none() | st.integers(0, 4))
        turn = 0 if session is None else turns.get(session, 0)
        if session is not None:
            turns[session] = turn + 1
        due_s = None if turn and draw(st.booleans()) else float(number)
        requests.append(request(number, due_s, session, turn, think_s=draw(st.sampled_from([0.0, 3.0]))))
    return Workload("w", requests, mode=draw(st.sampled_from(DispatchMode)))


@given(workloads(), st.integers(1, 4), st.data())
def test_each_request_comes_exactly_once(workload: Workload, processes: int, data: st.DataObject) -> None:
    seen: list[int] = []
    for share in shares(workload, processes):
        schedule = Schedule(share, workload.mode)
        flying: list[int] = []
        now_s = 0.0
        while schedule.due_s < math.inf or flying:
            if data.draw(st.integers(0, 20)) == 0:
                seen += flying
                if data.draw(st.booleans()):
                    seen += [one.number for _, one in schedule.drop(now_s)]
                else:
                    told, others = schedule.clear()
                    seen += [one.number for _, one in told]
                    left = [one for one in share if one.number not in seen]
                    assert len(left) == others
                    due = due_times(left, workload.mode, now_s)
                    seen += [one.number for _, one in due]
                    assert all(one.due_s is not None or due_s >= now_s + one.think_s for due_s, one in due)
                break
            if schedule.due_s < math.inf and (not flying or data.draw(st.booleans())):
                due_s, one = schedule.take()
                now_s = max(now_s, due_s)
                flying.append(one.number)
            else:
                number = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
                seen.append(number)
                seen += [one.number for _, one in schedule.ended(number, now_s, is_good=data.draw(st.booleans()))]
        assert schedule.due_s == math.inf
        assert not schedule.is_waiting
    assert sorted(seen) == list(range(len(workload.requests)))


def test_bodies_are_made_in_the_order_they_are_due() -> None:
    made: list[int] = []

    def make(one: WorkloadRequest) -> bytes:
        made.append(one.number)
        return b"x" * 10

    first, second, third, turn = (request(number, float(number)) for number in range(4))
    store = BodyStore(make, [(2.0, third), (0.0, first), (1.0, second)])
    assert store.prepare() is first
    assert store.bytes == 10
    assert store.take(second) == b"x" * 10  # not made ahead
    assert (store.late, made, store.bytes) == (1, [0, 1], 10)
    store.expect(1.5, turn)
    store.expect(1.6, first)  # has been made
    assert [store.prepare(), store.prepare(), store.prepare()] == [turn, third, None]
    for one in (first, third, turn):
        store.take(one)
    assert (store.late, store.bytes) == (1, 0)


def test_bodies_of_turns_whose_time_is_not_known_take_half_the_room() -> None:
    first, *turns = (request(number, float(number)) for number in range(5))
    store = BodyStore(lambda _: b"x" * 10, [(0.0, first)], turns, bytes_max=40)
    assert [store.prepare() for _ in range(3)] == [first, turns[0], None]
    store.expect(3.0, turns[0])
    store.expect(4.0, turns[2])
    assert [store.prepare() for _ in range(2)] == [turns[2], None]
    store.take(first)
    store.take(turns[2])
    assert [store.prepare() for _ in range(2)] == [turns[1], None]
