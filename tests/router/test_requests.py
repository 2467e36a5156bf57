"""Requests that go well, and requests that are the client's own fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from kvxfer.router.auth import ApiKeys
from kvxfer.types import Role, TransferId
from tests.support.fake_workers import MODEL, FakeWorker, events, failing, router_over, texts


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)


async def test_both_legs_get_the_same_request_and_each_its_role() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        sent = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "unknown": {"deep": [1]}, "user": "\u00e4"}
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        answer = await router.client.post(
            "/v1/completions", json=sent, headers={"x-request-id": "mine-1", "traceparent": trace, "tracestate": "k=v"}
        )
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-kvxfer-prefill"] == "remote"
        [prefill], [decode] = p.received, d.received
        for leg in (prefill, decode):
            assert leg.path == "/v1/completions"
            assert {name: value for name, value in leg.body.items() if name != "kv_transfer_params"} == sent
            assert leg.headers["x-request-id"] == "mine-1"
            assert leg.headers["traceparent"] == trace
            assert leg.headers["tracestate"] == "k=v"
        assert prefill.params is not None
        assert decode.params is not None
        assert prefill.params == {**decode.params, "role": "prefill"}
        assert 590.0 < decode.params["timeout_s"] <= 600.0
        assert decode.params == {
            "timeout_s": decode.params["timeout_s"],
            "transfer_id": str(TransferId.from_hex(decode.params["transfer_id"])),
            "attempt": 1,
            "role": "decode",
            "source": {"agent_id": "p0", "ranks": 1, "address": p.member.info.http_url},
            "destination": {"agent_id": "d0", "ranks": 1, "address": d.member.info.http_url},
            "first_token": "decode",
        }
        account = answer.json()["kvxfer"]
        assert account["transfer_id"] == decode.params["transfer_id"]
        assert account["bytes_moved"] == 7
        assert account["attempt"] == 1
        assert account["prefill_agent"] == "p0"
        assert account["decode_agent"] == "d0"
        assert account["prefill_s"] == 0.25


async def test_ids_are_made_where_the_client_gave_none_and_its_own_transfer_params_are_dropped() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        answer = await router.complete(kv_transfer_params={"transfer_id": "f" * 32})
        assert answer.headers["x-request-id"].startswith("req-")
        assert p.received[0].headers["x-request-id"] == d.received[0].headers["x-request-id"]
        assert p.received[0].headers["traceparent"] == d.received[0].headers["traceparent"]
        assert d.received[0].params is not None
        assert d.received[0].params["transfer_id"] != "f" * 32
        second = await router.complete(headers={"x-request-id": "has space"})
        assert second.headers["x-request-id"].startswith("req-")


async def test_a_stream_is_passed_on_with_usage_and_account() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        answer = await router.chat(stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-kvxfer-prefill"] == "remote"
        chunks = events(answer.text)
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["usage"]["total_tokens"] == 7
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert texts(chunks) == "one two three"
        [account] = [chunk["kvxfer"] for chunk in chunks[:-1] if "kvxfer" in chunk]
        assert account["prefill_s"] == 0.25
        assert account["bytes_moved"] == 7
        assert await router.metric('kvxfer_router_ttft_seconds_count{prefill="remote"}') == 1
        assert await router.metric('kvxfer_router_placements_total{reason="remote"}') == 1
        await router.wait_metric('kvxfer_router_inflight{part="decode",worker="d0"}', 0)


async def test_openai_client_works() -> None:
    p, d = pair()
    async with router_over(p, d, keys=ApiKeys(("secret-key",))) as router:
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="secret-key", max_retries=0) as client:
            models = await client.models.list()
            assert [model.id for model in models.data] == [MODEL]
            whole = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
            assert whole.choices[0].message.content == "one two three"
            assert whole.usage is not None
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            parts = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == "one two three"
            assert parts[-1].usage is not None
            text = await client.completions.create(model=MODEL, prompt="hi", max_tokens=3)
            assert text.choices[0].text == "one two three"
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model=MODEL, prompt="")
            assert caught.value.param == "prompt"
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="other", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        assert all("authorization" not in leg.headers for leg in p.received + d.received)


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        (b"{", None, "JSON"),
        (b"[]", None, "object"),
        (b'{"model": "tiny", "prompt": "x", "stream": "yes"}', "stream", "yes"),
        (b'{"model": "other", "prompt": "x"}', "model", "other"),
        (b'{"model": "tiny"}', "prompt", "required"),
        (b'{"model": "tiny", "prompt": ["a", ""]}', "prompt", "empty"),
    ],
)
async def test_a_wrong_request_is_told_which_field(body: bytes, param: str | None, word: str) -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        answer = await router.client.post("/v1/completions", content=body)
        assert answer.status_code == (404 if param == "model" else 400)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code", "retryable"}
        assert (error["type"], error["param"], error["retryable"]) == ("invalid_request_error", param, False)
        assert word in error["message"]
        assert answer.headers["x-request-id"]
        assert not p.received
        assert not d.received
        outcome = 'kvxfer_router_requests_total{outcome="client_error",route="/v1/completions"}'
        await router.wait_metric(outcome, 1)


@pytest.mark.parametrize("dialect", ["kvxfer", "vllm"])
async def test_fields_of_some_engines_are_passed_on_to_both_legs(dialect: str) -> None:
    """The engine that lacks one says so itself: another one has it."""
    p, d = FakeWorker("p", Role.PREFILL, dialect=dialect), FakeWorker("d", Role.DECODE, dialect=dialect)
    fields: dict[str, Any] = {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "guided_json": {"type": "object"}}
    fields |= {"reasoning_effort": "high", "response_format": {"type": "json_object"}, "logprobs": 3, "temperature": 3}
    fields |= {"tools": [{"type": "function", "function": {"name": "f"}}], "user": "u", "no_such_field": [1]}
    async with router_over(p, d) as router:
        answer = await router.complete(**fields)
        assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "remote")
    for leg in (*p.received, *d.received):
        assert {name: leg.body[name] for name in fields} == fields


@pytest.mark.parametrize("many", [{"n": 2}, {"best_of": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}])
async def test_several_sequences_of_one_request_are_computed_where_they_are_decoded(many: dict[str, Any]) -> None:
    """One transfer id stands for one sequence."""
    p, d = pair()
    async with router_over(p, d) as router:
        answer = await router.complete(**many)
        assert (answer.status_code, answer.headers["x-kvxfer-prefill"]) == (200, "local")
        assert (p.received, d.received[0].params) == ([], None)
    async with router_over(p, d, local_prefill="off") as router:
        answer = await router.complete(**many)
        assert answer.status_code == 400
        assert "local_prefill is off" in answer.json()["error"]["message"]


@pytest.mark.parametrize("refuser", ["p0", "d0"])
async def test_a_4xx_of_either_leg_is_passed_on_and_the_other_leg_ended(refuser: str) -> None:
    p, d = pair()
    refusing, waiting = (p, d) if refuser == "p0" else (d, p)
    status, body = failing(400, "invalid_argument", retryable=False, kind="invalid_request_error")
    body["error"]["param"] = "prompt"
    refusing.always_fails = (status, body)
    waiting.hold = asyncio.Event()
    async with router_over(p, d) as router:
        answer = await router.complete(stream=True)
        assert answer.status_code == 400
        assert answer.json() == body
        await asyncio.wait_for(waiting.received[0].left.wait(), 1.0)
        assert len(refusing.received) == 1


async def test_api_key() -> None:
    p, d = pair()
    async with router_over(p, d, keys=ApiKeys(("one", "two"))) as router:
        for value in (None, "Bearer wrong", "Basic one", "one", "Bearer"):
            headers = {} if value is None else {"authorization": value}
            answer = await router.complete(headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await router.complete(headers={"authorization": "Bearer two"})).status_code == 200
        assert (await router.client.get("/v1/workers")).status_code == 401
        assert (await router.client.get("/health")).status_code == 200
        assert all("authorization" not in leg.headers for leg in p.received + d.received)


@pytest.mark.parametrize("keys", [ApiKeys(), ApiKeys(("for-the-worker",))])
@pytest.mark.parametrize("forwards", [False, True])
async def test_authorization_goes_to_workers_only_where_that_was_asked_for(keys: ApiKeys, forwards: bool) -> None:
    p, d = pair()
    async with router_over(p, d, keys=keys, forward_authorization=forwards) as router:
        sent = {"authorization": "Bearer for-the-worker", "cookie": "a=b", "proxy-authorization": "Basic Yg=="}
        assert (await router.complete(headers=sent)).status_code == 200
        for leg in p.received + d.received:
            assert leg.headers.get("authorization") == ("Bearer for-the-worker" if forwards else None)
            assert not {"cookie", "proxy-authorization"} & leg.headers.keys()


async def test_bodies_are_bounded() -> None:
    _, d = pair()
    async with router_over(d, max_body_bytes=1000) as router:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b" " * 500

        for content in (b" " * 1001, chunks()):
            answer = await router.client.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert "max_body_bytes 1000" in answer.json()["error"]["message"]


async def test_other_routes_and_methods_answer_in_the_same_shape() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        for answer, status in (
            (await router.client.get("/nowhere"), 404),
            (await router.client.get("/v1/completions"), 405),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code", "retryable"}
            assert answer.headers["x-request-id"]
        workers = (await router.client.get("/v1/workers")).json()["data"]
        assert [(worker["agent_id"], worker["role"]) for worker in workers] == [("d0", "decode"), ("p0", "prefill")]


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    p, d = pair()
    async with router_over(p, d) as router:
        assert (await router.complete()).status_code == 200


async def test_token_ids_pass_unchanged() -> None:
    p, d = pair()
    async with router_over(p, d) as router:
        answer: httpx.Response = await router.complete(prompt=[1, 2, 3])
        assert answer.headers["x-kvxfer-prefill"] == "remote"
        assert d.received[0].body["prompt"] == [1, 2, 3]
        alone = await router.complete(prompt=[1])
        assert alone.headers["x-kvxfer-prefill"] == "local"
        assert json.loads(alone.content)["kvxfer"]["prefill_agent"] is None
