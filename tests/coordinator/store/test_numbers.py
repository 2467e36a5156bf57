"""The counter of incarnations: what was given is always believed, what is shown within a bound that nobody can move."""

from __future__ import annotations

import pathlib

import pytest

from kvxfer.coordinator.store import AHEAD_MAX, SqliteStore
from kvxfer.coordinator.store.base import NumberLine
from kvxfer.errors import RefusedError
from tests.support.etcd import EtcdNodes, needs_etcd
from tests.support.stores import CLOCK_US, etcd_kind

FAR_US = CLOCK_US + 3 * AHEAD_MAX


def test_what_is_shown_does_not_move_the_bound() -> None:
    """An agent that registers again and again could else bring the numbers to where no other coordinator believes
    them."""
    numbers = NumberLine(CLOCK_US)
    assert numbers.admit(CLOCK_US + AHEAD_MAX)
    with pytest.raises(RefusedError, match=r"far above every number of this cluster; was the coordinator's clock"):
        numbers.admit(CLOCK_US + AHEAD_MAX + 1)
    assert not numbers.admit(CLOCK_US)


def test_what_was_given_is_believed() -> None:
    numbers = NumberLine(CLOCK_US)
    numbers.stored(FAR_US)
    assert not numbers.admit(FAR_US)
    given = numbers.above(0)
    assert given == FAR_US + 1
    assert not numbers.admit(given)
    with pytest.raises(RefusedError):
        numbers.admit(given + 1)


async def test_a_file_of_a_clock_that_was_ahead_opens(tmp_path: pathlib.Path) -> None:
    before = SqliteStore(tmp_path / "store.db", FAR_US)
    await before.open("x", "x:1")
    given = await before.next_number()
    await before.close()
    after = SqliteStore(tmp_path / "store.db", CLOCK_US)
    await after.open("y", "y:1")
    try:
        await after.admit_number(given)
        assert await after.next_number() > given
    finally:
        await after.close()


@needs_etcd
async def test_another_coordinators_number_is_believed(standing_etcd: EtcdNodes) -> None:
    """Whose clock is ahead, gave it; the one that never gave a number since its start takes the agent over."""
    standing_etcd.empty()
    kind = etcd_kind(standing_etcd)
    async with kind.opened("x") as ahead, kind.opened("y") as behind:
        ahead._numbers.stored(FAR_US)  # type: ignore[attr-defined]
        watching = behind.watch()
        first = await anext(watching)
        assert first.is_whole
        given = await ahead.next_number()
        await anext(watching)
        await behind.admit_number(given)
        await watching.aclose()  # type: ignore[attr-defined]
    async with kind.opened("z") as later:
        watching = later.watch()
        await anext(watching)
        await later.admit_number(given)
        await watching.aclose()  # type: ignore[attr-defined]
