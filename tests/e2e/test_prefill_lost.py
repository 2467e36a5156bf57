"""The prefill worker is lost while the decode worker pulls from it: the answer is the right one all the same."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.e2e.client import Answer, ask, completion
from tests.support.e2e.cluster import DEAD_AFTER_S, RECOMPUTE_S, RECONNECT_S, SLOW_TTL_S, Cluster, together
from tests.support.e2e.reference import make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")

LONG = 3000
TOKENS = 16
LOST_S = RECONNECT_S + RECOMPUTE_S
"""A killed process closes its connections at once: then the reader looks for it, gives up, and computes."""
SILENT_S = DEAD_AFTER_S + RECONNECT_S + RECOMPUTE_S
"""A stopped process says nothing: only the coordinator can tell, and the reader may look for it after that."""


@pytest.fixture
def cluster(slow_cluster: Cluster) -> Cluster:
    return slow_cluster


async def within(bound_s: float, asking: asyncio.Task[Answer]) -> Answer:
    began_s = time.monotonic()
    answer = await asking
    took_s = time.monotonic() - began_s
    print(f"answered {took_s:.2f} s after the loss (bound {bound_s:g} s): {answer.account.get('reason')}")
    assert took_s <= bound_s
    return answer


def check_recomputed(answer: Answer, code: str) -> None:
    assert answer.status == 200, answer.body
    assert answer.account["failure"] == code, answer.account
    assert answer.account["prefill"] == "local"


async def test_stopped_while_it_is_read(cluster: Cluster, slow_reference) -> None:
    prompt = make_prompt(LONG, seed=20)
    asking = asyncio.create_task(ask(cluster.url("router"), completion(prompt, TOKENS, "slow")))
    await cluster.mid_pull("d1", "p1")
    cluster.pause("p1")
    answer = await within(SILENT_S, asking)
    assert answer.status == 200, answer.body
    assert answer.account["prefill"] == "local", answer.account
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained()
    cluster.unpause("p1")
    await cluster.assert_drained(SLOW_TTL_S + 1.0)
    await cluster.seen("p1", "d1")
    again = await ask(cluster.url("router"), completion(make_prompt(60, seed=21), TOKENS, "slow"))
    assert again.account["prefill"] == "remote", again.account
    slow_reference.check(again.token_ids, make_prompt(60, seed=21), TOKENS)
    await cluster.assert_drained()


@pytest.mark.parametrize("is_stream", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["whole", "stream"])
async def test_killed_while_it_is_read(cluster: Cluster, slow_reference, is_stream: bool) -> None:
    prompt = make_prompt(LONG, seed=1 + is_stream)
    body = completion(prompt, TOKENS, "slow", stream=is_stream)
    asking = asyncio.create_task(ask(cluster.url("router"), body))
    await cluster.mid_pull("d1", "p1")
    await cluster.kill("p1")
    answer = await within(LOST_S, asking)
    check_recomputed(answer, "peer_gone")
    assert answer.is_done is is_stream
    assert not answer.error
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained()


async def test_another_prefill_worker_takes_over(cluster: Cluster, slow_reference) -> None:
    """With ``--on-prefill-failure=redispatch`` the router starts again with the other one, under a new transfer id.
    The other one lets itself be read over a socket only.
    """
    both = ("p1", "p2")
    await together(
        cluster.worker("p2", "prefill", lanes="stream", kv_cache_mb=256, chunk_tokens=8, max_batch_tokens=64),
        cluster.router("redispatch", on_prefill_failure="redispatch"),
    )
    await cluster.seen(*both, "d1", router="redispatch")
    prompt = make_prompt(LONG, seed=5)
    asking = asyncio.create_task(ask(cluster.url("redispatch"), completion(prompt, TOKENS, "slow")))
    victim = await cluster.mid_pull("d1", *both)
    await cluster.kill(victim)
    answer = await within(LOST_S, asking)
    assert answer.status == 200, answer.body
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    other = next(name for name in both if name != victim)
    assert answer.account["prefill"] == "remote", answer.account
    assert (answer.account["prefill_agent"], answer.account["attempt"]) == (other, 2)
    assert answer.account["lane"] == ("stream" if other == "p2" else "mapped")
    await cluster.assert_drained()


@pytest.mark.nightly
async def test_killed_while_it_is_read_over_a_socket(cluster: Cluster, slow_reference) -> None:
    await cluster.kill("p1")
    await cluster.restart("p1", lanes="stream")
    await cluster.seen("p1", "d1")
    prompt = make_prompt(LONG, seed=6)
    asking = asyncio.create_task(ask(cluster.url("router"), completion(prompt, TOKENS, "slow")))
    await cluster.mid_pull("d1", "p1")
    await cluster.kill("p1")
    answer = await within(LOST_S, asking)
    check_recomputed(answer, "peer_gone")
    slow_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained()
