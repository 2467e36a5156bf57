"""Engines of unequal tensor parallel sizes: heads that one rank keeps here two keep there. Four more processes: only
with `RANKS=1`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import prompt, wait_free
from tests.support.vllm.engines import Cluster, both_legs, hand_over

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(os.environ.get("RANKS") != "1", reason="RANKS=1 starts engines of two ranks"),
]
PAIRS = pytest.mark.parametrize(
    ("names", "ranks"), [(("pp", "d"), (2, 1)), (("p", "dd"), (1, 2)), (("pp", "dd"), (2, 2))], ids=str
)


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def wide(cluster: Cluster) -> AsyncIterator[Cluster]:
    shared = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    extra = {"record_digests": False}
    await cluster.start("pp", "kv_producer", extra=extra, max_num_batched_tokens=512, **shared)
    await cluster.start("dd", "kv_consumer", extra=extra, **shared)
    for name in ("pp", "dd"):
        await cluster[name].wait_ready()
    yield cluster
    for name in ("pp", "dd"):
        await cluster.engines.pop(name).stop()


@PAIRS
@pytest.mark.parametrize("length", [2, 129, 1900])
async def test_tokens_are_the_same(wide: Cluster, names: tuple[str, str], ranks: tuple[int, int], length: int) -> None:
    prefill, decode = (wide[name] for name in names)
    ids = prompt(length, seed=names)
    whole = await wide["mono"].generate(ids, 20)
    _, answer = await hand_over(prefill, decode, ids, 20)
    assert answer.tokens == whole.tokens
    assert answer.report["code"] == "", answer.report["text"]
    ids = prompt(length, seed=f"{names} at once")
    legs = both_legs(prefill, decode, ranks)
    whole = await wide["mono"].generate(ids, 20)
    _, answer = await asyncio.gather(prefill.generate(ids, 1, legs[0]), decode.generate(ids, 20, legs[1]))
    assert answer.tokens == whole.tokens
    assert answer.report["code"] == "", answer.report["text"]
    await wait_free(prefill)
    await wait_free(decode)
