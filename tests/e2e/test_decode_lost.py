"""The decode worker dies: while it streams, and while it pulls. Everybody else goes on, and its blocks come back."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.e2e.client import Answer, Stream, ask, completion
from tests.support.e2e.cluster import DEAD_AFTER_S, SLOW_TTL_S, Cluster
from tests.support.e2e.reference import make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")

LONG = 3000
TOKENS = 16
NOTICED_S = DEAD_AFTER_S + 2.0
"""A broken connection says it at once; the coordinator at the latest, and 2 s are slack."""


@pytest.fixture
def cluster(slow_cluster: Cluster) -> Cluster:
    return slow_cluster


def check_broken(answer: Answer) -> None:
    """Whole events, an error as the last of them, and then the end mark."""
    assert answer.status == 200
    assert answer.is_done
    assert not answer.has_partial_event
    assert set(answer.events[-1]) == {"error"}
    assert not any("error" in event for event in answer.events[:-1])
    error = answer.error
    assert set(error) >= {"message", "type", "param", "code", "retryable"}
    assert (error["type"], error["code"]) == ("server_error", "peer_gone")
    assert "decode worker" in error["message"]


async def test_killed_mid_stream(cluster: Cluster, slow_reference) -> None:
    prompts = [make_prompt(200), make_prompt(300)]
    streams = [Stream(cluster.url("router"), completion(prompt, 4000, "slow")) for prompt in prompts]
    for stream in streams:
        await stream.first()
    await asyncio.sleep(0.3)
    await cluster.kill("d1")
    async with asyncio.timeout(NOTICED_S):
        answers = [await stream.rest() for stream in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        check_broken(answer)
        got = answer.token_ids
        assert 1 <= len(got) < 4000
        assert tuple(got[:20]) == slow_reference.expect(prompt, 20).token_ids[: len(got[:20])]
    await cluster.assert_drained(SLOW_TTL_S + 1.0)
    await check_goes_on(cluster, slow_reference, seed=1)


async def test_killed_while_it_pulls(cluster: Cluster, slow_reference) -> None:
    """The prefill worker holds blocks for a reader that is dead: they come back when that is known."""
    asks = [
        asyncio.create_task(
            ask(cluster.url("router"), completion(make_prompt(LONG, seed=n), TOKENS, "slow", stream=bool(n)))
        )
        for n in (0, 1)
    ]
    await cluster.mid_pull("d1", "p1")
    await cluster.kill("d1")
    async with asyncio.timeout(NOTICED_S):
        answers = [await asking for asking in asks]
    for answer in answers:
        assert answer.status in (502, 503), answer
        assert answer.error["type"] == "server_error"
        assert answer.error["code"] in ("peer_gone", "no_worker")
        assert answer.error["retryable"] is True
    await cluster.assert_drained(SLOW_TTL_S + 1.0)
    await check_goes_on(cluster, slow_reference, seed=2)


async def check_goes_on(cluster: Cluster, reference, seed: int) -> None:
    """The router says that no worker decodes, until one does again."""
    await cluster.seen("p1")
    prompt = make_prompt(100, seed=seed)
    refused = await ask(cluster.url("router"), completion(prompt, TOKENS, "slow"))
    assert (refused.status, refused.error["code"]) == (503, "no_worker")
    assert int(refused.headers["retry-after"]) >= 1
    await cluster.restart("d1")
    await cluster.seen("p1", "d1")
    answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "slow", stream=True))
    assert (answer.status, answer.account["prefill"], answer.is_done) == (200, "remote", True)
    reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.assert_drained()
