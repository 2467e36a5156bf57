"""The etcd store's own: what several coordinators see of each other, and a watch that cannot be believed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping

import pytest

from kvxfer.coordinator.store import EtcdStore, Store, StoreChange
from kvxfer.coordinator.store import etcd as etcd_module
from kvxfer.coordinator.store.etcd_link import EtcdLink, rpc
from kvxfer.errors import CoordinatorUnavailableError
from tests.support.coordinator import PATIENCE_S, until
from tests.support.etcd import EtcdNodes, etcd_nodes, needs_etcd
from tests.support.stores import CLOCK_US, StoreKind, etcd_kind, record

pytestmark = needs_etcd


class Seen:
    """A watcher that comes back for ever, and what it was told."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.members: dict[str, str] = {}
        self.owners: Mapping[str, str] = {}
        self.wholes = 0
        self.failures: list[str] = []

    def take(self, change: StoreChange) -> None:
        if change.is_whole:
            self.members.clear()
            self.wholes += 1
        self.members |= {found.agent_id: found.owner for found in change.records}
        for agent_id in change.removed:
            self.members.pop(agent_id, None)
        self.owners = change.owners

    async def follow(self) -> None:
        while True:
            try:
                async for change in self.store.watch():
                    self.take(change)
            except CoordinatorUnavailableError as error:
                self.failures.append(str(error))
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def following(store: Store) -> AsyncIterator[Seen]:
    seen = Seen(store)
    task = asyncio.create_task(seen.follow())
    try:
        await until(lambda: seen.wholes, "the first view")
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def etcd(standing_etcd: EtcdNodes) -> StoreKind:
    standing_etcd.empty()
    return etcd_kind(standing_etcd)


async def test_two_coordinators_see_each_other(etcd: StoreKind) -> None:
    async with etcd.opened("x") as one, etcd.opened("y") as two, following(two) as seen:
        await one.put(record(owner="x"))
        await two.catch_up()
        assert seen.members == {"a": "x"}
        assert seen.owners == {"x": "x:1", "y": "y:1"}
        await two.put(record(sessions=2, owner="y"))
        await one.put(record(sessions=1, owner="x"))
        await one.remove(record().member.ref, 1)
        await until(lambda: seen.members == {"a": "y"}, "the newer record")
        assert {await one.next_number(), await two.next_number(), await one.next_number()} == {
            CLOCK_US + 1,
            CLOCK_US + 2,
            CLOCK_US + 3,
        }
        await one.close()
        await until(lambda: seen.owners == {"y": "y:1"}, "x to have left")
        await two.remove(record().member.ref, 2)
        await until(lambda: seen.members == {}, "the removal")


async def test_a_coordinator_that_is_silent_is_dead_and_may_come_back(etcd: StoreKind) -> None:
    async with etcd.opened("y") as two, following(two) as seen, etcd.opened("x") as one:
        assert isinstance(one, EtcdStore)
        await until(lambda: "x" in seen.owners, "x")
        for pulse in one._pulses:
            pulse.cancel()
        await until(lambda: seen.owners == {"y": "y:1"}, "x to be dead")
        await one._renew()
        await until(lambda: seen.owners == {"x": "x:1", "y": "y:1"}, "x to be back")


async def test_a_compacted_watch_is_a_whole_view(etcd: StoreKind, standing_etcd: EtcdNodes) -> None:
    async with etcd.opened("x") as one, etcd.opened("y") as two:
        assert isinstance(two, EtcdStore)
        await one.put(record(owner="x"))
        for sessions in range(2, 6):
            await one.put(record(sessions=sessions, owner="x"))
        link = EtcdLink(tuple(standing_etcd.endpoints.split(",")))
        now = (await link.ask("KVStub", "Range", rpc().RangeRequest(key=b"x"))).header.revision
        await link.ask("KVStub", "Compact", rpc().CompactionRequest(revision=now))
        await link.close()
        assert [response async for response in two._responses(now - 3)] == []
        async with following(two) as seen:
            assert seen.members == {"a": "x"}


async def test_bytes_that_are_no_record_are_left_out(etcd: StoreKind, standing_etcd: EtcdNodes) -> None:
    async with etcd.opened("x") as one, following(one) as seen:
        link = EtcdLink(tuple(standing_etcd.endpoints.split(",")))
        await link.ask("KVStub", "Put", rpc().PutRequest(key=b"/kvxfer/v1/agents/bad", value=b"\xff\xff"))
        await link.close()
        await one.put(record())
        await until(lambda: seen.members == {"a": "x"}, "the record")
        assert await one.load() == (record(),)


async def test_a_lease_that_is_not_renewed_hides_no_old_view(etcd: StoreKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that is cut off must know that its view is old before its agents seem dead to it."""

    async def never(*_: object) -> bool:
        await asyncio.Event().wait()
        return False

    async def unanswered() -> int:
        await asyncio.Event().wait()
        return 0

    async with etcd.opened("x") as one, following(one) as seen:
        assert isinstance(one, EtcdStore)
        monkeypatch.setattr(one._link, "keep_alive", never)
        monkeypatch.setattr(one, "_newest_unseen", unanswered)
        await until(lambda: seen.failures, "the watch to be believed no more")
        assert "does not say within" in seen.failures[0]


async def test_an_endpoint_that_is_mute_is_connected_to_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun while the network was away would be waited for long after it is back."""
    connections: list[asyncio.StreamWriter] = []
    monkeypatch.setattr("kvxfer.coordinator.store.etcd_link.CALL_S", 0.2)
    server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    link = EtcdLink((f"127.0.0.1:{server.sockets[0].getsockname()[1]}",))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(connections) < 3:
                with pytest.raises(CoordinatorUnavailableError):
                    await link.ask("KVStub", "Range", rpc().RangeRequest(key=b"x"))
    finally:
        await link.close()
        server.close()
        for writer in connections:
            writer.close()


@pytest.mark.deep
async def test_a_node_that_hangs_and_a_lost_majority(tmp_path_factory: pytest.TempPathFactory) -> None:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 3) as nodes:
        kind = etcd_kind(nodes)
        async with kind.opened("x") as one, following(one) as seen:
            nodes.signal(0, signal.SIGSTOP)  # the first endpoint, which the watch is at
            await one.put(record())
            await until(lambda: seen.members == {"a": "x"}, "the record by another node")
            before = await one.next_number()
            nodes.kill(1)
            with pytest.raises(CoordinatorUnavailableError, match=f"the store etcd:{nodes.endpoints} does not answer"):
                await one.next_number()
            await until(lambda: any("does not answer" in failure for failure in seen.failures), "the watch to be lost")
            wholes = seen.wholes
            nodes.signal(0, signal.SIGCONT)
            await until(lambda: seen.wholes > wholes, "a whole view again")
            assert await one.next_number() > before


async def test_those_who_ask_an_etcd_that_hangs_wait_together(etcd: StoreKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, each would wait as long again, and agents are not that patient."""
    monkeypatch.setattr(etcd_module, "CATCH_UP_S", 0.3)
    async with etcd.opened() as store:

        async def hang() -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(store, "_reach_newest", hang)
        began_s = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(store.catch_up() for _ in range(20)), return_exceptions=True)
        assert all(isinstance(answer, CoordinatorUnavailableError) for answer in answers)
        assert asyncio.get_running_loop().time() - began_s < 10 * 0.3
