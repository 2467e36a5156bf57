"""The shortest way through real vLLM: two engines, one prompt handed over, and nothing else. For a check that has a
minute on two processors; everything beside it is in the other files.

The decode engine computes the same prompt alone too, without a prefix cache: its tokens are the right ones.
"""

from __future__ import annotations

import pathlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import assert_same_bytes, prompt, wait_free
from tests.support.vllm.engines import Cluster, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS, ANSWER, BLOCK_TOKENS = 700, 16, 128
BLOCKS = 6
"""So many hold all tokens of the prompt but the last."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("smoke"), tiny_model) as cluster:
        await cluster.start("p", "kv_producer")
        await cluster.start("d", "kv_consumer", enable_prefix_caching=False)
        for engine in cluster.engines.values():
            await engine.wait_ready()
        yield cluster


async def test_one_prompt_is_handed_over_by_tokens_and_bytes(pair: Cluster) -> None:
    ids = prompt(TOKENS, seed="smoke")
    first, answer = await hand_over(pair["p"], pair["d"], ids, ANSWER)
    alone = await pair["d"].generate(ids, ANSWER)
    assert answer.report["code"] == ""
    assert (answer.report["blocks"], alone.report) == (BLOCKS, {})
    assert answer.tokens == alone.tokens
    assert len(answer.tokens) == ANSWER
    assert first.tokens == alone.tokens[:1]
    await assert_same_bytes(pair["p"], pair["d"], answer.report["transfer_id"])
    await wait_free(pair["p"])
    await wait_free(pair["d"])
