"""Engines of vLLM behind the router: what each leg says to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvxfer.types import AgentRef, CompatibilityRecord, Exposure, Incarnation, Membership, PoolRecord, Role
from tests.support.fake_workers import MODEL, FakeWorker, events, router_over, texts


def vllm_pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p", Role.PREFILL, dialect="vllm"), FakeWorker("d", Role.DECODE, dialect="vllm")


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 7}, {"max_completion_tokens": 7, "min_tokens": 3}])
async def test_the_prefill_leg_is_a_request_of_one_token_with_a_short_answer(limit: dict[str, Any]) -> None:
    p, d = vllm_pair()
    async with router_over(p, d) as router:
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, **limit}
        options |= {"prompt_logprobs": 1, "return_token_ids": True}
        answer = await router.chat(**options)
        assert answer.headers["x-kvxfer-prefill"] == "remote"
        assert texts(events(answer.text)) == "one two three"
        [prefill], [decode] = p.received, d.received
    sent = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}
    prefill_params, decode_params = prefill.body.pop("kv_transfer_params"), decode.body.pop("kv_transfer_params")
    assert decode.body == {**sent, **options}
    one = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in limit or name == "max_tokens"}
    assert prefill.body == {**sent, "temperature": 0, **one}
    assert (prefill_params["do_remote_decode"], prefill_params["do_remote_prefill"]) == (True, False)
    assert (decode_params["do_remote_decode"], decode_params["do_remote_prefill"]) == (False, True)
    assert prefill_params["transfer_id"] == decode_params["transfer_id"]
    assert prefill_params["traceparent"] == decode_params["traceparent"] == decode.headers["traceparent"]
    assert prefill_params["source"] == decode_params["source"] == {**decode_params["source"], "agent_id": "p"}


async def test_engines_of_different_dialects_are_no_pair() -> None:
    p, d = FakeWorker("p", Role.PREFILL), FakeWorker("d", Role.DECODE, dialect="vllm")
    async with router_over(p, d) as router:
        answer = await router.complete()
        assert answer.headers["x-kvxfer-prefill"] == "local"
        assert p.received == []
        assert "kv_transfer_params" not in d.received[0].body


async def test_engines_that_cut_their_blocks_and_heads_otherwise_are_a_pair() -> None:
    """A prefill engine of two ranks, each with half of the heads, and blocks of another size."""
    p, d = vllm_pair()
    record = CompatibilityRecord("m", "c", "w", "f32", 2, 8, 16, 128, "page:HNC", "isa vec", "", "CPU_ATTN")
    half = dataclasses.replace(record, kv_heads=4, block_tokens=32)
    d.pools = (PoolRecord(1, record, 8, 8 * 128, Exposure.POOL, is_shareable=False),)
    p.pools = (PoolRecord(1, half, 8, 4 * 32, Exposure.POOL, is_shareable=False),)
    async with router_over(p, d, local_prefill="off") as router:
        assert (await router.complete()).status_code == 503  # one rank of p is not there yet
        info = dataclasses.replace(p.member.info, agent_id="p.1", http_url="")
        second = dataclasses.replace(p.member, ref=AgentRef("p.1", p.incarnation), info=info)
        router.workers.update(Membership(2, (p.member, second, d.member)))
        answer = await router.complete()
        assert answer.headers["x-kvxfer-prefill"] == "remote"
        for leg in (p.received[0], d.received[0]):
            assert leg.params is not None
            assert leg.params["source"] == {"agent_id": "p", "ranks": 2, "address": p.member.info.http_url}


async def test_an_engine_of_a_dialect_that_nobody_knows_gets_nothing() -> None:
    async with router_over(FakeWorker("d", dialect="another")) as router:
        assert (await router.complete()).status_code == 503


@pytest.mark.parametrize("shared", ["p", "d"])
async def test_of_engines_behind_one_address_the_leg_names_the_one_that_was_chosen(shared: str) -> None:
    """vLLM's data parallel: its front end would take any of them, and the other leg waits for the one that it knows."""
    fakes = dict(zip("pd", vllm_pair(), strict=True))
    async with router_over(*fakes.values()) as router:
        alone = next(fake for name, fake in fakes.items() if name != shared).member
        engines = []
        for rank in range(3):
            member = fakes[shared].member
            name = f"engine_dp{rank}"
            info = dataclasses.replace(member.info, agent_id=name)
            engines.append(dataclasses.replace(member, ref=AgentRef(name, Incarnation(rank + 1, bytes(16))), info=info))
        router.workers.update(Membership(2, (alone, *engines)))
        for _ in range(24):  # ties are drawn
            assert (await router.complete()).headers["x-kvxfer-prefill"] == "remote"
        chosen = set()
        for leg in fakes[shared].received:
            assert leg.params is not None
            agent_id = leg.params["source" if shared == "p" else "destination"]["agent_id"]
            assert agent_id == f"engine_dp{leg.headers['x-data-parallel-rank']}"
            chosen.add(agent_id)
        assert len(chosen) > 1
        other = fakes["d" if shared == "p" else "p"]
        assert not any("x-data-parallel-rank" in leg.headers for leg in other.received)
        router.workers.update(Membership(3, (alone, engines[1])))  # it has its address for itself
        await router.complete()
        assert "x-data-parallel-rank" not in fakes[shared].received[-1].headers


async def test_a_decode_worker_of_sglang_is_never_asked_to_compute_a_prompt() -> None:
    """It would refuse that as the client's own mistake."""
    p, d = FakeWorker("p", Role.PREFILL, dialect="sglang"), FakeWorker("d", Role.DECODE, dialect="sglang")
    async with router_over(d) as router:
        answer = await router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert "no decode worker computes a prompt itself" in answer.json()["error"]["message"]
        assert (await router.client.post("/tokenize", json={"model": "tiny", "prompt": "x"})).status_code == 200
    async with router_over(p, d, min_remote_prefill_tokens=1000) as router:
        assert (await router.complete()).headers["x-kvxfer-prefill"] == "remote"
        refused = await router.complete(n=2)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert [one.path for one in d.received if one.path != "/v1/completions"] == ["/tokenize"]


async def test_a_stream_of_a_route_that_generates_nothing_is_not_looked_for() -> None:
    d = FakeWorker("d0", Role.BOTH)
    async with router_over(d) as router:
        answer = await router.client.post("/v1/embeddings", json={"model": "tiny", "input": "x", "stream": True})
        assert answer.status_code == 200


ARRAY = b'[{"text":"a","meta_info":{"prompt_tokens":2}}, {"text":"b"}]\n'


@pytest.mark.parametrize(
    ("path", "body", "said", "status"),
    [
        ("/generate", {"text": ["x", "y"]}, ARRAY, 200),
        ("/generate", {"text": "x", "sampling_params": {"n": 2}}, ARRAY, 200),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, b"[]", 200),
        ("/generate", {"text": "x"}, ARRAY, 502),
        ("/generate", {"text": ["x", "y"]}, b'[1],"a":[2]', 502),
        ("/generate", {"text": ["x", "y"]}, b"[1}]", 502),
        ("/v1/completions", {"model": MODEL, "prompt": ["x", "y"]}, ARRAY, 502),
    ],
)
async def test_several_answers_may_be_an_array(path: str, body: dict[str, Any], said: bytes, status: int) -> None:
    """As SGLang answers. It counted as a failure of the worker, so that a client could have every worker ejected."""
    d = FakeWorker("d0", Role.BOTH, dialect="plain")
    d.failures = [(200, said)]
    async with router_over(d, attempts_max=1) as router:
        answer = await router.client.post(path, json=body)
        assert answer.status_code == status
        assert status != 200 or answer.content == said
        failed = await router.metric('kvxfer_router_leg_failures_total{kind="malformed",part="decode"}')
        assert failed == (status != 200)
