"""The plain protocol, any router's: a prefill leg, then a decode leg with what the first was answered."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.vllm.checks import assert_same_bytes, prompt, wait_free
from tests.support.vllm.engines import Cluster, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("length", [1, 2, 5, 127, 128, 129, 130, 700, 1500, 1900])
async def test_tokens_and_bytes_are_the_same(cluster: Cluster, length: int) -> None:
    ids = prompt(length)
    (first, answer), whole = await asyncio.gather(
        hand_over(cluster["p"], cluster["d"], ids, 20), cluster["mono"].generate(ids, 20)
    )
    assert answer.tokens == whole.tokens
    assert first.tokens == whole.tokens[:1]
    if length > 1:
        assert answer.report["code"] == ""
        assert answer.report["bytes"] == 4 * answer.report["blocks"] * 128 * 2 * 2 * 64 * 4
        await assert_same_bytes(cluster["p"], cluster["d"], answer.report["transfer_id"])
    await wait_free(cluster["p"])
    await wait_free(cluster["d"])


async def test_eight_at_once(cluster: Cluster) -> None:
    prompts = [prompt(length, seed=8) for length in (17, 90, 130, 256, 300, 400, 513, 640)]
    wanted = await asyncio.gather(*(cluster["mono"].generate(ids, 12) for ids in prompts))
    got = await asyncio.gather(*(hand_over(cluster["p"], cluster["d"], ids, 12) for ids in prompts))
    assert [answer.tokens for _, answer in got] == [whole.tokens for whole in wanted]
    assert {answer.report["code"] for _, answer in got} == {""}
    await wait_free(cluster["p"])


async def test_blocks_in_the_decode_engines_cache_are_not_moved(cluster: Cluster) -> None:
    shared, tails = prompt(700, seed="shared"), [prompt(300, seed=seed) for seed in ("a", "b")]
    reports = []
    for ids in (shared + tail for tail in tails):
        (_, answer), whole = await asyncio.gather(
            hand_over(cluster["p"], cluster["d"], ids, 8), cluster["mono"].generate(ids, 8)
        )
        assert answer.tokens == whole.tokens
        await assert_same_bytes(cluster["p"], cluster["d"], answer.report["transfer_id"])
        reports.append(answer.report)
    assert [report["blocks"] for report in reports] == [8, 3]
    await wait_free(cluster["p"])


async def test_a_prompt_that_is_all_there_is_only_released(cluster: Cluster) -> None:
    ids = prompt(385, seed="all")
    _, first = await hand_over(cluster["p"], cluster["d"], ids, 8)
    _, again = await hand_over(cluster["p"], cluster["d"], ids, 8)
    assert again.tokens == first.tokens
    assert first.report["blocks"] == 3
    assert again.report == {}
    await wait_free(cluster["p"])
