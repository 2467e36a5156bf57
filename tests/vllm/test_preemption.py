"""A prefill engine that has too few blocks and takes those of a prompt that a decode engine is pulling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import assert_same_bytes, prompt, wait_free
from tests.support.vllm.engines import Cluster, Engine, both_legs

pytestmark = pytest.mark.asyncio(loop_scope="package")

BLOCKS = 24
ELDERS = 8
"""Requests that came before: each has one block of 128 tokens and soon needs another."""
ELDERS_PROMPT, ELDERS_TOKENS = 100, 90


@pytest_asyncio.fixture(loop_scope="package", scope="module", params=[True, False], ids=["cached", "uncached"])
async def crowded(cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """It computes 64 tokens a step: what elders leave of that takes a prompt of 1900 tokens more than 30 steps."""
    engine = await cluster.start(
        f"crowded-{request.param}",
        "kv_producer",
        max_num_batched_tokens=64,
        num_gpu_blocks_override=BLOCKS + 1,
        enable_prefix_caching=request.param,
        pause_s=0.02,
    )
    await engine.wait_ready()
    yield engine
    await cluster.engines.pop(engine.name).stop()


@pytest.mark.parametrize("length", [1750, 1900])
async def test_a_prompt_that_is_preempted_while_it_is_pulled_arrives_whole(
    cluster: Cluster, crowded: Engine, length: int
) -> None:
    decode, mono = cluster["d"], cluster["mono"]
    elders = [prompt(ELDERS_PROMPT, seed=f"elder {number} {crowded.name} {length}") for number in range(ELDERS)]
    ids = prompt(length, seed=f"preempted {crowded.name}")
    preempted = await crowded.ask("preempted")
    legs = both_legs(crowded, decode)
    waiting = decode.add(ids, 16, legs[1])
    await asyncio.sleep(0.3)
    old = [crowded.add(elder, ELDERS_TOKENS) for elder in elders]
    for request_id in old:
        await crowded.wait_first(request_id)
    computing = crowded.add(ids, 1, legs[0])
    answer = await decode.wait(waiting)
    assert await crowded.ask("preempted") > preempted
    assert answer.report["code"] == ""
    assert answer.report["attempts"] > 1
    assert answer.tokens == (await mono.generate(ids, 16)).tokens
    assert (await crowded.wait(computing)).tokens == answer.tokens[:1]
    await assert_same_bytes(crowded, decode, answer.report["transfer_id"])
    wanted = await asyncio.gather(*(mono.generate(elder, ELDERS_TOKENS) for elder in elders))
    got = [await crowded.wait(request_id) for request_id in old]
    assert [found.tokens for found in got] == [whole.tokens for whole in wanted]
    await wait_free(crowded, BLOCKS)
    await wait_free(decode)
