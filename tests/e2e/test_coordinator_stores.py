"""A coordinator with a durable store is killed under load and started again on its file: no request fails, no agent
gets another incarnation, and no number comes twice."""

from __future__ import annotations

import pathlib
import sqlite3

import pytest

from tests.support.e2e.cluster import Cluster, together, until
from tests.support.e2e.load import Load

pytestmark = pytest.mark.asyncio(loop_scope="package")

FOUND_S = 20.0


def last_number(path: pathlib.Path) -> int:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as store:
        (last,) = store.execute("SELECT last FROM numbers").fetchone()
    store.close()
    return int(last)


async def incarnations(cluster: Cluster) -> dict[str, object]:
    return {name: entry["incarnation"] for name, entry in (await cluster.directory()).items()}


async def test_sqlite_coordinator_killed_under_load(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    path = tmp_path / "store.db"
    async with Cluster(tmp_path, tiny_model) as cluster:
        await cluster.coordinator(store=f"sqlite:{path}")
        await together(cluster.router(), cluster.worker("p1", "prefill"), cluster.worker("d1", "decode"))
        await cluster.seen("p1", "d1")
        before = await incarnations(cluster)
        async with Load(cluster.url("router")) as load:
            await load.some(5)
            for _ in range(2):
                await cluster.kill("coordinator")
                number = last_number(path)
                await load.some(5)
                await cluster.restart("coordinator")
                await cluster.seen("p1", "d1")
                await load.some(5)
                assert await incarnations(cluster) == before
        assert load.failed == []

        async def connected() -> bool:
            agents = [(await cluster.statistics(name))["agent"] for name in cluster.workers]
            return all(agent["is_coordinator_connected"] for agent in agents)

        await until(connected, "both agents hear the coordinator again", within_s=FOUND_S)
        await cluster.kill("d1")
        await cluster.worker("d1", "decode")
        await cluster.seen("p1", "d1", within_s=FOUND_S)
        await cluster.kill("coordinator")
        assert last_number(path) > number
