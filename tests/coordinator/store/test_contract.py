"""What every store keeps to, whatever it is made of."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.coordinator.store import AHEAD_MAX
from kvxfer.errors import RefusedError
from tests.support.stores import CLOCK_US, StoreKind, record


async def test_numbers_grow_from_the_clock_and_none_is_given_twice(kind: StoreKind) -> None:
    async with kind.opened() as store:
        numbers = await asyncio.gather(*(store.next_number() for _ in range(20)))
        assert len(set(numbers)) == 20
        assert min(numbers) > CLOCK_US
        assert await store.next_number() > max(numbers)


async def test_an_admitted_number_is_never_given_again(kind: StoreKind) -> None:
    async with kind.opened() as store:
        await store.admit_number(CLOCK_US + 5000)
        await store.admit_number(3)
        assert await store.next_number() > CLOCK_US + 5000
        with pytest.raises(RefusedError, match="far above every number"):
            await store.admit_number(CLOCK_US + 2 * AHEAD_MAX)


async def test_numbers_and_records_outlive_a_durable_store(kind: StoreKind) -> None:
    async with kind.opened() as store:
        await store.admit_number(CLOCK_US + 5000)
        last = await store.next_number()
        await store.put(record())
    async with kind.opened() as store:
        if kind.is_durable:
            assert await store.next_number() > last
            assert await store.load() == (record(),)
        else:
            assert await store.load() == ()


async def test_a_record_gives_way_to_a_newer_one_only(kind: StoreKind) -> None:
    async with kind.opened() as store:
        await store.put(record(sessions=3))
        await store.put(record(sessions=2, owner="old"))
        assert await store.load() == (record(sessions=3),)
        await store.put(record(sessions=3, owner="x"))
        await store.put(record(number=CLOCK_US + 9, sessions=1))
        assert await store.load() == (record(number=CLOCK_US + 9, sessions=1),)


async def test_a_removal_does_not_take_what_is_newer(kind: StoreKind) -> None:
    async with kind.opened() as store:
        await store.put(record(sessions=3))
        await store.put(record("b"))
        await store.remove(record().member.ref, 2)
        assert sorted(found.agent_id for found in await store.load()) == ["a", "b"]
        await store.remove(record().member.ref, 3)
        await store.remove(record().member.ref, 3)
        assert await store.load() == (record("b"),)


async def test_closing_twice_and_asking_again(kind: StoreKind) -> None:
    store = kind.make()
    await store.open("x", "x:1")
    await store.catch_up()
    await store.close()
    await store.close()
    assert repr(store)
