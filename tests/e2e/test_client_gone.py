"""A client that leaves gives everything back at once: both halves are aborted, whatever they were doing."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.e2e.client import Stream, ask, completion
from tests.support.e2e.cluster import Cluster, until
from tests.support.e2e.reference import make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")

GONE_S = 1.0
"""From the end of the connection to the last block given back."""
LONG = 4000


@pytest.fixture
def cluster(slow_cluster: Cluster) -> Cluster:
    return slow_cluster


async def wait_busy(cluster: Cluster, name: str, phase: str) -> None:
    async def is_busy() -> bool:
        return (await cluster.statistics(name))["engine"][phase] > 0

    await until(is_busy, f"{name} is {phase}", within_s=20.0)


async def check_given_back(cluster: Cluster, began_s: float) -> None:
    await cluster.assert_drained(GONE_S)
    print(f"everything was back {time.monotonic() - began_s:.3f} s after the client left")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_client_leaves_during_prefill(cluster: Cluster, is_stream: bool) -> None:
    prompt = make_prompt(LONG, seed=1 + is_stream)
    task = asyncio.create_task(ask(cluster.url("router"), completion(prompt, 64, "slow", stream=is_stream)))
    await wait_busy(cluster, "p1", "computing")
    await wait_busy(cluster, "d1", "pulling")
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_given_back(cluster, time.monotonic())


async def test_client_leaves_while_waiting_for_a_whole_answer(cluster: Cluster) -> None:
    task = asyncio.create_task(ask(cluster.url("router"), completion(make_prompt(100), 4000, "slow")))
    await wait_busy(cluster, "d1", "computing")
    await asyncio.sleep(0.2)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check_given_back(cluster, time.monotonic())


async def test_client_leaves_mid_stream(cluster: Cluster) -> None:
    stream = Stream(cluster.url("router"), completion(make_prompt(101), 4000, "slow"))
    await stream.first()
    await stream.leave()
    await check_given_back(cluster, time.monotonic())


async def test_client_leaves_while_its_request_waits_in_line(cluster: Cluster) -> None:
    """More prompts than the prefill worker computes at once: some have no blocks yet, and their readers wait."""
    asks = [
        asyncio.create_task(ask(cluster.url("router"), completion(make_prompt(1500, seed=n), 4, "slow")))
        for n in range(20)
    ]
    await wait_busy(cluster, "p1", "waiting")
    for task in asks:
        task.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    await check_given_back(cluster, time.monotonic())


async def test_many_clients_leave_and_the_others_are_answered(cluster: Cluster, slow_reference) -> None:
    prompts = [make_prompt(400, seed=n) for n in range(12)]
    asks = [asyncio.create_task(ask(cluster.url("router"), completion(prompt, 8, "slow"))) for prompt in prompts]
    await wait_busy(cluster, "p1", "computing")
    for task in asks[::2]:
        task.cancel()
    for prompt, task in list(zip(prompts, asks, strict=True))[1::2]:
        slow_reference.check((await task).token_ids, prompt, 8)
    await asyncio.gather(*asks, return_exceptions=True)
    await cluster.assert_drained()
