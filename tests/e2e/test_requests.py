"""What the front door refuses, and what it does where a kind of worker is missing."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.e2e.client import Answer, ask, completion
from tests.support.e2e.cluster import Cluster, until
from tests.support.e2e.reference import CONTEXT_TOKENS, make_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")

TOKENS = 8


@pytest.fixture
def cluster(tiny_cluster: Cluster) -> Cluster:
    return tiny_cluster


def chat(**more: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 4, **more}


BAD_COMPLETIONS = {
    "not json": (b"{nonsense", None),
    "not an object": (b"[1, 2]", None),
    "unknown model": (completion("hello", TOKENS, "absent"), "model"),
    "no model": ({"prompt": "hello"}, "model"),
    "no prompt": ({"model": "tiny"}, "prompt"),
    "prompt over the context": (completion(make_prompt(CONTEXT_TOKENS + 1), TOKENS, "tiny"), "prompt"),
    "text over the context": (completion("fox " * CONTEXT_TOKENS, TOKENS, "tiny"), "prompt"),
    "answer over the context": (completion(make_prompt(10), CONTEXT_TOKENS, "tiny"), "max_tokens"),
    "unknown token": (completion([5, 100_000], TOKENS, "tiny"), "prompt"),
    "negative max_tokens": (completion("hello", -1, "tiny"), "max_tokens"),
    "no tokens wanted": (completion("hello", 0, "tiny"), "max_tokens"),
    "temperature": ({**completion("hello", TOKENS, "tiny"), "temperature": 9}, "temperature"),
    "streamed too": ({**completion(make_prompt(CONTEXT_TOKENS + 1), TOKENS, "tiny"), "stream": True}, "prompt"),
}
BAD_CHATS = {
    "unknown model": (chat(model="absent"), "model"),
    "negative max_tokens": (chat(max_tokens=-1), "max_tokens"),
    "negative max_completion_tokens": (chat(max_completion_tokens=-5), "max_completion_tokens"),
    "no messages": (chat(messages=[]), "messages"),
    "prompt over the context": (chat(messages=[{"role": "user", "content": "fox " * CONTEXT_TOKENS}]), "messages"),
}
CASES = [("/v1/completions", *case) for case in BAD_COMPLETIONS.values()]
CASES += [("/v1/chat/completions", *case) for case in BAD_CHATS.values()]
NAMES = [f"completion: {name}" for name in BAD_COMPLETIONS] + [f"chat: {name}" for name in BAD_CHATS]


@pytest.mark.parametrize(("path", "body", "field"), CASES, ids=NAMES)
async def test_a_bad_request_is_refused_naming_the_field(cluster: Cluster, path, body, field) -> None:
    answer = await ask(cluster.url("router"), body, path)
    is_unknown = isinstance(body, dict) and body.get("model") == "absent"
    assert answer.status == (404 if is_unknown else 400), answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == field, answer.error
    assert answer.error["retryable"] is False
    assert field is None or field in answer.error["message"]
    await cluster.assert_drained()


async def test_good_requests_still_pass(cluster: Cluster, tiny_reference) -> None:
    prompt = make_prompt(100)
    plain, streamed = await asyncio.gather(
        ask(cluster.url("router"), completion(prompt, TOKENS, "tiny")),
        ask(cluster.url("router"), completion(prompt, TOKENS, "tiny", stream=True)),
    )
    for answer in (plain, streamed):
        assert (answer.status, answer.prefill) == (200, "remote")
        tiny_reference.check(answer.token_ids, prompt, TOKENS)
    assert streamed.is_done
    await cluster.assert_drained()


async def test_without_prefill_worker_the_decode_worker_computes_or_the_router_says_503(
    cluster: Cluster, tiny_reference
) -> None:
    await cluster.stop("p1")
    await cluster.router("strict", local_prefill="off")
    await cluster.seen("d1")
    await cluster.seen("d1", router="strict")
    prompt = make_prompt(101)
    answer = await ask(cluster.url("router"), completion(prompt, TOKENS, "tiny"))
    assert (answer.status, answer.prefill) == (200, "local")
    assert answer.headers["x-kvxfer-prefill-reason"] == "no_prefill_worker"
    tiny_reference.check(answer.token_ids, prompt, TOKENS)
    await check_unavailable(await ask(cluster.url("strict"), completion(prompt, TOKENS, "tiny")), "prefill worker")
    streamed = await ask(cluster.url("strict"), completion(prompt, TOKENS, "tiny", stream=True))
    await check_unavailable(streamed, "prefill worker")
    await cluster.assert_drained()


async def test_without_decode_worker_the_router_says_503(cluster: Cluster, tiny_reference) -> None:
    await cluster.stop("d1")
    await cluster.seen("p1")
    body = completion(make_prompt(102), TOKENS, "tiny")
    await check_unavailable(await ask(cluster.url("router"), body), "decode worker")
    await check_unavailable(await ask(cluster.url("router"), {**body, "stream": True}), "decode worker")
    await cluster.assert_drained()
    await cluster.restart("d1")
    answers: list[Answer] = []

    async def is_served() -> bool:
        answers.append(await ask(cluster.url("router"), body))
        return answers[-1].status == 200

    await until(is_served, "the new decode worker answers", within_s=10.0)
    assert answers[-1].prefill == "remote"
    tiny_reference.check(answers[-1].token_ids, make_prompt(102), TOKENS)
    await cluster.assert_drained()


async def check_unavailable(answer: Answer, what: str) -> None:
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert (answer.error["code"], answer.error["retryable"]) == ("no_worker", True)
    assert what in answer.error["message"]
