"""Both legs at once, as kvxfer's router sends them: blocks are fetched while the prompt is computed."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.vllm.checks import assert_same_bytes, prompt, wait_free
from tests.support.vllm.engines import Answer, Cluster, both_legs

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def at_once(cluster: Cluster, ids: list[int], n: int) -> Answer:
    prefill, decode = both_legs(cluster["p"], cluster["d"])
    _, answer = await asyncio.gather(cluster["p"].generate(ids, 1, prefill), cluster["d"].generate(ids, n, decode))
    return answer


@pytest.mark.parametrize("length", [1, 2, 129, 512, 700, 1025, 1900])
async def test_tokens_and_bytes_are_the_same(cluster: Cluster, length: int) -> None:
    ids = prompt(length, seed="at once")
    whole = await cluster["mono"].generate(ids, 20)
    answer = await at_once(cluster, ids, 20)
    assert answer.tokens == whole.tokens
    if length > 1:
        assert answer.report["code"] == ""
        await assert_same_bytes(cluster["p"], cluster["d"], answer.report["transfer_id"])
    await wait_free(cluster["p"])
    await wait_free(cluster["d"])


async def test_bytes_land_while_the_prompt_is_computed(cluster: Cluster) -> None:
    prefill, decode = both_legs(cluster["p"], cluster["d"])
    ids = prompt(1900, seed="early")
    waiting = cluster["d"].add(ids, 1, decode)
    cluster["p"].pause(0.5)  # so that it is not over before the decode engine has looked
    await cluster["p"].generate(ids, 1, prefill)
    cluster["p"].pause(0.0)
    report = (await cluster["d"].wait(waiting)).report
    assert report["parts"] >= 3
    assert report["early_bytes"] >= report["bytes"] // 2
    await wait_free(cluster["p"])


async def test_eight_at_once(cluster: Cluster) -> None:
    prompts = [prompt(length, seed="8 at once") for length in (17, 90, 130, 256, 300, 400, 513, 640)]
    wanted = await asyncio.gather(*(cluster["mono"].generate(ids, 12) for ids in prompts))
    got = await asyncio.gather(*(at_once(cluster, ids, 12) for ids in prompts))
    assert [answer.tokens for answer in got] == [whole.tokens for whole in wanted]
    assert {answer.report["code"] for answer in got} == {""}
    await wait_free(cluster["p"])


async def test_the_decode_leg_may_come_long_before_the_prefill_leg(cluster: Cluster) -> None:
    ids = prompt(300, seed="early leg")
    prefill, decode = both_legs(cluster["p"], cluster["d"])
    waiting = cluster["d"].add(ids, 8, decode)
    await asyncio.sleep(0.5)
    await cluster["p"].generate(ids, 1, prefill)
    answer, whole = await asyncio.gather(cluster["d"].wait(waiting), cluster["mono"].generate(ids, 8))
    assert (answer.tokens, answer.report["code"]) == (whole.tokens, "")
    await wait_free(cluster["p"])


async def test_the_prefill_leg_may_come_before_the_decode_leg(cluster: Cluster) -> None:
    ids = prompt(300, seed="late leg")
    prefill, decode = both_legs(cluster["p"], cluster["d"])
    await cluster["p"].generate(ids, 1, prefill)
    answer, whole = await asyncio.gather(cluster["d"].generate(ids, 8, decode), cluster["mono"].generate(ids, 8))
    assert (answer.tokens, answer.report["code"]) == (whole.tokens, "")
    await wait_free(cluster["p"])


async def test_prompts_that_begin_alike_may_come_at_once(cluster: Cluster) -> None:
    """vLLM counts what the first will compute as cached for the second, in the step that computes it."""
    p, d = cluster["p"], cluster["d"]
    for turn in range(3):
        alike = prompt(256, seed=f"alike {turn}")
        prompts = [alike + prompt(length, seed=turn) for length in (40, 50)]
        wanted = await asyncio.gather(*(cluster["mono"].generate(ids, 12) for ids in prompts))
        legs = [both_legs(p, d) for _ in prompts]
        decodes = [d.add(ids, 12, decode) for ids, (_, decode) in zip(prompts, legs, strict=True)]
        await asyncio.sleep(0.3)  # they have asked
        prefills = [p.add(ids, 1, prefill) for ids, (prefill, _) in zip(prompts, legs, strict=True)]
        await asyncio.gather(*map(p.wait, prefills))
        for decode, whole in zip(decodes, wanted, strict=True):
            answer = await d.wait(decode)
            assert (answer.tokens, answer.report["code"]) == (whole.tokens, "")
            await assert_same_bytes(p, d, answer.report["transfer_id"])
    await wait_free(p)
    await wait_free(d)
