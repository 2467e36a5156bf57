"""Two coordinators on three etcd nodes, each killed or stopped under load: no request fails, no agent gets another
incarnation, and the membership is whole again soon after."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kvxfer.rpc import MembershipWatch, load_token
from tests.support.e2e.cluster import Cluster, together, until
from tests.support.e2e.load import Load
from tests.support.etcd import EtcdNodes, etcd_nodes, needs_etcd

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_etcd]

WHOLE_S = 5.0
"""After the end of a fault. Measured on an idle machine; a busy one gets BUSY times as long."""
BUSY = 4
MOVED_S = 20.0
WORKERS = ("p1", "d1")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 3) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    nodes: EtcdNodes, tmp_path_factory: pytest.TempPathFactory, tiny_model: object
) -> AsyncIterator[Cluster]:
    """``p1``, ``d1`` and the router know both coordinators."""
    async with Cluster(tmp_path_factory.mktemp("several"), str(tiny_model)) as started:
        store = {"store": f"etcd:{nodes.endpoints}", "metrics_port": 0}
        await started.coordinator(**store)
        await started.coordinator("second", **store)
        both = {"coordinator": f"{started.address},{started['second'].address}"}
        await together(
            started.router(**both), started.worker("p1", "prefill", **both), started.worker("d1", "decode", **both)
        )
        await started.seen(*WORKERS)
        yield started


async def incarnations(cluster: Cluster) -> dict[str, object]:
    return {name: entry["incarnation"] for name, entry in (await cluster.directory()).items()}


async def whole(cluster: Cluster, within_s: float) -> float:
    """Wait until agents, router and all coordinators that run know both workers and doubt none; how long it took."""
    began_s = time.monotonic()
    token = load_token(cluster.token_file)

    async def is_whole() -> bool:
        for name in WORKERS:
            if not (await cluster.statistics(name))["agent"]["is_coordinator_connected"]:
                return False
        for name in ("coordinator", "second"):
            if name not in cluster:
                continue
            async with MembershipWatch(cluster[name].address, token) as watch:
                members = (await watch.wait_connected(MOVED_S)).members
            if {m.ref.agent_id for m in members} != set(WORKERS) or any(m.is_suspect for m in members):
                return False
        return True

    await cluster.seen(*WORKERS, within_s=within_s)
    await until(is_whole, "agents, router and coordinators to agree", within_s=within_s)
    return time.monotonic() - began_s


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("name", ["coordinator", "second"])
async def test_a_coordinator_is_lost_under_load(cluster: Cluster, name: str, fault: str) -> None:
    await whole(cluster, MOVED_S)
    before = await incarnations(cluster)
    async with Load(cluster.url("router")) as load:
        await load.some(3)
        if fault == "kill":
            await cluster.kill(name)
        else:
            cluster.pause(name)
        ended_s = time.monotonic() + 10.0

        async def is_past() -> bool:
            return time.monotonic() > ended_s

        await load.some(10)
        await until(is_past, "the lease of the coordinator to be over, and the grace of its agents", within_s=15.0)
        await load.some(3)
        if fault == "kill":
            await cluster.restart(name)
        else:
            cluster.unpause(name)
        took_s = await whole(cluster, WHOLE_S * BUSY)
        await load.some(3)
    print(f"{fault} {name}: {load.done} answers, {load.remote} remote, whole after {took_s:.2f} s")
    assert load.failed == []
    assert load.remote == load.done
    assert await incarnations(cluster) == before


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("node", [0, 1])
async def test_an_etcd_node_is_lost_under_load(cluster: Cluster, nodes: EtcdNodes, node: int, fault: str) -> None:
    await whole(cluster, MOVED_S)
    before = await incarnations(cluster)
    async with Load(cluster.url("router")) as load:
        await load.some(3)
        if fault == "kill":
            nodes.kill(node)
        else:
            nodes.signal(node, signal.SIGSTOP)
        await load.some(20)
        both = f"{cluster.address},{cluster['second'].address}"
        await cluster.worker("d2", "decode", coordinator=both)
        await cluster.seen(*WORKERS, "d2")
        await load.some(3)
        await cluster.stop("d2")
        if fault == "kill":
            nodes.start(node)
        else:
            nodes.signal(node, signal.SIGCONT)
        took_s = await whole(cluster, WHOLE_S * BUSY)
    print(f"{fault} etcd {node}: {load.done} answers, whole after {took_s:.2f} s")
    assert load.failed == []
    assert await incarnations(cluster) == before
