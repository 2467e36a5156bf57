"""KV caches in fewer bits, and in several precisions, on real vLLM: moved bit by bit, or refused by name. The scales of
an fp8 cache are in the model's weights, whose whole content both engines compare."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.vllm.checks import assert_same_bytes, prompt, wait_free
from tests.support.vllm.engines import Cluster, both_legs, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")
KINDS: dict[str, dict[str, Any]] = {
    "e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}


@pytest_asyncio.fixture(loop_scope="package", scope="module", params=list(KINDS))
async def few_bits(cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    options = {**KINDS[request.param], "enable_prefix_caching": False}
    await cluster.start("p8", "kv_producer", max_num_batched_tokens=512, **options)
    await cluster.start("d8", "kv_consumer", **options)
    await cluster.start("m8", None, **options)
    names = ("p8", "d8", "m8")
    for name in names:
        await cluster[name].wait_ready()
    yield cluster
    for name in names:
        await cluster.engines.pop(name).stop()


@pytest.mark.parametrize("length", [2, 129, 1500])
async def test_few_bits_are_moved_as_they_are(few_bits: Cluster, length: int) -> None:
    prefill, decode = few_bits["p8"], few_bits["d8"]
    for is_concurrent in (False, True):
        ids = prompt(length, seed=f"few bits {is_concurrent}")
        whole = await few_bits["m8"].generate(ids, 12)
        if is_concurrent:
            legs = both_legs(prefill, decode)
            _, answer = await asyncio.gather(prefill.generate(ids, 1, legs[0]), decode.generate(ids, 12, legs[1]))
        else:
            _, answer = await hand_over(prefill, decode, ids, 12)
        assert answer.report["code"] == "", answer.report["text"]
        await assert_same_bytes(prefill, decode, answer.report["transfer_id"])
        assert answer.tokens == whole.tokens
    await wait_free(prefill)
    await wait_free(decode)


@pytest.mark.parametrize(("names", "mono"), [(("p8", "d"), "mono"), (("p", "d8"), "m8")], ids=str)
async def test_other_precisions_are_refused_by_name(few_bits: Cluster, names: tuple[str, str], mono: str) -> None:
    prefill, decode = (few_bits[name] for name in names)
    ids = prompt(200, seed=names)
    whole = await few_bits[mono].generate(ids, 12)
    _, answer = await hand_over(prefill, decode, ids, 12)
    assert answer.report["code"] == "incompatible"
    assert "dtype is" in answer.report["text"]
    assert answer.tokens == whole.tokens


async def test_layers_of_several_precisions_are_refused_at_start(cluster: Cluster) -> None:
    mixed = {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["0", "3"]}
    engine = await cluster.start("mixed", "kv_both", **mixed)
    try:
        with pytest.raises(AssertionError, match="blocks of another shape or precision than"):
            await engine.wait_ready()
    finally:
        await cluster.engines.pop("mixed").stop()
