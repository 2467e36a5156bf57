"""The two models of these tests, and what the processes logged where a test failed."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.e2e.cluster import SLOW_TTL_S, Cluster, running
from tests.support.e2e.reference import CONTEXT_TOKENS, Reference

LINES_SHOWN = 60


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two small layers: for tests of what is right."""
    from kvxfer.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("e2e") / "tiny", max_position_embeddings=CONTEXT_TOKENS, seed=1)


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Big enough that a prefill in small chunks on one thread takes seconds: for tests of what happens meanwhile."""
    from kvxfer.engine.tiny import make_tiny_model

    path = tmp_path_factory.mktemp("e2e") / "slow"
    return make_tiny_model(path, layers=6, hidden=256, max_position_embeddings=CONTEXT_TOKENS, seed=2)


@pytest.fixture(scope="session")
def tiny_reference(tiny_model: pathlib.Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def slow_reference(slow_model: pathlib.Path) -> Reference:
    return Reference(slow_model)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def _standing_tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> AsyncIterator[Cluster]:
    digests = {"record_block_digests": True}
    async with running(tmp_path_factory.mktemp("tiny"), tiny_model, {"p1": digests, "d1": digests}) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def _standing_slow(tmp_path_factory: pytest.TempPathFactory, slow_model: pathlib.Path) -> AsyncIterator[Cluster]:
    big = {"kv_cache_mb": 256}
    prefill = {**big, "chunk_tokens": 8, "max_batch_tokens": 64, "grant_ttl_s": SLOW_TTL_S}
    async with running(tmp_path_factory.mktemp("slow"), slow_model, {"p1": prefill, "d1": big}) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="package")
async def tiny_cluster(_standing_tiny: Cluster) -> Cluster:
    """Coordinator, router, ``p1``, ``d1`` with the tiny model; both workers record what they sent and received. What a
    test breaks is whole again for the next.
    """
    await _standing_tiny.restore()
    return _standing_tiny


@pytest_asyncio.fixture(loop_scope="package")
async def slow_cluster(_standing_slow: Cluster) -> Cluster:
    """The same with the slow model; ``p1`` computes in chunks of half a block and grants for ``SLOW_TTL_S``."""
    await _standing_slow.restore()
    return _standing_slow


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        for cluster in list(Cluster.live):
            report.sections.append(("last lines of the processes", "\n".join(cluster.lines[-LINES_SHOWN:])))
