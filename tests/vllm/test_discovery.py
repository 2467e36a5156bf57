"""Engines without a coordinator: the decode engine knows the prefill engine by the agent metadata that the request
carries."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import assert_same_bytes, prompt, wait_free
from tests.support.vllm.engines import Cluster, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")

ALONE = {"coordinator": "", "discovery": True}


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def discovered(cluster: Cluster) -> AsyncIterator[Cluster]:
    await cluster.start("pi", "kv_producer", extra=ALONE, max_num_batched_tokens=512)
    await cluster.start("di", "kv_consumer", extra=ALONE)
    for name in ("pi", "di"):
        await cluster[name].wait_ready()
    yield cluster
    for name in ("pi", "di"):
        await cluster.engines.pop(name).stop()


async def test_unregistered_peer_releases_a_cached_prompt(discovered: Cluster) -> None:
    """The first that the prefill engine hears of the other is that it needs nothing."""
    ids = prompt(385, seed="strange")
    alone = await discovered["di"].generate(ids, 8)
    _, again = await hand_over(discovered["pi"], discovered["di"], ids, 8)
    assert again.tokens == alone.tokens
    assert again.report == {}
    await wait_free(discovered["pi"])


@pytest.mark.parametrize("length", [2, 129, 1900])
async def test_tokens_and_bytes_are_the_same(discovered: Cluster, length: int) -> None:
    ids = prompt(length, seed="discovered")
    (_, answer), whole = await asyncio.gather(
        hand_over(discovered["pi"], discovered["di"], ids, 20), discovered["mono"].generate(ids, 20)
    )
    assert answer.tokens == whole.tokens
    assert answer.report["code"] == "", answer.report["text"]
    await assert_same_bytes(discovered["pi"], discovered["di"], answer.report["transfer_id"])
    await wait_free(discovered["pi"])


async def test_restarted_prefill_engine_is_discovered_again(discovered: Cluster) -> None:
    ids = prompt(700, seed="strange again")
    old = await discovered["pi"].generate(ids, 1, {"do_remote_decode": True})
    discovered["pi"].signal(signal.SIGKILL)
    await discovered["pi"].stop()
    await discovered.start("pi", "kv_producer", extra=ALONE)
    await discovered["pi"].wait_ready()
    late, whole = await asyncio.gather(
        discovered["di"].generate(ids, 8, old["kv"]), discovered["mono"].generate(ids, 8)
    )
    assert (late.tokens, late.report["code"]) == (whole.tokens, "peer_gone")
    ids = prompt(700, seed="strange once more")
    (_, answer), whole = await asyncio.gather(
        hand_over(discovered["pi"], discovered["di"], ids, 8), discovered["mono"].generate(ids, 8)
    )
    assert (answer.tokens, answer.report["code"]) == (whole.tokens, "")
