"""Prefill and decode in two processes give the tokens that one process gives, and the blocks arrive byte for byte."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.e2e.client import Answer, ask, completion
from tests.support.e2e.cluster import Cluster, together
from tests.support.e2e.reference import make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 130, 255, 256, 257, 511, 1000, 1025, 2000)
"""Twenty, around the edges of blocks (16) and chunks (128)."""
TOKENS = 64
AT_ONCE = 8
WHOLE = {"chunk_tokens": 4096, "max_batch_tokens": 4096}


@pytest.fixture
def cluster(tiny_cluster: Cluster) -> Cluster:
    return tiny_cluster


async def ask_all(url: str, prompts: list[list[int]], model: str) -> list[Answer]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> Answer:
        async with turn:
            answer = await ask(url, completion(prompt, TOKENS, model))
            assert answer.status == 200, answer.body
            return answer

    return await asyncio.gather(*map(one, prompts))


async def check_remote(cluster: Cluster, prompts: list[list[int]], reference, *, may_reuse: bool = False) -> None:
    answers = await ask_all(cluster.url("router"), prompts, "tiny")
    source, destination = await cluster.digests("p1"), await cluster.digests("d1")
    excused, compared = len(reference.excused), 0
    for prompt, answer in zip(prompts, answers, strict=True):
        account = answer.account
        reference.check(answer.token_ids, prompt, TOKENS)
        assert answer.body["usage"]["prompt_tokens"] == len(prompt)
        if len(prompt) == 1:
            assert answer.prefill == "local"
            continue
        assert answer.prefill == account["prefill"] == "remote", account
        assert account["failure"] is None
        sent = source[f"{account['transfer_id']}/source"]
        arrived = destination[f"{account['transfer_id']}/destination"]
        assert len(sent["blocks"]) == -(-(len(prompt) - 1) // 16)
        assert may_reuse or arrived["first"] == 0
        assert len(arrived["blocks"]) == account["blocks_moved"] == len(sent["blocks"]) - arrived["first"]
        assert arrived["blocks"] == sent["blocks"][arrived["first"] :]
        assert all(len(set(block)) == len(block) == 2 for block in arrived["blocks"])
        compared += sum(map(len, arrived["blocks"]))
    excused = len(reference.excused) - excused
    print(
        f"{len(prompts)} prompts of {TOKENS} tokens each: {excused} divergences excused; "
        f"{compared} block layers arrived as they were sent"
    )
    await cluster.assert_drained()


async def test_chunked_prefill_equals_the_single_process(cluster: Cluster, tiny_reference) -> None:
    await check_remote(cluster, [make_prompt(length) for length in LENGTHS], tiny_reference)


async def test_blocks_that_are_there_already_are_not_moved_again(cluster: Cluster, tiny_reference) -> None:
    """The same beginnings with other ends: both workers' prefix caches take part."""
    prompts = [[*make_prompt(length)[:-5], *make_prompt(40, seed=9)] for length in (130, 511, 1000)]
    await check_remote(cluster, prompts, tiny_reference, may_reuse=True)
    answer = await ask(cluster.url("router"), completion(prompts[-1], TOKENS, "tiny"))
    tiny_reference.check(answer.token_ids, prompts[-1], TOKENS)
    assert answer.account["cached_tokens"] >= 900
    assert 1 <= answer.account["blocks_moved"] <= 2
    await cluster.assert_drained()


async def test_whole_prompt_at_once_equals_the_single_process(cluster: Cluster, tiny_reference) -> None:
    await cluster.kill("p1")
    await cluster.restart("p1", **WHOLE)
    await cluster.seen("p1", "d1")
    await check_remote(cluster, [make_prompt(length, seed=1) for length in LENGTHS], tiny_reference)


async def test_the_single_process_itself(cluster: Cluster, tiny_reference) -> None:
    """A worker of both roles without a coordinator, and one inside the cluster that does the whole request."""
    await together(cluster.worker("alone", "both", coordinator=None, agent_id=None), cluster.worker("b1", "both"))
    prompts = [make_prompt(length) for length in LENGTHS]
    for name in ("alone", "b1"):
        answers = await ask_all(cluster.url(name), prompts, "tiny")
        for prompt, answer in zip(prompts, answers, strict=True):
            tiny_reference.check(answer.token_ids, prompt, TOKENS)
            assert answer.account["prefill"] == "local"
    await cluster.assert_drained()
