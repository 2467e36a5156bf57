"""What a coordinator takes from a store and writes to it, where both change at once."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.coordinator import CoordinatorOptions, serve
from kvxfer.coordinator.keeper import StoreKeeper
from kvxfer.coordinator.store import MemberRecord, MemoryStore, StoreChange
from kvxfer.errors import CoordinatorUnavailableError
from kvxfer.protocol.directory import Directory, IncarnationEnded, MemberEvent
from kvxfer.protocol.pace import Pace
from tests.support.coordinator import until
from tests.support.directory import LIMITS, MS
from tests.support.stores import CLOCK_US, record


class StillClock:
    def now_ns(self) -> int:
        return 0


class ToldStore(MemoryStore):
    """A shared store that says what a test has it say."""

    is_shared = True

    def __init__(self) -> None:
        super().__init__(CLOCK_US)
        self.changes: asyncio.Queue[StoreChange | Exception] = asyncio.Queue()
        self.put_gate = asyncio.Event()
        self.put_gate.set()
        self.puts: list[MemberRecord] = []

    async def put(self, record: MemberRecord) -> None:
        self.puts.append(record)
        await self.put_gate.wait()

    async def watch(self) -> AsyncIterator[StoreChange]:
        while True:
            change = await self.changes.get()
            if isinstance(change, Exception):
                raise change
            yield change


class KeptDirectory:
    """A directory, its store and what keeps them in step."""

    def __init__(self) -> None:
        self.directory = Directory(LIMITS, 0, epoch=bytes(16), is_shared=True)
        self.store = ToldStore()
        self.keeper = StoreKeeper(self.directory, self.store, StillClock())
        self.ended: list[Any] = []
        self.keeper.carry_out = self._carry_out

    def _carry_out(self, effects: Any) -> None:
        self.ended += effects
        self.keeper.changed(effects)

    async def __aenter__(self) -> KeptDirectory:
        await self.keeper.start("here:1")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.store.put_gate.set()
        await self.keeper.close()

    async def say(self, *records: MemberRecord, is_whole: bool = False, **owners: str) -> None:
        self.store.changes.put_nowait(StoreChange(is_whole, owners, records))
        await until(self.store.changes.empty, "the change to be taken")
        await asyncio.sleep(0)


async def test_an_order_is_not_taken_back_by_a_record_of_before_and_is_written_again() -> None:
    async with KeptDirectory() as kept:
        await kept.say(record(owner="x"), is_whole=True, x="there:1")
        await until(lambda: "a" in kept.directory, "the member")
        kept.directory.drain("a", "maintenance", now_ns=0)
        await kept.say(record(owner="x"), x="there:1")  # the order was not in the store yet
        await until(lambda: any(put.member.is_draining for put in kept.store.puts), "the order to be written")
        known = kept.directory.known("a")
        assert known is not None
        assert known[0].is_draining
        assert kept.store.puts[-1].owner == "x"


async def test_what_changes_while_it_is_written_is_written_again() -> None:
    async with KeptDirectory() as kept:
        await kept.say(record(owner="x"), is_whole=True, x="there:1")
        await until(lambda: "a" in kept.directory, "the member")
        kept.store.put_gate.clear()
        kept.keeper.pass_on("a")
        await until(lambda: kept.store.puts, "the first write to begin")
        kept.directory.drain("a", "maintenance", now_ns=0)
        kept.keeper.pass_on("a")
        kept.store.put_gate.set()
        await until(lambda: kept.store.puts[-1].member.is_draining, "the second write")
        await until(lambda: kept.keeper.unwritten == 0, "nothing to be left")


async def test_a_write_that_fails_is_still_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async with KeptDirectory() as kept:
        await kept.say(record(owner="x"), is_whole=True, x="there:1")
        await until(lambda: "a" in kept.directory, "the member")
        put, fails = kept.store.put, [True]

        async def once(written: MemberRecord) -> None:
            if fails.pop() if fails else False:
                raise CoordinatorUnavailableError("away")
            await put(written)

        monkeypatch.setattr(kept.store, "put", once)
        kept.keeper.pass_on("a")
        await until(lambda: kept.store.puts, "the second try")


async def test_the_next_process_at_an_address_is_not_the_one_before() -> None:
    """A coordinator crashed and came back before its lease was over; what answers at its address is another one."""
    async with KeptDirectory() as kept:
        await kept.say(record(owner="b1"), is_whole=True, b1="there:1")
        await until(lambda: kept.keeper.peers, "the other coordinator")
        assert kept.keeper.peers == {"b1": "there:1"}
        await kept.say(b1="there:1", b2="there:1")
        await until(lambda: len(kept.keeper.peers) == 2, "both")
        await kept.say(b2="there:1")
        await until(lambda: len(kept.keeper.peers) == 1, "the first to be gone")
        assert kept.keeper.is_taken("there:1")
        assert not kept.keeper.is_taken("elsewhere:1")
        await kept.say(b2="there:1", b0="here:1")  # ours, as the process before us was called
        await until(lambda: kept.keeper.is_taken("here:1"), "our own address")
        assert kept.keeper.peers == {"b2": "there:1"}


async def test_members_that_are_loaded_have_the_grace_of_all_of_them() -> None:
    """Each alone would have 3 s; together they are told that they may take longer to come back."""
    count = 10_000
    store = MemoryStore(CLOCK_US)
    for number in range(count):
        await store.put(record(f"a{number}", CLOCK_US + number))
    directory = Directory(LIMITS, 0, epoch=bytes(16), members_max=count, pace=Pace(1.0, 3.0, 2000))
    keeper = StoreKeeper(directory, store, StillClock())
    await keeper.start("here:1")
    try:
        ended: list[object] = []
        for now_ns in range(0, 20_000 * MS, 250 * MS):
            ended += directory.tick(now_ns)
        assert not ended
    finally:
        await keeper.close()


async def test_a_coordinator_whose_store_cannot_be_followed_ends_and_says_so(tmp_path: pathlib.Path) -> None:
    """It would seem alive else, and never know another coordinator's agent again."""
    store = ToldStore()
    options = CoordinatorOptions(token_file=str(tmp_path / "token"))
    task = asyncio.create_task(serve(options, on_ready=lambda ready: None, stop=asyncio.Event(), store=store))
    store.changes.put_nowait(ValueError("a fault of ours"))
    with pytest.raises(ValueError, match="a fault of ours"):
        async with asyncio.timeout(20):
            await task


def test_lost_ends_only_who_has_no_stream_here() -> None:
    directory = Directory(LIMITS, 0, epoch=bytes(16), is_shared=True)
    theirs = dataclasses.replace(record("b").member)
    directory.told(theirs, 1, is_judged=True, now_ns=0)
    assert directory.ended("b", now_ns=0, cause=MemberEvent.LOST) == ()
    assert directory.ended("nobody", now_ns=0, cause=MemberEvent.LOST) == ()
    directory.orphan("b", now_ns=0)
    assert directory.ended("b", now_ns=0, cause=MemberEvent.LOST) == (IncarnationEnded(theirs.ref, MemberEvent.LOST),)
