"""Requests that wait for prompts that their prefill engine has not begun: for a live one as long as it takes, for a leg
that never arrives hardly at all, and without blocks that others need.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import BLOCKS, prompt, wait_free, within
from tests.support.vllm.engines import KV_LEASE_S, Answer, Cluster, Engine, both_legs

pytestmark = pytest.mark.asyncio(loop_scope="package")

LOST_LEG_S = 3.0
IDLE_S = 1.0
"""How soon a prompt that an idle engine computes is at its decode engine."""
ENGINE_SILENT_S = 10.0
QUEUE_S = float(os.environ.get("QUEUE_S", "30"))
"""How long the queue of a live prefill engine is."""


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def slow(cluster: Cluster) -> AsyncIterator[Engine]:
    """It computes 64 tokens a step, and sleeps after each."""
    engine = await cluster.start("slow", "kv_producer", max_num_batched_tokens=64, pause_s=0.05)
    await engine.wait_ready()
    yield engine
    await cluster.engines.pop("slow").stop()


async def ask_for(decode: Engine, prefill: Engine, ids: list[int], **params: float) -> tuple[str, dict[str, object]]:
    """A decode leg, and the prefill leg that goes with it."""
    legs = both_legs(prefill, decode)
    return decode.add(ids, 4, {**legs[1], **params}), legs[0]


async def test_a_leg_that_never_arrived_costs_little(cluster: Cluster) -> None:
    ids = prompt(300, seed="never")
    begun_s = time.monotonic()
    waiting, _ = await ask_for(cluster["d"], cluster["p"], ids)
    answer = await cluster["d"].wait(waiting)
    lasted_s = time.monotonic() - begun_s
    whole = await cluster["mono"].generate(ids, 4)
    assert (answer.tokens, answer.report["code"]) == (whole.tokens, "grant_unknown")
    print(f"waited {answer.report['seconds']:.2f} s, of {lasted_s:.2f} s")
    assert answer.report["seconds"] < LOST_LEG_S
    assert lasted_s - whole["ms"] / 1e3 < within(LOST_LEG_S)


async def test_waiting_requests_hold_no_blocks_and_delay_no_other(cluster: Cluster, slow: Engine) -> None:
    """The slow engine has a queue of half a minute; prompts of an idle one go past all of it."""
    decode = cluster["d"]
    waiting = []
    for number in range(10):
        ids = prompt(1900, seed=f"slow {number}")
        request_id, leg = await ask_for(decode, slow, ids)
        waiting.append((request_id, slow.add(ids, 1, leg)))
    lost, _ = await ask_for(decode, slow, prompt(500, seed="lost"))
    await asyncio.sleep(1.0)
    assert await decode.ask("free") >= BLOCKS - 15  # of the one that has begun
    for number in range(3):
        ids = prompt(600, seed=f"quick {number}")
        begun_s = time.monotonic()
        request_id, leg = await ask_for(decode, cluster["p"], ids)
        cluster["p"].add(ids, 1, leg)
        await decode.wait_first(request_id)
        took_s = time.monotonic() - begun_s
        answer = await decode.wait(request_id)
        print(f"an idle engine's prompt: {took_s:.2f} s")
        assert answer.report["code"] == ""
        assert took_s < within(IDLE_S)
    answer = await decode.wait(lost)
    assert answer.report["code"] == "grant_unknown"
    for request_id, computing in waiting:
        await decode.abort(request_id)
        await slow.abort(computing)
    await wait_free(decode)
    await wait_free(slow)


async def test_a_long_queue_at_a_live_engine_moves_every_prompt(cluster: Cluster, slow: Engine) -> None:
    decode, mono = cluster["d"], cluster["mono"]
    slow.pause(0.05)
    ids = prompt(1900, seed="one of the queue")
    one_s = (await slow.generate(ids, 1))["ms"] / 1e3
    prompts = [prompt(1900, seed=f"queue {number}") for number in range(1 + round(QUEUE_S / one_s))]
    begun_s = time.monotonic()
    waiting = []
    for ids in prompts:
        request_id, leg = await ask_for(decode, slow, ids)
        slow.add(ids, 1, leg)
        waiting.append(request_id)
    answers = [await decode.wait(request_id, 60.0 + 3 * QUEUE_S) for request_id in waiting]
    print(f"{len(prompts)} prompts in {time.monotonic() - begun_s:.1f} s")
    assert {answer.report["code"] for answer in answers} == {""}
    assert answers[-1].tokens == (await mono.generate(prompts[-1], 4)).tokens
    await wait_free(slow)
    await wait_free(decode)


async def test_the_legs_own_time_ends_its_wait(cluster: Cluster, slow: Engine) -> None:
    decode = cluster["d"]
    busy = [slow.add(prompt(1900, seed=f"busy {number}"), 1) for number in range(3)]
    ids = prompt(400, seed="late")
    request_id, leg = await ask_for(decode, slow, ids, timeout_s=1.0)
    computing = slow.add(ids, 1, leg)
    answer = await decode.wait(request_id)
    assert answer.report["code"] == "deadline"
    assert "in the source's queue" in answer.report["text"]
    assert 1.0 <= answer.report["seconds"] < 1.0 + within(0.2)
    for number in (*busy, computing):
        await slow.abort(number)
    await wait_free(slow)


async def test_a_prompt_that_is_aborted_in_the_queue_is_computed_here_at_once(cluster: Cluster, slow: Engine) -> None:
    decode = cluster["d"]
    busy = [slow.add(prompt(1900, seed=f"before {number}"), 1) for number in range(3)]
    ids = prompt(400, seed="aborted in the queue")
    request_id, leg = await ask_for(decode, slow, ids)
    computing = slow.add(ids, 1, leg)
    await asyncio.sleep(0.5)
    begun_s = time.monotonic()
    await slow.abort(computing)
    answer = await decode.wait(request_id)
    assert answer.report["code"] == "grant_revoked"
    assert time.monotonic() - begun_s < within(1.0)
    for number in busy:
        await slow.abort(number)
    await wait_free(slow)


async def retry(cluster: Cluster, prefill: Engine, ids: list[int]) -> tuple[Answer, Answer]:
    """A prefill leg whose prompt was not fetched, and both legs of another attempt."""
    legs = both_legs(prefill, cluster["d"])
    await prefill.generate(ids, 1, legs[0])
    await wait_free(prefill, within_s=KV_LEASE_S + 1.0)
    request_id, leg = await ask_for(cluster["d"], prefill, ids)
    again = await prefill.generate(ids, 1, leg)
    return again, await cluster["d"].wait(request_id)


async def test_retry_of_an_unfetched_prompt_computes_at_most_a_block(cluster: Cluster) -> None:
    ids = prompt(900, seed="retried")
    again, answer = await retry(cluster, cluster["p"], ids)
    assert answer.report["code"] == ""
    assert len(ids) - again["cached"] <= 128


async def test_without_a_prefix_cache_a_retry_is_computed_again_and_says_so(cluster: Cluster) -> None:
    extra = {"kv_lease_duration": KV_LEASE_S}
    engine = await cluster.start("uncached", "kv_producer", extra=extra, enable_prefix_caching=False)
    try:
        await engine.wait_ready()
        again, answer = await retry(cluster, engine, prompt(900, seed="retried without"))
        assert answer.report["code"] == ""
        assert again["cached"] == 0
    finally:
        await cluster.engines.pop("uncached").stop()


async def test_a_hung_engine_is_given_up(cluster: Cluster, slow: Engine) -> None:
    """Its agent goes on saying that the prompt is queued, and that the engine has made no step for ever longer."""
    decode = cluster["d"]
    ids = prompt(400, seed="hung")
    before = slow.add(prompt(1900, seed="before it hangs"), 1)
    request_id, leg = await ask_for(decode, slow, ids)
    computing = slow.add(ids, 1, leg)
    slow.pause(14.0)
    answer = await decode.wait(request_id)
    slow.pause(0.05)
    assert answer.report["code"] == "peer_gone"
    assert "made no step" in answer.report["text"]
    assert ENGINE_SILENT_S <= answer.report["seconds"] < ENGINE_SILENT_S + within(1.5)
    for number in (before, computing):
        await slow.abort(number)
    await wait_free(slow)
