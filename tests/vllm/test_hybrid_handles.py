"""Handles of hybrid models' prompts that are not as they should be, on real vLLM: what a prefill leg was answered,
given to a decode leg too late, for another prompt, changed, twice, or to several at once. Each way is tried TRIES
times: the answer is the single engine's, and what went wrong has a name.

Between two tries every block of the engines that are idle is overwritten, so that no answer is right by what lay there.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.vllm.checks import wait_free
from tests.support.vllm.engines import KV_LEASE_S, Cluster
from tests.support.vllm.hybrid import trio
from tests.support.vllm.hybrid_judge import TOKENS, Judge, without_answer
from tests.support.vllm.hybrid_models import KINDS, WINDOW, HybridKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRIES = int(os.environ.get("TRIES", "200"))
LENGTHS = [33, WINDOW, 2 * WINDOW + 1, 159, 200, 289, 333]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
AT_ONCE = 28
"""Prompts that the prefill engine keeps while they expire."""


@pytest.fixture(scope="module", params=["gemma3", "qwen3next"])
def kind(request: pytest.FixtureRequest) -> HybridKind:
    return KINDS[request.param]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, kind: HybridKind) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp(f"{kind.name}-handles")
    room = {"num_gpu_blocks_override": 1024}
    async with trio(directory, kind, prefill=room, extra={"kv_lease_duration": KV_LEASE_S}) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(cluster: Cluster, kind: HybridKind) -> Judge:
    return await Judge.ask(kind, cluster["mono"], LENGTHS, "handles")


@pytest_asyncio.fixture(loop_scope="module")
async def judge(
    cluster: Cluster, kind: HybridKind, asked: Judge, request: pytest.FixtureRequest
) -> AsyncIterator[Judge]:
    """Afterwards nothing is stranded on either side, and a right handle does what it should."""
    free = await cluster["p"].ask("free"), await cluster["d"].ask("free")
    judge = Judge(kind, asked.cases)
    yield judge
    print(f"{request.node.name}: {dict(judge.codes)}")
    await wait_free(cluster["p"], free[0], KV_LEASE_S + 1.0)
    await wait_free(cluster["d"], free[1])
    for case in judge.cases:
        cluster["d"].poison()
        first = await cluster["p"].generate(case.ids, 1, PREFILL)
        assert judge.judge(case, await cluster["d"].generate(case.ids, TOKENS, first["kv"]), "after all") == ""


async def test_stale(cluster: Cluster, judge: Judge) -> None:
    """The promise is over, and the prompt's blocks have other bytes."""
    prefill, decode = cluster["p"], cluster["d"]
    free = await prefill.ask("free")
    for begin in range(0, TRIES, AT_ONCE):
        numbers = range(begin, min(begin + AT_ONCE, TRIES))
        first = await asyncio.gather(*(prefill.generate(judge[number].ids, 1, PREFILL) for number in numbers))
        assert await prefill.ask("free") < free
        await wait_free(prefill, free, KV_LEASE_S + 1.0)
        prefill.poison()
        for number, done in zip(numbers, first, strict=True):
            kv = without_answer(done["kv"], prefill) if number % 2 else done["kv"]
            decode.poison()
            code = judge.judge(judge[number], await decode.generate(judge[number].ids, TOKENS, kv), number)
            assert code == "grant_expired"


async def test_foreign(cluster: Cluster, judge: Judge) -> None:
    """Another prompt's, of the same length or not. That prompt's own request is answered right too."""
    prefill, decode = cluster["p"], cluster["d"]
    for number in range(TRIES):
        own, other = judge[number], judge.other(number, is_alike=number % 4 < 2)
        kv = (await prefill.generate(own.ids, 1, PREFILL))["kv"]
        given = without_answer(kv, prefill) if number % 2 else kv
        decode.poison()
        code = judge.judge(other, await decode.generate(other.ids, TOKENS, given), number)
        assert code in ("incompatible", "computed"), number
        judge.judge(own, await decode.generate(own.ids, TOKENS, kv), f"{number}, its own")


def changed(kv: dict[str, Any], number: int, prefill: str, decode: str) -> tuple[dict[str, Any], set[str]]:
    """A handle with something in it that is not so, and what it may come to."""
    answered = kv["kvxfer"]
    tokens, incarnation = answered["tokens"], answered["lives"][0]
    ways: list[tuple[dict[str, Any], set[str]]] = [
        ({"tokens": tokens - 1}, {"computed"}),
        ({"tokens": tokens + 1}, {"computed"}),
        ({"tokens": 0}, {"computed"}),
        ({"tokens": 1 << 63}, {"computed"}),
        ({"tokens": -1}, {"computed"}),
        ({"tokens": "7"}, {"computed"}),
        ({"agents": []}, {"computed"}),
        (
            {"agents": [prefill, prefill], "lives": [incarnation, incarnation]},
            {"incompatible", "refused", "protocol", "grant_unknown"},
        ),
        ({"agents": [decode], "lives": []}, {"grant_unknown", "incompatible", "peer_gone"}),
        ({"lives": [f"{int(incarnation.split('.')[0]) + 1}.{incarnation.split('.')[1]}"]}, {"peer_gone"}),
        ({"lives": [f"{incarnation.split('.')[0]}.{'0' * 32}"]}, {"peer_gone"}),
        ({"version": 2}, {"computed"}),
        ({"transfer_id": uuid.uuid4().hex}, {"grant_unknown"}),
        ({"transfer_id": "7"}, {"computed"}),
        ({"agents": [f"{prefill}.1"], "lives": []}, {"peer_gone"}),
        ({"agents": ["ghost"], "lives": []}, {"peer_gone"}),
    ]
    change, codes = ways[number % len(ways)]
    if "transfer_id" in change:
        return {**kv, **change}, codes
    return {**kv, "kvxfer": {**answered, **change}}, codes


async def test_out_of_range(cluster: Cluster, judge: Judge) -> None:
    prefill, decode = cluster["p"], cluster["d"]
    for number in range(TRIES):
        case = judge[number // 3]
        kv = (await prefill.generate(case.ids, 1, PREFILL))["kv"]
        given, codes = changed(kv, number, prefill.name, decode.name)
        decode.poison()
        code = judge.judge(case, await decode.generate(case.ids, TOKENS, given), (number, given))
        assert code in codes, given
        if number % 2:
            judge.judge(case, await decode.generate(case.ids, TOKENS, kv), f"{number}, unchanged")


async def test_consumed(cluster: Cluster, judge: Judge) -> None:
    """Used once, and then once more, when the prompt's blocks are others'."""
    prefill, decode = cluster["p"], cluster["d"]
    free = await prefill.ask("free")
    for number in range(TRIES):
        case = judge[number]
        kv = (await prefill.generate(case.ids, 1, PREFILL))["kv"]
        decode.poison()
        assert judge.judge(case, await decode.generate(case.ids, TOKENS, kv), number) == ""
        await wait_free(prefill, free)
        prefill.poison()
        decode.poison()
        again = without_answer(kv, prefill) if number % 2 else kv
        code = judge.judge(case, await decode.generate(case.ids, TOKENS, again), f"{number}, again")
        assert code in ("grant_released", "invalid_argument"), number


async def test_reused(cluster: Cluster, judge: Judge) -> None:
    """By two requests at once: for the same prompt, or for another."""
    prefill, decode = cluster["p"], cluster["d"]
    for number in range(TRIES):
        cases = [judge[number], judge[number] if number % 4 < 2 else judge.other(number, is_alike=number % 8 < 6)]
        kv = (await prefill.generate(cases[0].ids, 1, PREFILL))["kv"]
        given = without_answer(kv, prefill) if number % 2 else kv
        if number % 3 == 0:
            cases.reverse()
        decode.poison()
        answers = await asyncio.gather(*(decode.generate(case.ids, TOKENS, given) for case in cases))
        codes = [judge.judge(case, answer, number) for case, answer in zip(cases, answers, strict=True)]
        assert codes.count("") <= 1
        assert "" in codes or cases[0] is not cases[1]
