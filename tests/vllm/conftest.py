"""Engines of vLLM that all of these tests share: a prefill, a decode and a monolithic one, from one tiny model."""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.engines import KV_LEASE_S, PYTHON, Cluster

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="build/vllm-venv is not there: `make test-vllm` makes it")
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.checkout)
        if not PYTHON.exists():
            item.add_marker(skip)


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Heads of 64 dims: what vLLM's CPU attention takes."""
    from kvxfer.engine.tiny import make_tiny_model

    path = tmp_path_factory.mktemp("vllm") / "tiny"
    return make_tiny_model(path, layers=4, hidden=256, vocab=1024, max_position_embeddings=4096, seed=1234)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("engines"), tiny_model) as cluster:
        await cluster.start("p", "kv_producer", extra={"kv_lease_duration": KV_LEASE_S}, max_num_batched_tokens=512)
        await cluster.start("d", "kv_consumer")
        await cluster.start("mono", None, enable_prefix_caching=False)
        for engine in cluster.engines.values():
            await engine.wait_ready()
        yield cluster
