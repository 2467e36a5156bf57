"""The plain protocol, any router's: a prefill leg, then a decode leg with what the first was answered."""

from __future__ import annotations

import asyncio
import random

import pytest
from checks import assert_same_bytes, wait_free
from engines import Cluster, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")

BLOCKS = 63  # of 64; vLLM keeps one for itself


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length}/{seed}")
    return [draw.randrange(3, 1000) for _ in range(length)]


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
    await wait_free(cluster["p"], BLOCKS)
    await wait_free(cluster["d"], BLOCKS)


async def test_eight_at_once(cluster: Cluster) -> None:
    prompts = [prompt(length, seed=8) for length in (17, 90, 130, 256, 300, 400, 513, 640)]
    wanted = await asyncio.gather(*(cluster["mono"].generate(ids, 12) for ids in prompts))
    got = await asyncio.gather(*(hand_over(cluster["p"], cluster["d"], ids, 12) for ids in prompts))
    assert [answer.tokens for _, answer in got] == [whole.tokens for whole in wanted]
    assert {answer.report["code"] for _, answer in got} == {""}
    await wait_free(cluster["p"], BLOCKS)
