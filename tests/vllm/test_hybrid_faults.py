"""Hybrid models' requests that do not end well, on real vLLM: aborts of either leg at any moment, prompts that nobody
fetches, legs whose prompts cannot be kept, engines that run out of blocks, engines that are killed. The answer is the
single engine's, what went wrong has a name, and every block comes back.

Every engine computes prompts in the same small pieces: so there is a middle, and bfloat16 rounds alike.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.vllm.checks import wait_free
from tests.support.vllm.engines import KV_LEASE_S, Cluster, both_legs, hand_over
from tests.support.vllm.hybrid import alone, assert_same_group_bytes, assert_same_tokens, token_ids, trio
from tests.support.vllm.hybrid_judge import TOKENS, Judge
from tests.support.vllm.hybrid_models import KINDS, HybridKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

ABORTS = int(os.environ.get("ABORTS", "30"))
LENGTHS = [200, 577, 900]
PIECE = 64
LEASE = {"kv_lease_duration": KV_LEASE_S}
LOST_S = 3.0
"""How soon an engine must be rid of a peer that is silent."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LEGS = pytest.mark.parametrize("is_concurrent", [False, True], ids=["plain", "at once"])
ELDERS, ELDERS_TOKENS, LONG = 8, 90, 900
ELDERS_PROMPT = {"gemma3": 20, "qwen3next": 270}
"""So long that the elders soon need more blocks, and the prompt of LONG tokens has to give its own."""
CROWDED = {"gemma3": 110, "qwen3next": 44}


@pytest.fixture(scope="module", params=["gemma3", "qwen3next"])
def kind(request: pytest.FixtureRequest) -> HybridKind:
    return KINDS[request.param]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, kind: HybridKind) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp(f"{kind.name}-faults")
    async with trio(directory, kind, extra=LEASE, max_num_batched_tokens=PIECE) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(cluster: Cluster, kind: HybridKind) -> Judge:
    return await Judge.ask(kind, cluster["mono"], LENGTHS, "faults")


@pytest_asyncio.fixture(loop_scope="module")
async def free(cluster: Cluster) -> tuple[int, int]:
    """Of the prefill engine and of the decode engine, while they are idle."""
    return await cluster["p"].ask("free"), await cluster["d"].ask("free")


async def assert_idle(cluster: Cluster, free: tuple[int, int], within_s: float = 1.0) -> None:
    await wait_free(cluster["p"], free[0], within_s)
    await wait_free(cluster["d"], free[1], within_s)


async def assert_well(cluster: Cluster, judge: Judge, free: tuple[int, int]) -> None:
    """One prompt after the other is handed over, and nothing is stranded."""
    await assert_idle(cluster, free)
    for case in judge.cases:
        cluster["d"].poison()
        _, answer = await hand_over(cluster["p"], cluster["d"], case.ids, TOKENS)
        assert judge.judge(case, answer, "afterwards") == ""
    await assert_idle(cluster, free)


@LEGS
async def test_aborts_of_the_decode_leg(
    cluster: Cluster, judge: Judge, free: tuple[int, int], is_concurrent: bool
) -> None:
    """Before, while and after its KV comes."""
    prefill, decode = cluster["p"], cluster["d"]
    draw = random.Random(f"decode {is_concurrent}")
    for number in range(ABORTS):
        ids = judge[number].ids
        if is_concurrent:
            legs = both_legs(prefill, decode)
            computing, request_id = prefill.add(ids, 1, legs[0]), decode.add(ids, 30, legs[1])
        else:
            first = await prefill.generate(ids, 1, PREFILL)
            request_id = decode.add(ids, 30, first["kv"])
        if number % 5 == 4:
            await decode.wait_first(request_id)
        elif number % 5:
            await asyncio.sleep(draw.random() * (0.2 if is_concurrent else 0.03))
        await decode.abort(request_id)
        if is_concurrent:
            await prefill.wait(computing)
        await assert_idle(cluster, free)
    await assert_well(cluster, judge, free)


@LEGS
async def test_aborts_of_the_prefill_leg(
    cluster: Cluster, judge: Judge, free: tuple[int, int], is_concurrent: bool
) -> None:
    """Before, while and after it computes: the decode leg is told, if there is one."""
    prefill, decode = cluster["p"], cluster["d"]
    draw = random.Random(f"prefill {is_concurrent}")
    prefill.pause(0.01)
    for number in range(ABORTS):
        case = judge[number]
        legs = both_legs(prefill, decode) if is_concurrent else (PREFILL, {})
        decode.poison()
        waiting = decode.add(case.ids, TOKENS, legs[1]) if is_concurrent else None
        computing = prefill.add(case.ids, 1, legs[0])
        if number % 5 == 4:
            await prefill.wait(computing)
        elif number % 5:
            await asyncio.sleep(draw.random() * 0.3)
        done = await prefill.abort(computing)
        if waiting is None and done["kv"]:
            waiting = decode.add(case.ids, TOKENS, done["kv"])
        if waiting is not None:
            code = judge.judge(case, await decode.wait(waiting), number)
            assert code in ("", "grant_revoked", "grant_unknown"), number
        await assert_idle(cluster, free)
    prefill.pause(0.0)
    await assert_well(cluster, judge, free)


async def test_prompts_that_nobody_fetches_are_given_back(
    cluster: Cluster, judge: Judge, free: tuple[int, int]
) -> None:
    """Of any reader, and of one that was named."""
    prefill, decode = cluster["p"], cluster["d"]
    legs = both_legs(prefill, decode)
    await asyncio.gather(
        *(prefill.generate(case.ids, 1, leg) for case in judge.cases[:2] for leg in (PREFILL, legs[0]))
    )
    assert await prefill.ask("free") < free[0]
    await wait_free(prefill, free[0], KV_LEASE_S + 0.5)
    case = judge[0]
    assert judge.judge(case, await decode.generate(case.ids, TOKENS, legs[1]), "late") in (
        "grant_expired",
        "incompatible",
    )
    await assert_well(cluster, judge, free)


@LEGS
@pytest.mark.parametrize(
    "more", [{"n": 5}, {"n": 1, "sampling": {"prompt_logprobs": 1}}], ids=["five tokens", "logprobs"]
)
async def test_a_leg_whose_prompt_cannot_be_kept(
    cluster: Cluster, judge: Judge, free: tuple[int, int], more: dict[str, Any], is_concurrent: bool
) -> None:
    """It is answered as without a connector, and the decode leg computes the prompt, and says why."""
    prefill, decode = cluster["p"], cluster["d"]
    for case in judge.cases:
        legs = both_legs(prefill, decode) if is_concurrent else (PREFILL, {})
        decode.poison()
        waiting = decode.add(case.ids, TOKENS, legs[1]) if is_concurrent else None
        first = await prefill.wait(prefill.add(case.ids, kv=legs[0], **more))
        assert first.tokens == case.computed[: more["n"]]
        assert (first.report["code"], first["kv"]["do_remote_prefill"]) == ("invalid_argument", False)
        waiting = waiting or decode.add(case.ids, TOKENS, first["kv"])
        answer = await decode.wait(waiting)
        assert judge.judge(case, answer, more) == "invalid_argument"
        assert (
            "prompt_logprobs" in answer.report["text"] if "sampling" in more else "max_tokens" in answer.report["text"]
        )
        await assert_idle(cluster, free)
    await assert_well(cluster, judge, free)


async def test_prompt_logprobs_of_the_decode_leg(cluster: Cluster, judge: Judge, free: tuple[int, int]) -> None:
    """It has to compute the prompt, and gives the prefill engine's blocks back."""
    prefill, decode = cluster["p"], cluster["d"]
    for case in judge.cases:
        kv = (await prefill.generate(case.ids, 1, PREFILL))["kv"]
        answer = await decode.wait(decode.add(case.ids, TOKENS, kv, sampling={"prompt_logprobs": 1}))
        assert judge.judge(case, answer, "logprobs") == "computed"
        await assert_idle(cluster, free)
    await assert_well(cluster, judge, free)


async def restart(cluster: Cluster, kind: HybridKind, name: str) -> None:
    """After it was killed."""
    await cluster[name].stop()
    role = "kv_producer" if name == "p" else "kv_consumer"
    options = {**kind.engine, "enable_prefix_caching": False, "max_num_batched_tokens": PIECE}
    await cluster.start(name, role, extra={"record_digests": False, **LEASE}, **options)
    await cluster[name].wait_ready()


@pytest.mark.parametrize("has_begun", [True, False], ids=["while it computes", "afterwards"])
async def test_a_killed_prefill_engine(
    cluster: Cluster, kind: HybridKind, judge: Judge, free: tuple[int, int], has_begun: bool
) -> None:
    """The decode engine computes the prompt, and says why: also after the prefill engine was started again, which has
    nothing of what it had."""
    case, old = judge[2], judge[1]
    kept = (await cluster["p"].generate(old.ids, 1, PREFILL))["kv"]
    legs = both_legs(cluster["p"], cluster["d"])
    cluster["p"].pause(0.05)
    cluster["d"].poison()
    if has_begun:
        waiting = cluster["d"].add(case.ids, TOKENS, legs[1])
        cluster["p"].add(case.ids, 1, legs[0])
        await asyncio.sleep(0.3)
        cluster["p"].signal(signal.SIGKILL)
    else:
        first = await cluster["p"].generate(case.ids, 1, PREFILL)
        cluster["p"].signal(signal.SIGKILL)
        waiting = cluster["d"].add(case.ids, TOKENS, first["kv"])
    assert judge.judge(case, await cluster["d"].wait(waiting), "killed") == "peer_gone"
    await restart(cluster, kind, "p")
    answer = await cluster["d"].generate(old.ids, TOKENS, kept)
    assert judge.judge(old, answer, "restarted") == "peer_gone"
    await assert_well(cluster, judge, free)


@pytest.mark.parametrize("has_begun", [True, False], ids=["while it waits", "afterwards"])
async def test_a_killed_decode_engine(
    cluster: Cluster, kind: HybridKind, judge: Judge, free: tuple[int, int], has_begun: bool
) -> None:
    """The prefill engine has its blocks again, and serves the one that is started in its place."""
    case = judge[2]
    legs = both_legs(cluster["p"], cluster["d"])
    cluster["p"].pause(0.05 if has_begun else 0.0)
    if has_begun:
        cluster["d"].add(case.ids, TOKENS, legs[1])
        computing = cluster["p"].add(case.ids, 1, legs[0])
        await asyncio.sleep(0.3)
    else:
        computing = cluster["p"].add(case.ids, 1, legs[0])
        await cluster["p"].wait(computing)
    cluster["d"].signal(signal.SIGKILL)
    await cluster["p"].wait(computing)
    await wait_free(cluster["p"], free[0], max(LOST_S, KV_LEASE_S + 0.5))
    cluster["p"].pause(0.0)
    await restart(cluster, kind, "d")
    await assert_well(cluster, judge, free)


async def crowd(cluster: Cluster, kind: HybridKind, name: str) -> list[str]:
    """Requests of that engine's own, which came before and soon need more blocks than there are."""
    elders = [token_ids(ELDERS_PROMPT[kind.name], f"elder {number} {name}") for number in range(ELDERS)]
    old = [cluster[name].add(ids, ELDERS_TOKENS) for ids in elders]
    for request_id in old:
        await cluster[name].wait_first(request_id)
    return old


@pytest.mark.parametrize("tries", [3])
async def test_a_prefill_engine_that_lacks_blocks(tmp_path: pathlib.Path, kind: HybridKind, tries: int) -> None:
    """It takes the blocks of a prompt that is being pulled, and computes it again: what arrives is whole."""
    few = {"num_gpu_blocks_override": CROWDED[kind.name]}
    async with trio(tmp_path, kind, prefill=few, max_num_batched_tokens=PIECE) as cluster:
        free = await cluster["p"].ask("free"), await cluster["d"].ask("free")
        for number in range(tries):
            ids, legs = token_ids(LONG, f"preempted {number}"), both_legs(cluster["p"], cluster["d"])
            whole = await alone(cluster["mono"], kind, ids)
            preempted = await cluster["p"].ask("preempted")
            cluster["p"].pause(0.02)
            cluster["d"].poison()
            old = await crowd(cluster, kind, "p")
            waiting, computing = cluster["d"].add(ids, len(whole.tokens), legs[1]), cluster["p"].add(ids, 1, legs[0])
            answer = await cluster["d"].wait(waiting)
            for request_id in (*old, computing):
                await cluster["p"].wait(request_id)
            assert await cluster["p"].ask("preempted") > preempted
            print(f"{kind.name}: {answer.report}")
            assert answer.report["code"] == ""
            await assert_same_group_bytes(cluster, computing, waiting)
            if kind.dtype == "float32":  # how the prompt was cut beside the elders, no other engine repeats
                assert_same_tokens(kind, answer, whole, number)
            await assert_idle(cluster, free)


async def test_a_decode_engine_that_lacks_blocks(tmp_path: pathlib.Path, kind: HybridKind) -> None:
    """It takes the blocks of a prompt that was loaded, and computes it itself later."""
    few = {"num_gpu_blocks_override": CROWDED[kind.name]}
    async with trio(tmp_path, kind, decode=few, max_num_batched_tokens=PIECE) as cluster:
        free = await cluster["p"].ask("free"), await cluster["d"].ask("free")
        ids = token_ids(LONG, "taken")
        whole = await alone(cluster["mono"], kind, ids, 60)
        first = await cluster["p"].generate(ids, 1, PREFILL)
        old = await crowd(cluster, kind, "d")
        answer = await cluster["d"].generate(ids, 60, first["kv"])
        for request_id in old:
            await cluster["d"].wait(request_id)
        assert await cluster["d"].ask("preempted") > 0
        assert answer.report["code"] == ""
        assert len(answer.tokens) == 60
        if kind.dtype == "float32":
            assert answer.tokens == whole.tokens
        await assert_idle(cluster, free)
