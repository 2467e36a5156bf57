"""Which block goes first, and which units are free: pure, against plain models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connectors.tier.extents import FreeUnits
from kvxfer.connectors.tier.shelf import Shelf
from kvxfer.errors import InvalidArgumentError, StoreFullError

STEPS = st.lists(st.tuples(st.sampled_from(("put", "use", "pin", "unpin", "drop")), st.integers(0, 9)), max_size=40)


@given(STEPS, st.integers(1, 50))
def test_the_bound_holds_and_what_is_pinned_stays(steps: list[tuple[str, int]], capacity: int) -> None:
    shelf: Shelf[int] = Shelf(capacity)
    pinned: dict[int, int] = {}
    for what, key in steps:
        size = 3 * key
        if what == "put" and key not in shelf:
            before, order = set(shelf), list(shelf)
            try:
                victims = shelf.make_room(size)
            except StoreFullError:
                assert set(shelf) == before
                assert size + sum(3 * key for key in before if pinned.get(key)) > capacity
                continue
            assert not any(pinned.get(victim) for victim in victims)
            assert victims == [key for key in order if not pinned.get(key)][: len(victims)]
            shelf.put(key, size)
        elif what == "use":
            shelf.use([key])
        elif what == "pin":
            shelf.pin(key)
            pinned[key] = pinned.get(key, 0) + 1
        elif what == "unpin" and pinned.get(key):
            shelf.unpin(key)
            pinned[key] -= 1
        elif what == "drop":
            shelf.remove(key)
        assert shelf.used_bytes == sum(3 * key for key in shelf) <= capacity


def test_the_beginning_of_a_prompt_goes_last() -> None:
    shelf: Shelf[str] = Shelf(6)
    for key in "abcdef":
        shelf.put(key, 1)
    shelf.use("abc")
    shelf.use("def")
    assert shelf.make_room(4) == ["c", "b", "a", "f"]


def test_a_store_that_shrank_makes_room_until_it_is_restored() -> None:
    shelf: Shelf[str] = Shelf(6)
    for key in "abcdef":
        shelf.put(key, 1)
    shelf.shrink(3)
    shelf.shrink(5)
    assert shelf.make_room(1) == ["a", "b", "c", "d"]
    assert shelf.capacity_bytes == 3
    shelf.restore()
    assert shelf.make_room(4) == []
    assert shelf.capacity_bytes == 6


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40))
def test_a_unit_is_free_or_taken_once(count: int, steps: list[tuple[bool, int]]) -> None:
    units = FreeUnits(count)
    taken: list[np.ndarray] = []
    for is_take, number in steps:
        if is_take:
            free = count - sum(map(len, taken))
            try:
                taken.append(units.take(number))
            except StoreFullError:
                assert number > free
        elif taken:
            units.give(taken.pop(number % len(taken)))
        used = [int(unit) for run in taken for unit in run]
        assert len(set(used)) == len(used) == count - units.free
        assert all(0 <= unit < count for unit in used)
        assert units.runs <= units.free
    for run in taken:
        units.give(run)
    assert (units.free, units.runs) == (count, 1)


def test_a_block_gets_neighbours_where_there_are_any() -> None:
    units = FreeUnits(10)
    first, second, third = units.take(3), units.take(2), units.take(4)
    units.give(second)
    assert units.take(2).tolist() == [3, 4]
    units.give(first)
    units.give(third)
    assert units.take(8).tolist() == [5, 6, 7, 8, 9, 0, 1, 2]
    with pytest.raises(StoreFullError):
        units.take(1)
    with pytest.raises(InvalidArgumentError):
        units.give(np.array([10], np.uint32))
    units.give(np.array([4], np.uint32))
    with pytest.raises(InvalidArgumentError):
        units.give(np.array([4], np.uint32))
