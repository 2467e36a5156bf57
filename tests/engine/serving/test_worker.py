"""The worker over HTTP, in this process, on real sockets: alone, and P with D joined by fake agents."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from kvxfer.engine import worker as worker_module
from kvxfer.engine.completion_parser import CompletionParser
from kvxfer.engine.model import LoadedModel
from kvxfer.engine.options import WorkerOptions
from kvxfer.engine.request import FailurePolicy
from kvxfer.engine.runner import Runner
from kvxfer.errors import ConfigError, PeerGoneError
from kvxfer.openai.errors import RequestError
from kvxfer.openai.sse import EventDecoder
from kvxfer.types import GrantState, Role
from tests.support.engine.engine_harness import make_prompt, new_id, reference
from tests.support.engine.fake_agent import FakeAgent, World
from tests.support.engine.worker_harness import body, params, serving

# A client that leaves while its answer is made. Connecting may take as long as a busy machine likes.
GIVE_UP = httpx.Timeout(30, read=0.2)


@pytest.fixture
async def alone(tiny_path):
    async with serving(tiny_path) as running:
        yield running
        await running.wait_idle()


@contextlib.asynccontextmanager
async def pair(path, monkeypatch, **options):
    world = World()
    monkeypatch.setattr(worker_module, "_make_agent", lambda options, info, registry: FakeAgent(world, info.agent_id))
    common = {"coordinator": "fake:1", **options}
    async with (
        serving(path, role=Role.PREFILL, agent_id="p", **common) as p,
        serving(path, role=Role.DECODE, agent_id="d", **common) as d,
    ):
        yield world, p, d
    assert not world.breaches


def tokens_of(chunks):
    return [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]


async def events_of(client, path, content):
    decoder, events = EventDecoder(), []
    async with client.stream("POST", path, json=content) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for part in response.aiter_bytes():
            events += decoder.feed(part)
    assert not decoder.has_partial_event
    return events


async def test_ready_line_and_operator_routes(alone):
    assert alone.ready["event"] == "ready"
    assert alone.ready["role"] == "both"
    assert alone.ready["pid"] == os.getpid()
    assert (await alone.client.get("/health")).json() == {"status": "ok"}
    assert (await alone.client.get("/live")).json() == {"status": "ok"}
    assert (await alone.client.get("/ready")).json() == {"status": "ready"}
    models = (await alone.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    await alone.client.post("/v1/completions", json=body(make_prompt(20)))
    metrics = (await alone.client.get("/metrics")).text
    assert 'kvxfer_engine_requests_total{code="ok",leg="local"} 1.0' in metrics
    assert "kvxfer_engine_time_to_first_token_seconds_count 1.0" in metrics
    assert "kvxfer_engine_ready 1.0" in metrics
    now = await alone.wait_idle()
    assert now["pool"]["blocks_total"] == 96
    assert now["engine"]["decode_tokens"] >= 7


async def test_completion_whole_and_streamed_are_the_same(alone, tiny_model):
    prompt = make_prompt(30)
    expected = reference(tiny_model, prompt, 8)
    whole = (await alone.client.post("/v1/completions", json=body(prompt), headers={"x-request-id": "me"})).json()
    assert whole["id"] == "cmpl-me"
    assert whole["object"] == "text_completion"
    choice = whole["choices"][0]
    assert choice["token_ids"] == expected
    assert choice["text"] == tiny_model.tokenizer.decode(expected)
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens"] == 30
    assert whole["usage"]["completion_tokens"] == 8
    assert whole["kvxfer"]["prefill"] == "local"
    events = await events_of(
        alone.client, "/v1/completions", body(prompt, stream=True, stream_options={"include_usage": True})
    )
    assert events[-1].is_done
    chunks = [event.json() for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == choice["text"]
    assert tokens_of(chunks[:-1]) == expected
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 38
    assert chunks[-1]["kvxfer"]["ttft_s"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_chat_stream_shape(alone):
    content = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    }
    events = await events_of(alone.client, "/v1/chat/completions", {**content, "stream": True})
    chunks = [event.json() for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert "kvxfer" in chunks[-1]
    assert not any("token_ids" in chunk["choices"][0] for chunk in chunks)
    whole = (await alone.client.post("/v1/chat/completions", json=content)).json()
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    content.pop("max_tokens")
    content["stop"] = [text[3:5]]
    stopped = (await alone.client.post("/v1/chat/completions", json=content)).json()
    assert stopped["choices"][0]["message"]["content"] == text[: text.index(text[3:5])]
    assert stopped["choices"][0]["finish_reason"] == "stop"


async def test_a_seed_repeats_an_answer(alone):
    content = body(make_prompt(20), temperature=1.0, top_p=0.95, seed=11, max_tokens=20)
    answers = await asyncio.gather(*(alone.client.post("/v1/completions", json=content) for _ in range(3)))
    ids = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2000}, "max_tokens"),
        ({"model": "other"}, "model"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1] * 2048}, "prompt"),
        ({"prompt": [1] * 1600}, "prompt"),
        ({"prompt": [100000]}, "prompt"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"n": 2}, "n"),
        ({"top_k": 40}, "top_k"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"kv_transfer_params": {"transfer_id": "x"}}, "kv_transfer_params.transfer_id"),
    ],
)
async def test_a_bad_field_is_named(alone, change, param):
    answer = await alone.client.post("/v1/completions", json={**body([5, 6, 7]), **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not error["retryable"]


async def test_an_ignored_field_is_named_in_the_answer(alone):
    content = body([5, 6, 7], max_tokens=2, user="u", metadata={}, top_k=-1, min_p=0, repetition_penalty=1.0)
    plain = await alone.client.post("/v1/completions", json=content)
    assert plain.status_code == 200
    assert "ignored_fields" not in plain.json()["kvxfer"]
    said = {**content, "temprature": 0.1}
    assert (await alone.client.post("/v1/completions", json=said)).json()["kvxfer"]["ignored_fields"] == ["temprature"]
    events = await events_of(alone.client, "/v1/completions", {**said, "stream": True})
    assert events[-2].json()["kvxfer"]["ignored_fields"] == ["temprature"]


async def test_an_error_about_half_a_surrogate_pair_comes_whole(alone, monkeypatch):
    def refuse(self, content, request_id):
        raise RequestError("no field \ud800", param="\ud800")

    monkeypatch.setattr(CompletionParser, "completion", refuse)
    answer = await alone.client.post("/v1/completions", json=body([5, 6, 7]))
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["message"], answer.json()["error"]["param"]) == ("no field \ud800", "\ud800")


async def test_bad_bodies_and_routes(alone):
    answer = await alone.client.post("/v1/completions", content=b"{nonsense")
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]
    answer = await alone.client.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "usage"


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(alone, tiny_model, monkeypatch):
    monkeypatch.setattr(LoadedModel, "encode", lambda *_: pytest.fail("tokenised"))
    monkeypatch.setattr(LoadedModel, "encode_chat", lambda *_: pytest.fail("tokenised"))
    text = "a" * (tiny_model.longest_prompt_chars + 1)
    for path, field, value in (
        ("/v1/completions", "prompt", text),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": text}]),
    ):
        refused = await alone.client.post(path, json={"model": "tiny", field: value})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")


async def test_a_body_too_long_is_refused(tiny_path):
    async with serving(tiny_path, max_body_bytes=1000) as running:
        answer = await running.client.post("/v1/completions", content=b" " * 2000)
        assert answer.status_code == 413


async def test_overload_is_503_with_retry_after(tiny_path):
    async with serving(tiny_path, max_running=1, max_waiting=1, max_batch_tokens=64, chunk_tokens=64) as running:
        content = body(make_prompt(20), max_tokens=200)
        posts = [asyncio.create_task(running.client.post("/v1/completions", json=content)) for _ in range(6)]
        answers = await asyncio.gather(*posts)
        refused = [answer for answer in answers if answer.status_code == 503]
        assert refused
        assert any(answer.status_code == 200 for answer in answers)
        assert refused[0].headers["retry-after"] == "1"
        assert refused[0].json()["error"]["code"] == "overloaded"
        assert refused[0].json()["error"]["retryable"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_gives_its_blocks_back(alone, is_stream):
    content = body(make_prompt(50), max_tokens=1400, stream=is_stream)
    if is_stream:
        async with alone.client.stream("POST", "/v1/completions", json=content) as response:
            async for _ in response.aiter_bytes():
                break
    else:
        with pytest.raises(httpx.ReadTimeout):
            await alone.client.post("/v1/completions", json=content, timeout=GIVE_UP)
    now = await alone.wait_idle()
    assert now["engine"]["requests"]["local/cancelled"] == 1


@pytest.mark.parametrize("is_stream", [True, False])
async def test_prefill_and_decode_over_http(tiny_path, tiny_model, monkeypatch, is_stream):
    async with pair(tiny_path, monkeypatch, record_block_digests=True) as (_, p, d):
        for length in (1, 16, 17, 200):
            prompt, transfer_id = make_prompt(length), new_id()
            legs = [
                body(prompt, stream=is_stream, kv_transfer_params=params(role, transfer_id))
                for role in ("prefill", "decode")
            ]
            prefilled = asyncio.create_task(p.client.post("/v1/completions", json=legs[0]))
            if is_stream:
                events = await events_of(d.client, "/v1/completions", legs[1])
                chunks = [event.json() for event in events[:-1]]
                tokens = tokens_of(chunks)
                account = chunks[-1]["kvxfer"]
            else:
                answer = (await d.client.post("/v1/completions", json=legs[1])).json()
                tokens, account = answer["choices"][0]["token_ids"], answer["kvxfer"]
            done = (await prefilled).json()
            assert tokens == reference(tiny_model, prompt, 8)
            assert done["object"] == "kvxfer.prefill"
            assert done["usage"] == {"prompt_tokens": length, "cached_tokens": done["usage"]["cached_tokens"]}
            assert done["timings"]["prefill_s"] >= 0
            assert account["prefill"] == ("local" if length == 1 else "remote")
            assert account["transfer_id"] == str(transfer_id)
            assert account["failure"] is None
            if length > 1:
                source = (await p.client.get("/debug/block-digests")).json()[f"{transfer_id}/source"]
                destination = (await d.client.get("/debug/block-digests")).json()[f"{transfer_id}/destination"]
                assert source["blocks"][destination["first"] :] == destination["blocks"]
        await p.wait_idle()
        await d.wait_idle()


async def test_the_policy_decides_what_a_failed_transfer_becomes(tiny_path, tiny_model, monkeypatch):
    for policy in FailurePolicy:
        async with pair(tiny_path, monkeypatch, on_transfer_failure=policy) as (world, _, d):
            transfer_id = new_id()
            world.pull_errors[transfer_id] = PeerGoneError("killed")
            source = world.agents["p"]
            blocks = np.arange(4, dtype=np.uint32)
            source.grant(source.pool, blocks, transfer_id=transfer_id, reader="d", ready_blocks=4)
            content = body(make_prompt(60), kv_transfer_params=params("decode", transfer_id))
            answer = await d.client.post("/v1/completions", json=content)
            if policy is FailurePolicy.RECOMPUTE:
                assert answer.json()["choices"][0]["token_ids"] == reference(tiny_model, make_prompt(60), 8)
                assert answer.json()["kvxfer"]["failure"] == "peer_gone"
            else:
                assert answer.status_code == 502
                assert answer.json()["error"]["code"] == "peer_gone"
                assert answer.json()["error"]["retryable"]
            await d.wait_idle()


async def test_a_router_that_leaves_the_prefill_leg_revokes_the_grant(tiny_path, monkeypatch):
    forward = Runner.forward

    def slowly(self, chunks):
        time.sleep(0.01)
        return forward(self, chunks)

    monkeypatch.setattr(Runner, "forward", slowly)
    async with pair(tiny_path, monkeypatch, chunk_tokens=16, max_batch_tokens=16) as (world, p, d):
        transfer_id = new_id()
        content = body(make_prompt(1500), kv_transfer_params=params("prefill", transfer_id))
        with pytest.raises(httpx.ReadTimeout):
            await p.client.post("/v1/completions", json=content, timeout=GIVE_UP)
        await p.wait_idle()
        assert world.grants[transfer_id].state is GrantState.REVOKED
        decode = body(make_prompt(20), kv_transfer_params=params("decode", new_id()))
        with pytest.raises(httpx.ReadTimeout):
            await d.client.post("/v1/completions", json=decode, timeout=GIVE_UP)
        await d.wait_idle()


async def test_legs_for_the_wrong_worker_are_refused(tiny_path, monkeypatch):
    async with pair(tiny_path, monkeypatch) as (_, p, d):
        answer = await p.client.post("/v1/completions", json=body([1, 2]))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
        wrong = params("prefill", new_id())
        answer = await d.client.post("/v1/completions", json=body([1, 2], kv_transfer_params=wrong))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params.role")
        wrong = params("decode", new_id())
        wrong["destination"]["agent_id"] = "d2"
        answer = await d.client.post("/v1/completions", json=body([1, 2], kv_transfer_params=wrong))
        assert answer.json()["error"]["code"] == "refused"


async def test_stopping_ends_a_stream_with_an_error_event(tiny_path):
    async with serving(tiny_path, shutdown_grace_s=0.1) as running:
        decoder, events = EventDecoder(), []
        content = body(make_prompt(20), max_tokens=1400, stream=True)
        async with running.client.stream("POST", "/v1/completions", json=content) as response:
            async for part in response.aiter_bytes():
                events += decoder.feed(part)
                running.stop.set()
        assert events[-1].json()["error"]["code"] == "closed"
        assert not decoder.has_partial_event


async def test_a_taken_port_and_a_missing_model_are_one_sentence(tiny_path, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            async with serving(tiny_path, port=taken.getsockname()[1]):
                pass
    with pytest.raises(ConfigError):
        async with serving(tmp_path / "nothing"):
            pass


def test_options_are_checked():
    assert WorkerOptions().thread_count() >= 1
    assert WorkerOptions(cores=8, host_workers=3).thread_count() == 2
    assert WorkerOptions(kv_cache_mb=1).block_count(1 << 10) == 1 << 10
    for bad in (
        {"host": "0.0.0.0"},
        {"port": 70000},
        {"dtype": "int4"},
        {"agent_id": "a b"},
        {"block_tokens": 0},
        {"max_running": 0},
        {"lanes": ()},
    ):
        with pytest.raises((ConfigError, ValueError)):
            WorkerOptions(**bad)


def test_every_option_says_what_it_is():
    for field in dataclasses.fields(WorkerOptions):
        assert field.metadata["help"], field.name


def test_options_load_without_torch():
    code = "import sys, kvxfer.engine.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_prefill_leg_is_not_refused_for_the_length_of_an_answer_that_another_worker_makes(
    tiny_path, tiny_model, monkeypatch
):
    async with pair(tiny_path, monkeypatch, pool_blocks=8) as (_, p, d):
        prompt = make_prompt(100)
        content = body(prompt, max_tokens=tiny_model.context_tokens)
        prefill = {**content, "kv_transfer_params": params("prefill", new_id())}
        assert (await p.client.post("/v1/completions", json=prefill)).status_code == 200
        decode = {**content, "kv_transfer_params": params("decode", new_id())}
        refused = await d.client.post("/v1/completions", json=decode)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"], error["prompt_tokens"]) == ("max_tokens", "context_length_exceeded", 100)
        for leg in ({"kv_transfer_params": params("prefill", new_id())}, {}):
            worker = p if leg else d
            refused = await worker.client.post("/v1/completions", json=body(make_prompt(129), max_tokens=1, **leg))
            error = refused.json()["error"]
            assert (error["param"], error["code"], error["prompt_tokens"]) == ("prompt", "context_length_exceeded", 129)
