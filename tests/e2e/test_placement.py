"""Workers of unequal size, a prefill worker whose HTTP is away, and what is said of readiness and of cached tokens."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tests.support.e2e.client import ask, completion
from tests.support.e2e.cluster import Cluster, running, until
from tests.support.e2e.reference import make_prompt
from tests.support.e2e.source import serving_source

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
SMALL = {"pool_blocks": 8}
"""128 tokens."""
LARGE = {"pool_blocks": 64}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _standing(tmp_path_factory, tiny_model) -> AsyncIterator[Cluster]:
    async with running(tmp_path_factory.mktemp("placement"), tiny_model, {"p1": SMALL, "d1": LARGE}) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(_standing: Cluster) -> Cluster:
    await _standing.restore()
    return _standing


async def ready(cluster: Cluster, name: str) -> tuple[int, str | None]:
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
        answer = await client.get(f"{cluster.url(name)}/ready")
        assert (await client.get(f"{cluster.url(name)}/live")).status_code == 200
        return answer.status_code, answer.json().get("reason")


async def test_a_prompt_that_the_prefill_worker_cannot_hold_is_served(cluster: Cluster, tiny_reference) -> None:
    router = cluster.url("router")
    short, prompt = make_prompt(100), make_prompt(300)
    assert (await ask(router, completion(short, TOKENS, "tiny"))).prefill == "remote"
    text = ""
    while len(tiny_reference.model.encode(text)) < 300:
        text += "the quick brown fox jumps over the lazy dog "
    for body in (completion(prompt, TOKENS, "tiny"), completion(text, TOKENS, "tiny")):
        for more in ({}, {"stream": True}):
            answer = await ask(router, {**body, **more})
            assert (answer.status, answer.prefill) == (200, "local"), answer.error
            assert answer.headers["x-kvxfer-prefill-reason"] == "prefill_too_small"
            assert answer.headers["x-kvxfer-attempt"] == ("1" if body["prompt"] is not text else "2")
            if body["prompt"] is not text:
                tiny_reference.check(answer.token_ids, prompt, TOKENS)
    await cluster.worker("p2", "prefill", **LARGE)
    await cluster.seen("p1", "p2", "d1")
    for seed in range(4):
        answer = await ask(router, completion(make_prompt(300, seed=seed), TOKENS, "tiny"))
        assert (answer.status, answer.account["prefill"]) == (200, "remote")
        assert answer.account["prefill_agent"] == "p2"
    answer = await ask(router, completion(text + "and again", TOKENS, "tiny"))
    assert (answer.status, answer.account["prefill_agent"]) == (200, "p2")
    answer = await ask(router, completion(make_prompt(1100), TOKENS, "tiny"))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", "prompt")
    await cluster.assert_drained()


async def test_tokens_cached_only_at_prefill_are_counted(cluster: Cluster) -> None:
    body = completion(make_prompt(100, seed=5), TOKENS, "tiny", stream_options={"include_usage": True})
    cold = await ask(cluster.url("router"), {**body, "stream": True})
    assert cold.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await cluster.kill("d1")
    await cluster.restart("d1")
    await cluster.seen("p1", "d1")
    warm = await ask(cluster.url("router"), {**body, "stream": True})
    assert warm.account["prefill"] == "remote"
    assert (warm.account["cached_tokens"], warm.account["prefill_cached_tokens"]) == (0, 96)
    assert warm.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    both = await ask(cluster.url("router"), body)
    assert both.account["cached_tokens"] == 96
    assert both.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    await cluster.assert_drained()


async def test_prefill_worker_without_http_delays_no_request(cluster: Cluster, tiny_reference) -> None:
    """Its agent is alive: the decode worker would look for its grant for a minute."""
    await cluster.kill("p1")
    await cluster.seen("d1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and without a listener
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with serving_source(cluster, tiny_reference, http_url=url):
            await cluster.seen("d1", "source")
            prompt, began_s = make_prompt(300, seed=7), time.monotonic()
            answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "tiny", stream=True))
            assert time.monotonic() - began_s < 15.0
            assert (answer.status, answer.prefill) == (200, "local")
            assert answer.headers["x-kvxfer-prefill-reason"] == "prefill_ejected"
            tiny_reference.check(answer.token_ids, prompt, TOKENS)
            await cluster.worker("p2", "prefill", **LARGE)
            await cluster.seen("d1", "source", "p2")
            for seed in range(3):
                answer = await ask(cluster.url("router"), completion(make_prompt(90, seed=seed), TOKENS, "tiny"))
                assert (answer.status, answer.account["prefill_agent"]) == (200, "p2")
    await cluster.assert_drained()


async def test_ready_follows_the_workers_and_outlives_the_coordinator(cluster: Cluster) -> None:
    for name in ("router", "p1", "d1"):
        assert await ready(cluster, name) == (200, None)
    await cluster.kill("coordinator")
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:

        async def is_lost() -> bool:
            answer = await client.get(f"{cluster.url('router')}/live")
            return not answer.json()["coordinator_connected"]

        await until(is_lost, "the router noticed that the coordinator is gone", within_s=20.0)
    for name in ("router", "p1", "d1"):
        assert await ready(cluster, name) == (200, None)
    await cluster.restart("coordinator")
    await cluster.seen("p1", "d1")
    await cluster.stop("d1")
    await cluster.seen("p1")
    assert await ready(cluster, "router") == (503, "no_worker")
    await asyncio.gather(cluster.restart("d1"), cluster.worker("b1", "both", **SMALL))
    await cluster.seen("p1", "d1", "b1")
    assert await ready(cluster, "router") == (200, None)
