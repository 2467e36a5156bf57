"""Requests that do not end well: aborts at any moment, prompts that are not fetched, promises that are over."""

from __future__ import annotations

import asyncio
import os
import random
import time

import pytest

from tests.support.vllm.checks import BLOCKS, prompt, wait_free, within
from tests.support.vllm.engines import KV_LEASE_S, Cluster, both_legs, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")

ABORTS = int(os.environ.get("ABORTS", "30"))
EXPIRIES = int(os.environ.get("EXPIRIES", "2"))


async def test_prompt_that_is_not_fetched_is_given_back(cluster: Cluster) -> None:
    await cluster["p"].generate(prompt(700, seed="orphan"), 1, {"do_remote_decode": True})
    begun_s = time.monotonic()
    assert await cluster["p"].ask("free") == BLOCKS - 6
    await wait_free(cluster["p"], within_s=KV_LEASE_S + 0.5)
    assert time.monotonic() - begun_s > KV_LEASE_S / 2


async def test_expired_prompt_is_computed_again_after_its_blocks_were_reused(cluster: Cluster) -> None:
    prefill, decode, mono = (cluster[name] for name in ("p", "d", "mono"))
    for begin in range(0, EXPIRIES, 8):  # as many as the prefill engine can keep at once
        prompts = [prompt(700, seed=f"expired {seed}") for seed in range(begin, min(begin + 8, EXPIRIES))]
        first = await asyncio.gather(*(prefill.generate(ids, 1, {"do_remote_decode": True}) for ids in prompts))
        await wait_free(prefill, within_s=KV_LEASE_S + 0.5)
        for other in range(5):
            await prefill.generate(prompt(1900, seed=f"other {begin}/{other}"), 1)
        wanted = await asyncio.gather(*(mono.generate(ids, 16) for ids in prompts))
        got = await asyncio.gather(
            *(decode.generate(ids, 16, done["kv"]) for ids, done in zip(prompts, first, strict=True))
        )
        assert [answer.tokens for answer in got] == [whole.tokens for whole in wanted]
        assert {answer.report["code"] for answer in got} == {"grant_expired"}
        await wait_free(decode)


@pytest.mark.parametrize("is_concurrent", [False, True], ids=["plain", "concurrent"])
async def test_aborts_of_the_decode_leg_leave_nothing(cluster: Cluster, is_concurrent: bool) -> None:
    draw = random.Random(f"aborts {is_concurrent}")
    for number in range(ABORTS):
        ids = prompt(draw.randrange(200, 1900), seed=f"abort {number}/{is_concurrent}")
        if is_concurrent:
            prefill, decode = both_legs(cluster["p"], cluster["d"])
            computing = cluster["p"].add(ids, 1, prefill)
            request_id = cluster["d"].add(ids, 4, decode)
        else:
            first = await cluster["p"].generate(ids, 1, {"do_remote_decode": True})
            request_id = cluster["d"].add(ids, 4, first["kv"])
        await asyncio.sleep(draw.random() * (0.15 if is_concurrent else 0.02))
        await cluster["d"].abort(request_id)
        if is_concurrent:
            await cluster["p"].wait(computing)
        await wait_free(cluster["d"])
        await wait_free(cluster["p"])
    ids = prompt(900, seed="after the aborts")
    (_, answer), whole = await asyncio.gather(
        hand_over(cluster["p"], cluster["d"], ids, 16), cluster["mono"].generate(ids, 16)
    )
    assert (answer.tokens, answer.report["code"]) == (whole.tokens, "")


async def test_an_abort_of_the_prefill_leg_is_told_to_the_decode_leg(cluster: Cluster) -> None:
    ids = prompt(1900, seed="prefill abort")
    prefill, decode = both_legs(cluster["p"], cluster["d"])
    waiting = cluster["d"].add(ids, 8, decode)
    computing = cluster["p"].add(ids, 1, prefill)
    await asyncio.sleep(0.05)
    await cluster["p"].abort(computing)
    answer, whole = await asyncio.gather(cluster["d"].wait(waiting), cluster["mono"].generate(ids, 8))
    assert answer.tokens == whole.tokens
    assert answer.report["code"] in ("grant_revoked", "")
    await wait_free(cluster["p"])
    await wait_free(cluster["d"])


async def test_sources_that_never_were_do_not_hold_up_others(cluster: Cluster) -> None:
    ids = prompt(400, seed="ghosts")
    ghosts = []
    for number in range(3):
        _, decode = both_legs(cluster["p"], cluster["d"])
        decode["source"] = {"agent_id": f"ghost-{number}", "ranks": 1}
        ghosts.append(cluster["d"].add(prompt(300, seed=f"ghost {number}"), 4, decode))
    begun_s = time.monotonic()
    _, answer = await hand_over(cluster["p"], cluster["d"], ids, 4)
    assert time.monotonic() - begun_s < within(1.0)
    assert answer.report["code"] == ""
    for number, request_id in enumerate(ghosts):
        lost = await cluster["d"].wait(request_id)
        whole = await cluster["mono"].generate(prompt(300, seed=f"ghost {number}"), 4)
        assert (lost.tokens, lost.report["code"]) == (whole.tokens, "peer_gone")
    await wait_free(cluster["d"])
