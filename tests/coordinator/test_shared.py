"""Two coordinators on one etcd: agents at one, watchers at the other; one ends, its agents come to the other."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvxfer.coordinator.server import LEASE_BEYOND_S
from kvxfer.errors import RefusedError
from kvxfer.rpc import MembershipWatch, drain
from kvxfer.types import Load
from tests.support.coordinator import PATIENCE_S, Cluster, Recorder, pool, running, until
from tests.support.e2e.cluster import until as eventually
from tests.support.etcd import EtcdNodes, etcd_nodes, needs_etcd
from tests.support.local_http import free_ports
from tests.support.stores import etcd_kind
from tests.support.trust import coordinator_process

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 3) as started:
        yield started


@pytest.fixture
async def pair(nodes: EtcdNodes, tmp_path: pathlib.Path) -> AsyncIterator[tuple[Cluster, Cluster]]:
    await asyncio.to_thread(nodes.empty)
    store = {"store": f"etcd:{nodes.endpoints}"}
    async with running(tmp_path, **store) as one, running(tmp_path, **store) as two:
        yield one, two


@contextlib.asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[MembershipWatch]:
    async with MembershipWatch(cluster.address, cluster.token) as watch:
        await watch.wait_connected()
        yield watch


def refs(watch: MembershipWatch) -> set[object]:
    return {member.ref for member in watch.membership.members}


def keys(agent: Recorder) -> dict[str, bytes]:
    return {name: member.session_key for name, member in agent.members.items()}


async def test_agents_and_watchers_of_two_coordinators_see_each_other(pair: tuple[Cluster, Cluster]) -> None:
    one, two = pair
    first, second = one.agent("a"), two.agent("b", nonce=2)
    ref_a, ref_b = await first.session.start(), await second.session.start()
    assert ref_a.incarnation.number != ref_b.incarnation.number
    async with watching(one) as at_one, watching(two) as at_two:
        await until(lambda: refs(at_one) == refs(at_two) == {ref_a, ref_b}, "both to be known at both")
        await until(lambda: "b" in first.members and "a" in second.members, "the agents to know each other")
        assert keys(first)["b"] == keys(second)["a"] != b""
        first.session.set_pools([pool()])
        await until(lambda: [m.pools for m in at_two.membership.members if m.pools], "the pools at the other one")
        await drain(two.address, two.token, "a")
        await until(lambda: first.drains, "the drain ordered at the other coordinator")
        with pytest.raises(RefusedError, match="in use by the live agent"):
            await two.agent("a", nonce=3).session.start()
        await first.session.close()
        await until(lambda: refs(at_two) == {ref_b}, "a to have left")
    await until(lambda: second.gone == [ref_a], "b to hear that a is gone")


@pytest.mark.deep
async def test_an_agent_that_died_with_a_coordinator_ends_though_that_is_back_at_once(
    nodes: EtcdNodes, tmp_path: pathlib.Path
) -> None:
    """What answers at the address is the next process, and not the one that judged the agent."""
    await asyncio.to_thread(nodes.empty)
    [port] = free_ports(1)
    times = {"heartbeat_s": 0.2, "suspect_after_s": 0.8, "dead_after_s": 2.0}
    store = f"etcd:{nodes.endpoints}"
    options = {"store": store, "port": port, "token_file": tmp_path / "token", **times}
    async with running(tmp_path, store=store) as one, watching(one) as watch:
        async with coordinator_process(tmp_path, options) as two:
            agent = one.agent("a", target=two.address)
            ref = await agent.session.start()
            await until(lambda: refs(watch) == {ref}, "the agent at the other coordinator")
            await asyncio.sleep(1.0)  # the other coordinator is watched by then
            two.process.kill()
            agent.cut()
            await two.process.wait()
        async with coordinator_process(tmp_path, options):
            await until(lambda: refs(watch) == set(), "the agent to be gone")


async def test_loads_cross(pair: tuple[Cluster, Cluster]) -> None:
    one, two = pair
    agent = one.agent("a")
    await agent.session.start()
    async with watching(two) as watch:
        for queued in (3, 0, 5):
            agent.session.set_load(Load(queued_requests=queued))
            await until(lambda queued=queued: loads(watch) == {"a": queued}, "the load at the other coordinator")


def loads(watch: MembershipWatch) -> dict[str, int]:
    return {member.ref.agent_id: member.load.queued_requests for member in watch.membership.members}


async def test_a_coordinator_ends_and_its_agents_keep_their_incarnations(pair: tuple[Cluster, Cluster]) -> None:
    one, two = pair
    agent = one.agent("a", target=f"{one.address},{two.address}")
    stays = two.agent("b", nonce=2)
    ref, _ = await agent.session.start(), await stays.session.start()
    for cluster, other in ((one, two), (two, one), (one, two)):
        async with watching(other) as watch:
            await until(lambda watch=watch: ref in refs(watch), "the agent")
            heard: list[object] = []
            watch._on_membership = lambda view, heard=heard: heard.extend(view.gone)
            await cluster.stop()
            await until(lambda: agent.session.is_connected, "the agent to be at the other one")
            await until(lambda watch=watch: ref in {m.ref for m in watch.membership.members if not m.is_suspect}, "it")
            assert heard == []
            assert agent.session.ref == ref
            await cluster.start()
    assert ref not in stays.gone


async def test_a_late_write_of_a_coordinator_that_goes_on_is_taken_back(
    pair: tuple[Cluster, Cluster], nodes: EtcdNodes
) -> None:
    agent = pair[0].agent("a")
    ref = await agent.session.start()
    async with etcd_kind(nodes).opened("z") as store, watching(pair[1]) as watch:
        (real,) = await store.load()
        await agent.session.close()
        await until(lambda: not refs(watch), "a to have left")
        await store.put(real)

        async def is_gone() -> bool:
            return await store.load() == ()

        await eventually(is_gone, "the record to be taken back", within_s=PATIENCE_S)
        await until(lambda: ref not in refs(watch), "a to stay gone")


@pytest.mark.deep
async def test_a_coordinator_that_is_cut_off_from_the_store_only_keeps_its_agents(
    nodes: EtcdNodes, tmp_path: pathlib.Path
) -> None:
    await asyncio.to_thread(nodes.empty)
    first = nodes.endpoints.split(",")[0]
    everything = {"store": f"etcd:{nodes.endpoints}"}
    async with running(tmp_path, store=f"etcd:{first}") as one, running(tmp_path, **everything) as two:
        agent, stays = one.agent("a"), two.agent("b", nonce=2)
        ref, _ = await agent.session.start(), await stays.session.start()
        async with watching(two) as watch:
            await until(lambda: ref in refs(watch), "a")
            nodes.signal(0, signal.SIGSTOP)
            try:
                agent.session.set_load(Load(queued_requests=7))
                began_s = time.monotonic()
                lease_s, grace_s = one.options.dead_after_s + LEASE_BEYOND_S, one.options.dead_after_s
                await until(lambda: time.monotonic() > began_s + lease_s + 2 * grace_s, "lease and grace to be over")
                assert loads(watch)["a"] == 7
                assert not any(member.is_suspect for member in watch.membership.members)
                agent.session.set_draining()
                await until(lambda: any(m.is_draining for m in watch.membership.members), "what a says at the other")
            finally:
                nodes.signal(0, signal.SIGCONT)
            await agent.session.close()
            await until(lambda: ref not in refs(watch), "a to have left")
        assert stays.gone == [ref]


async def test_an_agent_that_dies_with_its_coordinator_ends(pair: tuple[Cluster, Cluster]) -> None:
    one, two = pair
    dies, stays = one.agent("a"), two.agent("b", nonce=2)
    ref, _ = await dies.session.start(), await stays.session.start()
    await until(lambda: "a" in stays.members, "b to know a")
    async with running(pathlib.Path(two.options.token_file).parent, store=two.options.store) as third:
        also = third.agent("c", nonce=3)
        await also.session.start()
        await until(lambda: {"a", "b"} <= set(also.members), "c to know both")
        dies.cut()
        await one.stop()
        await until(lambda: stays.gone == also.gone == [ref], "a to be over at both that are left")
        await also.session.close()
    await until(lambda: stays.gone[1:] == [also.session.ref], "c to have left")
    await one.start()
    async with watching(one) as watch:
        await until(lambda: {m.ref.agent_id for m in watch.membership.members} == {"b"}, "a to be gone for good")


@pytest.mark.deep
async def test_an_etcd_that_lost_its_disks_loses_no_agent(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: pathlib.Path
) -> None:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 3) as nodes:
        store = {"store": f"etcd:{nodes.endpoints}"}
        async with running(tmp_path, **store) as one, running(tmp_path, **store) as two:
            agent, stays = one.agent("a"), two.agent("b", nonce=2)
            ref, other = await agent.session.start(), await stays.session.start()
            await until(lambda: "a" in stays.members and "b" in agent.members, "both to know each other")
            await asyncio.to_thread(nodes.replace_all)
            fresh = two.agent("c", nonce=3)
            late = await fresh.session.start()
            assert late.incarnation.number > max(ref.incarnation.number, other.incarnation.number)
            async with watching(one) as at_one, watching(two) as at_two:
                await until(lambda: refs(at_one) == refs(at_two) == {ref, other, late}, "all to be known at both")
            async with etcd_kind(nodes).opened("z") as looks:

                async def are_kept() -> bool:
                    return {record.member.ref for record in await looks.load()} == {ref, other, late}

                await eventually(are_kept, "all to be written again", within_s=PATIENCE_S)
            assert agent.gone == stays.gone == []
