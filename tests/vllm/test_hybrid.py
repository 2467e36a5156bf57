"""Models whose layers keep different KV caches, on real vLLM: whatever kind, the answer is the single engine's and
every block of every group is the source's. Each kind is tried as it is, with prompts computed in pieces and prefixes
kept on both sides, and between engines that are not alike.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.vllm.checks import wait_free
from tests.support.vllm.engines import Cluster
from tests.support.vllm.hybrid import (
    ANSWER,
    alone,
    assert_right,
    assert_same_group_bytes,
    assert_same_tokens,
    lengths_of,
    through,
    token_ids,
    trio,
)
from tests.support.vllm.hybrid_models import KINDS, WINDOW, HybridKind

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONNECTOR = os.environ.get("HYBRID_CONNECTOR", "KvxferConnector")
"""Another one of vLLM's, to see what of this holds for it."""
EIGHT = (17, WINDOW - 1, WINDOW + 1, 130, 2 * WINDOW, 200, 257, 333)
WAYS = {"plain": False, "at once": True} if CONNECTOR == "KvxferConnector" else {"plain": False}
LEGS = pytest.mark.parametrize("is_concurrent", WAYS.values(), ids=WAYS)
IN_PIECES = {"max_num_batched_tokens": 96}
UNLIKE: dict[str, dict[str, Any]] = {
    "blocks 32 to 64": {"decode": {"block_size": 64}},
    "blocks 64 to 32": {"prefill": {"block_size": 64}},
    "ranks 2 to 1": {"prefill": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}},
    "ranks 1 to 2": {"decode": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}},
}
UNLIKE_KINDS = ("gemma3", "gptoss", "qwen3next")


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> HybridKind:
    return KINDS[request.param]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory, kind: HybridKind) -> AsyncIterator[Cluster]:
    async with trio(tmp_path_factory.mktemp(kind.name), kind, connector=CONNECTOR) as cluster:
        yield cluster


async def test_every_group_decides_the_answer(plain: Cluster, kind: HybridKind) -> None:
    """Else equal tokens would prove nothing of it."""
    mono, ids = plain["mono"], token_ids(300, "zeroed")
    right = await mono.generate(ids, 3 * ANSWER)
    assert len(set(right.tokens)) > 3
    assert (await mono.generate(token_ids(300, "another"), 3 * ANSWER)).tokens != right.tokens
    mono.pause(0.03)
    for group in range(len(kind.groups)):
        request_id = mono.add(ids, 3 * ANSWER)
        await mono.wait_first(request_id)
        mono.zero(group)
        assert (await mono.wait(request_id)).tokens != right.tokens, f"group {group}"
    mono.pause(0.0)


@LEGS
async def test_one_prompt_at_a_time(plain: Cluster, kind: HybridKind, is_concurrent: bool) -> None:
    free = await plain["p"].ask("free"), await plain["d"].ask("free")
    for length in lengths_of(kind):
        plain["d"].poison()
        await assert_right(plain, kind, [length], f"one {is_concurrent}", is_concurrent=is_concurrent)
        await wait_free(plain["p"], free[0])
        await wait_free(plain["d"], free[1])


@LEGS
async def test_eight_prompts_at_once(plain: Cluster, kind: HybridKind, is_concurrent: bool) -> None:
    free = await plain["p"].ask("free"), await plain["d"].ask("free")
    plain["d"].poison()
    await assert_right(plain, kind, list(EIGHT), f"eight {is_concurrent}", is_concurrent=is_concurrent)
    await wait_free(plain["p"], free[0])
    await wait_free(plain["d"], free[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cached(tmp_path_factory: pytest.TempPathFactory, kind: HybridKind) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp(f"{kind.name}-cached")
    async with trio(directory, kind, connector=CONNECTOR, prefill=IN_PIECES, enable_prefix_caching=True) as cluster:
        yield cluster


@LEGS
async def test_prompts_computed_in_pieces(cached: Cluster, kind: HybridKind, is_concurrent: bool) -> None:
    for length in lengths_of(kind):
        await assert_right(cached, kind, [length], f"pieces {is_concurrent}", is_concurrent=is_concurrent)


@LEGS
async def test_turns_of_one_conversation(cached: Cluster, kind: HybridKind, is_concurrent: bool) -> None:
    """Each side has of each group what it kept, and the decode engine the answers too."""
    ids = token_ids(2 * WINDOW + 9, f"turns {is_concurrent}")
    for turn in range(4):
        whole = await alone(cached["mono"], kind, ids)
        _, answer, sent_id, arrived_id = await through(cached, ids, is_concurrent=is_concurrent)
        assert_same_tokens(kind, answer, whole, f"turn {turn}: {answer.report}")
        assert answer.report.get("code", "") == "", f"turn {turn}: {answer.report}"
        if answer["loaded_ms"] is not None:
            await assert_same_group_bytes(cached, sent_id, arrived_id)
        ids = ids + answer.tokens + token_ids(WINDOW + 5, f"turn {turn}")


async def test_prompts_that_begin_alike(cached: Cluster, kind: HybridKind) -> None:
    """In bfloat16 only the bytes prove something: how prompts that are computed together are cut, no other engine
    repeats."""
    shared = token_ids(3 * WINDOW, "shared")
    prompts = [shared + token_ids(length, length) for length in (1, 31, WINDOW, WINDOW + 40)]
    wanted = [await alone(cached["mono"], kind, ids) for ids in prompts]
    for repeat in range(2):
        got = await asyncio.gather(*(through(cached, ids) for ids in prompts))
        for (_, answer, sent_id, arrived_id), whole in zip(got, wanted, strict=True):
            assert answer.report.get("code", "") == "", answer.report
            if kind.dtype == "float32":
                assert_same_tokens(kind, answer, whole, repeat)
            if answer["loaded_ms"] is not None:
                await assert_same_group_bytes(cached, sent_id, arrived_id)


@pytest_asyncio.fixture(loop_scope="module")
async def unlike(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Cluster, HybridKind]]:
    name, way = request.param
    async with trio(tmp_path, KINDS[name], connector=CONNECTOR, **UNLIKE[way]) as cluster:
        yield cluster, KINDS[name]


@pytest.mark.parametrize(
    "unlike",
    [(name, way) for name in UNLIKE_KINDS for way in UNLIKE],
    indirect=True,
    ids=lambda value: ", ".join(value),
)
async def test_engines_that_are_not_alike(unlike: tuple[Cluster, HybridKind]) -> None:
    """The answer is right: by the source's KV, or computed, with the reason named."""
    cluster, kind = unlike
    for length in (2, WINDOW + 1, 5 * WINDOW - 1):
        ids = token_ids(length, "unlike")
        whole = await alone(cluster["mono"], kind, ids)
        _, answer, *_ = await through(cluster, ids)
        assert answer.report["code"] in ("", "incompatible"), answer.report
        if answer.report["code"] and kind.dtype == "bfloat16":  # d computed it, and two ranks round otherwise than one
            whole = await cluster["d"].generate(ids, ANSWER)
        assert_same_tokens(kind, answer, whole, answer.report)
