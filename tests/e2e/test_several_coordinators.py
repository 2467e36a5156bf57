"""Two coordinators on three etcd nodes, each killed or stopped under load: no request fails, no agent gets another
incarnation, and the membership is whole again soon after."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from kvxfer.errors import CoordinatorUnavailableError
from kvxfer.rpc import CoordinatorSession, MembershipWatch, list_members, load_token
from kvxfer.types import AgentRef, DataAddress, Role, WorkerInfo
from tests.support.e2e.client import connected
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
        store: dict[str, Any] = {"store": f"etcd:{nodes.endpoints}", "metrics_port": 0}
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


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["coordinator", pytest.param("second", marks=pytest.mark.nightly)])
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


@pytest.mark.parametrize("fault", [pytest.param("kill", marks=pytest.mark.nightly), "stop"])
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.nightly)])
async def test_an_etcd_node_is_lost_under_load(cluster: Cluster, nodes: EtcdNodes, node: int, fault: str) -> None:
    await whole(cluster, MOVED_S)
    before = await incarnations(cluster)
    async with Load(cluster.url("router")) as load:
        await load.some(3)
        hurt_node(nodes, node, fault)
        await load.some(20)
        both = f"{cluster.address},{cluster['second'].address}"
        await cluster.worker("d2", "decode", coordinator=both)
        await cluster.seen(*WORKERS, "d2")
        await load.some(3)
        await cluster.stop("d2")
        heal_node(nodes, node, fault)
        took_s = await whole(cluster, WHOLE_S * BUSY)
    print(f"{fault} etcd {node}: {load.done} answers, whole after {took_s:.2f} s")
    assert load.failed == []
    assert await incarnations(cluster) == before


@pytest.mark.nightly
@pytest.mark.parametrize("node_fault", ["kill", "stop"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_a_coordinator_and_an_etcd_node_are_lost_under_load(
    cluster: Cluster, nodes: EtcdNodes, fault: str, node_fault: str
) -> None:
    await whole(cluster, MOVED_S)
    before = await incarnations(cluster)
    async with Load(cluster.url("router")) as load:
        await load.some(3)
        await (cluster.kill("second") if fault == "kill" else asyncio.to_thread(cluster.pause, "second"))
        hurt_node(nodes, 0, node_fault)
        began_s = time.monotonic()

        async def is_past() -> bool:
            return time.monotonic() > began_s + 10.0

        await until(is_past, "lease and grace to be over", within_s=15.0)
        await load.some(10)
        heal_node(nodes, 0, node_fault)
        await (cluster.restart("second") if fault == "kill" else asyncio.to_thread(cluster.unpause, "second"))
        took_s = await whole(cluster, WHOLE_S * BUSY)
        await load.some(3)
    print(f"{fault} second, {node_fault} etcd 0: {load.done} answers, whole after {took_s:.2f} s")
    assert load.failed == []
    assert await incarnations(cluster) == before


def hurt_node(nodes: EtcdNodes, node: int, fault: str) -> None:
    if fault == "kill":
        nodes.kill(node)
    else:
        nodes.signal(node, signal.SIGSTOP)


def heal_node(nodes: EtcdNodes, node: int, fault: str) -> None:
    if fault == "kill":
        nodes.start(node)
    else:
        nodes.signal(node, signal.SIGCONT)


@pytest.mark.nightly
async def test_without_a_majority_all_running_work_goes_on(cluster: Cluster, nodes: EtcdNodes) -> None:
    await whole(cluster, MOVED_S)
    before = await incarnations(cluster)
    members_before = (await list_members(cluster.address, load_token(cluster.token_file))).members
    both = f"{cluster.address},{cluster['second'].address}"
    async with Load(cluster.url("router")) as load:
        for node in (0, 2):
            nodes.kill(node)

        async def is_said() -> bool:
            answers = [await asked(cluster, name) for name in ("coordinator", "second")]
            return all(status == 503 and "does not answer" in text for status, text in answers)

        await until(is_said, "both coordinators to say that they have no store", within_s=30.0)
        metrics = await asked(cluster, "second", "/metrics")
        assert "kvxfer_coordinator_store_available 0.0" in metrics[1]
        assert (await asked(cluster, "second", "/live"))[0] == 200
        with pytest.raises(CoordinatorUnavailableError, match="no new incarnations now"):
            await fresh(cluster, both)
        await load.some(30)
        await cluster.kill("coordinator")  # its agents and the router go to the other one, which cannot ask the store
        await load.some(30)
        await until_connected(cluster)
        assert await incarnations(cluster) == before
        for node in (0, 2):
            nodes.start(node)
        await cluster.restart("coordinator")
        took_s = await whole(cluster, WHOLE_S * BUSY)
        await load.some(3)
    print(f"no majority: {load.done} answers, {load.remote} remote, whole after {took_s:.2f} s")
    assert load.failed == []
    assert await incarnations(cluster) == before

    async def is_ready() -> bool:
        return (await asked(cluster, "second"))[0] == 200

    began_s = time.monotonic()
    await until(is_ready, "the store to be had again", within_s=30.0)
    print(f"ready after {took_s + time.monotonic() - began_s:.2f} s")
    number = (await fresh(cluster, both)).incarnation.number
    assert number > max(member.ref.incarnation.number for member in members_before)


async def asked(cluster: Cluster, name: str, path: str = "/ready") -> tuple[int, str]:
    async with connected() as client:
        answer = await client.get(f"{cluster.url(name)}{path}")
        return answer.status_code, answer.text


async def fresh(cluster: Cluster, coordinators: str) -> AgentRef:
    """Register one more agent, and take it back. Raises CoordinatorUnavailableError."""
    session = CoordinatorSession(
        coordinators,
        load_token(cluster.token_file),
        secrets.token_bytes(16),
        WorkerInfo("fresh", Role.DECODE, "other", ""),
        DataAddress("127.0.0.1", 9, "", "host"),
        on_membership=lambda _: None,
    )
    try:
        return await session.start(8.0)
    finally:
        await session.close()


async def until_connected(cluster: Cluster) -> None:
    async def are_connected() -> bool:
        agents = [(await cluster.statistics(name))["agent"] for name in WORKERS]
        return all(agent["is_coordinator_connected"] for agent in agents)

    await until(are_connected, "both agents to hear a coordinator", within_s=MOVED_S)
