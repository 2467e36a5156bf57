"""Engines that cut their blocks otherwise: what one keeps as blocks of 32 tokens the other keeps as blocks of 128, with
keys transposed within each block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import BLOCKS, prompt, wait_free
from tests.support.vllm.engines import KV_LEASE_S, Cluster, Engine, both_legs, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")

BLOCKS_OF_32 = {"block_size": 32, "num_gpu_blocks_override": 256}
FREE = {"p": BLOCKS, "d": BLOCKS, "p32": 255, "d32": 255}
PAIRS = pytest.mark.parametrize("pair", [("p32", "d"), ("p", "d32")], ids=["32 to 128", "128 to 32"])


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def small(cluster: Cluster) -> AsyncIterator[Cluster]:
    await cluster.start(
        "p32", "kv_producer", extra={"kv_lease_duration": KV_LEASE_S}, max_num_batched_tokens=512, **BLOCKS_OF_32
    )
    await cluster.start("d32", "kv_consumer", **BLOCKS_OF_32)
    for name in ("p32", "d32"):
        await cluster[name].wait_ready()
    yield cluster
    for name in ("p32", "d32"):
        await cluster.engines.pop(name).stop()


async def are_free(*engines: Engine) -> None:
    for engine in engines:
        await wait_free(engine, FREE[engine.name])


@PAIRS
@pytest.mark.parametrize("length", [2, 33, 129, 700, 1900])
async def test_tokens_are_the_same(small: Cluster, pair: tuple[str, str], length: int) -> None:
    prefill, decode = (small[name] for name in pair)
    ids = prompt(length, seed=pair)
    (_, answer), whole = await asyncio.gather(hand_over(prefill, decode, ids, 20), small["mono"].generate(ids, 20))
    assert answer.tokens == whole.tokens
    assert answer.report["code"] == "", answer.report["text"]
    assert answer.report["bytes"] > 0
    await are_free(prefill, decode)


@PAIRS
async def test_tokens_are_the_same_where_both_legs_come_at_once(small: Cluster, pair: tuple[str, str]) -> None:
    prefill, decode = (small[name] for name in pair)
    shared = prompt(300, seed=f"{pair} shared")
    for ids in (shared, shared + prompt(1500, seed=pair)):
        legs = both_legs(prefill, decode)
        whole = await small["mono"].generate(ids, 20)
        _, answer = await asyncio.gather(prefill.generate(ids, 1, legs[0]), decode.generate(ids, 20, legs[1]))
        assert answer.tokens == whole.tokens
        assert answer.report["code"] == "", answer.report["text"]
        await are_free(prefill, decode)


@PAIRS
async def test_eight_at_once(small: Cluster, pair: tuple[str, str]) -> None:
    prefill, decode = (small[name] for name in pair)
    prompts = [prompt(length, seed=f"8 {pair}") for length in (17, 90, 130, 256, 300, 400, 513, 640)]
    wanted = await asyncio.gather(*(small["mono"].generate(ids, 12) for ids in prompts))
    got = await asyncio.gather(*(hand_over(prefill, decode, ids, 12) for ids in prompts))
    assert [answer.tokens for _, answer in got] == [whole.tokens for whole in wanted]
    assert {answer.report["code"] for _, answer in got} == {""}
    await are_free(prefill, decode)
