"""Engines that stop or die in the middle of a transfer."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import prompt, wait_free, within
from tests.support.vllm.engines import Cluster, both_legs, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")

LOST_S = 3.0
"""How soon an engine must be rid of a peer that is silent."""


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def victims(cluster: Cluster) -> AsyncIterator[Cluster]:
    """A second pair that may be hurt; its prefill engine computes in small steps, so that there is a middle."""
    await cluster.start("p2", "kv_producer", max_num_batched_tokens=64, pause_s=0.05)
    await cluster.start("d2", "kv_consumer")
    for name in ("p2", "d2"):
        await cluster[name].wait_ready()
    yield cluster
    for name in ("p2", "d2"):
        await cluster.engines.pop(name).stop()


async def lose_prefill(victims: Cluster, decode: str, number: signal.Signals, ids: list[int]) -> None:
    """The decode engine answers right, and not later than after LOST_S and its own computing."""
    legs = both_legs(victims["p2"], victims[decode])
    waiting = victims[decode].add(ids, 8, legs[1])
    victims["p2"].add(ids, 1, legs[0])
    await asyncio.sleep(0.15)
    victims["p2"].signal(number)
    begun_s = time.monotonic()
    answer = await victims[decode].wait(waiting)
    lasted_s = time.monotonic() - begun_s
    whole = await victims["mono"].generate(ids, 8)
    assert answer.tokens == whole.tokens
    assert answer.report["code"] == "peer_gone"
    recompute_s = whole["ms"] / 1e3
    print(f"lost after {lasted_s - recompute_s:.2f} s, recompute {recompute_s:.2f} s")
    assert lasted_s - recompute_s < within(LOST_S)


async def test_a_prefill_engine_that_stops(victims: Cluster) -> None:
    await lose_prefill(victims, "d2", signal.SIGSTOP, prompt(1900, seed="stopped"))
    victims["p2"].signal(signal.SIGCONT)
    ids = prompt(500, seed="continued")
    (_, answer), whole = await asyncio.gather(
        hand_over(victims["p2"], victims["d2"], ids, 8), victims["mono"].generate(ids, 8)
    )
    assert (answer.tokens, answer.report["code"]) == (whole.tokens, "")
    await wait_free(victims["p2"], within_s=LOST_S)  # no peer could tell it that the first prompt is not wanted


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_a_decode_engine_that_is_lost(victims: Cluster, number: signal.Signals) -> None:
    legs = both_legs(victims["p2"], victims["d2"])
    ids = prompt(1900, seed=f"lost {number}")
    victims["d2"].add(ids, 8, legs[1])
    computing = victims["p2"].add(ids, 1, legs[0])
    await asyncio.sleep(0.15)
    victims["d2"].signal(number)
    await victims["p2"].wait(computing)
    await wait_free(victims["p2"], within_s=LOST_S)
    if number is signal.SIGSTOP:
        victims["d2"].signal(signal.SIGCONT)
        ids = prompt(500, seed="decode continued")
        (_, answer), whole = await asyncio.gather(
            hand_over(victims["p2"], victims["d2"], ids, 8), victims["mono"].generate(ids, 8)
        )
        assert (answer.tokens, answer.report["code"]) == (whole.tokens, "")


async def test_a_prefill_engine_that_was_restarted(victims: Cluster) -> None:
    """It has nothing of what it computed before, and must not be waited for."""
    ids = prompt(700, seed="restarted")
    first = await victims["p2"].generate(ids, 1, {"do_remote_decode": True})
    victims["p2"].signal(signal.SIGKILL)
    await victims["p2"].stop()
    await victims.start("p2", "kv_producer", max_num_batched_tokens=64, pause_s=0.05)
    await victims["p2"].wait_ready()
    answer, whole = await asyncio.gather(victims["d"].generate(ids, 8, first["kv"]), victims["mono"].generate(ids, 8))
    assert (answer.tokens, answer.report["code"]) == (whole.tokens, "peer_gone")
    assert "restarted" in answer.report["text"]
    assert answer.report["seconds"] < within(0.2)


async def test_a_prefill_engine_that_is_killed(victims: Cluster) -> None:
    await lose_prefill(victims, "d", signal.SIGKILL, prompt(1900, seed="killed"))
