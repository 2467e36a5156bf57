"""Seats of the shared memory: no two workers share one, and none is given again while something may count there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.router.group.messages import NO_SEAT
from kvxfer.router.group.seats import Seats
from tests.support.fleet import stock

REFS = [stock(f"d{number}").ref for number in range(6)]


def test_seats_are_taken_until_there_are_none() -> None:
    seats = Seats(2)
    assert [seats.take(ref) for ref in REFS[:4]] == [0, 1, NO_SEAT, NO_SEAT]
    assert seats.take(REFS[1]) == 1


def test_seat_is_free_again_once_all_have_applied_and_nothing_runs() -> None:
    seats = Seats(1)
    seats.take(REFS[0])
    seats.leave(REFS[0], 5)
    assert not seats.freed(4, lambda seat: 0)
    assert not seats.freed(5, lambda seat: 1)
    assert seats.take(REFS[1]) == NO_SEAT
    assert seats.freed(5, lambda seat: 0) == (REFS[0],)
    assert seats.take(REFS[1]) == 0


def test_seat_of_a_worker_that_comes_back_is_its_own() -> None:
    seats = Seats(1)
    seats.take(REFS[0])
    seats.leave(REFS[0], 5)
    assert seats.take(REFS[0]) == 0
    assert not seats.freed(9, lambda seat: 0)


steps = st.tuples(st.sampled_from(["take", "leave", "freed"]), st.sampled_from(REFS), st.integers(0, 1))


@given(st.lists(steps, max_size=80))
def test_seats_are_never_shared(steps: list[tuple[str, object, int]]) -> None:
    seats = Seats(3)
    held: dict[object, int] = {}
    version = 0
    for what, ref, count in steps:
        if what == "take":
            seat = seats.take(ref)  # type: ignore[arg-type]
            if seat != NO_SEAT:
                assert held.get(ref, seat) == seat
                held[ref] = seat
        elif what == "leave":
            version += 1
            seats.leave(ref, version)  # type: ignore[arg-type]
        else:
            for freed in seats.freed(version - count, lambda seat, count=count: count and seat):  # type: ignore[misc]
                del held[freed]
        assert len(set(held.values())) == len(held)
