"""`vllm serve` twice behind kvxfer's router, over HTTP as clients come."""

from __future__ import annotations

import asyncio
import json
import pathlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.vllm.checks import prompt
from tests.support.vllm.collector import Collector, collecting
from tests.support.vllm.servers import NAME, Urls, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def urls(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path, collector: Collector
) -> AsyncIterator[Urls]:
    directory = tmp_path_factory.mktemp("servers")
    async with serving(directory, tiny_model, policy="fail", traces=collector.endpoint) as urls:
        yield urls


async def post(url: str, ids: list[int], headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": ids, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **more}
    async with httpx.AsyncClient(trust_env=False, timeout=60.0, headers=headers) as client:
        return await client.post(f"{url}/v1/completions", json=body)


async def complete(url: str, ids: list[int], headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    answer = await post(url, ids, headers, **more)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return dict(answer.json(), headers=dict(answer.headers))
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    return {"choices": [{"token_ids": [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]}]}


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


async def metric(url: str, name: str, label: str = "") -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)


async def until_metric(url: str, name: str, label: str, value: float) -> None:
    for _ in range(300):  # vLLM counts with its next step
        if await metric(url, name, label) == value:
            break
        await asyncio.sleep(0.1)
    assert await metric(url, name, label) == value


@pytest.mark.parametrize("length", [2, 129, 1500])
async def test_through_the_router_the_tokens_are_those_of_the_decode_engine_alone(urls: Urls, length: int) -> None:
    ids = prompt(length, seed="http")
    alone = await complete(urls.decode, ids)
    answer = await complete(urls.router, ids)
    assert tokens(answer) == tokens(alone)
    assert answer["headers"]["x-kvxfer-prefill"] == "remote"
    assert answer["kv_transfer_params"]["kvxfer"]["code"] == ""
    streamed = await complete(urls.router, ids, stream=True)
    assert tokens(streamed) == tokens(alone)


async def test_loads_are_counted_in_the_engines_own_metrics(urls: Urls) -> None:
    loads = "vllm:kvxfer_loads_total{"
    before = await metric(urls.decode, loads, 'outcome="committed"')
    bytes_before = await metric(urls.decode, "vllm:kvxfer_bytes_total")
    await asyncio.gather(*(complete(urls.router, prompt(300, seed=f"metrics {i}")) for i in range(4)))
    await until_metric(urls.decode, loads, 'outcome="committed"', before + 4)
    assert await metric(urls.decode, "vllm:kvxfer_bytes_total") - bytes_before == 4 * 3 * 4 * 128 * 2 * 2 * 64 * 4
    assert await metric(urls.prefill, loads) == 0
    assert await metric(urls.decode, "vllm:kvxfer_wait_duration_seconds_count") >= 4
    for name in ("vllm:kvxfer_awaited_prompts", "vllm:kvxfer_unread_blocks"):
        await until_metric(urls.decode, name, "", 0)
        await until_metric(urls.prefill, name, "", 0)
    assert await metric(urls.prefill, "vllm:kvxfer_revoked_prompts_total") == 0


async def test_a_requests_trace_has_its_transfer_beside_vllms_own_spans(urls: Urls, collector: Collector) -> None:
    trace_id, parent_id = "c" * 32, "d" * 16
    await complete(urls.router, prompt(300, seed="trace"), {"traceparent": f"00-{trace_id}-{parent_id}-01"})
    wanted = {"llm_request", "kvxfer.send", "kvxfer.grant", "kvxfer.load"}
    for _ in range(300):  # engines export now and then
        if {span.name for span in collector.of(trace_id)} >= wanted:
            break
        await asyncio.sleep(0.1)
    spans = collector.of(trace_id)
    assert {span.name for span in spans} == wanted
    assert {span.parent_id for span in spans} == {parent_id}
    assert all(0 < span.duration_ns < 60e9 for span in spans)


async def test_a_trace_that_only_the_prefill_leg_has_is_handed_over(urls: Urls, collector: Collector) -> None:
    trace_id, ids = "e" * 32, prompt(300, seed="handed trace")
    kv: dict[str, Any] = {"do_remote_decode": True}
    first = await complete(
        urls.prefill, ids, {"traceparent": f"00-{trace_id}-{'f' * 16}-01"}, max_tokens=1, kv_transfer_params=kv
    )
    await complete(urls.decode, ids, kv_transfer_params=first["kv_transfer_params"])
    for _ in range(300):
        if "kvxfer.load" in {span.name for span in collector.of(trace_id)}:
            break
        await asyncio.sleep(0.1)
    assert [span.name for span in collector.of(trace_id)].count("kvxfer.load") == 1


async def test_several_answers_to_one_prompt_are_those_of_the_decode_engine_alone(urls: Urls) -> None:
    ids = prompt(400, seed="several")
    alone = await complete(urls.decode, ids)
    first = await complete(urls.prefill, ids, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    answer = await complete(
        urls.decode, ids, kv_transfer_params=first["kv_transfer_params"], n=3, temperature=0.0001, top_k=1
    )
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens(alone)] * 3


async def other_prompts_load(urls: Urls, length: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and what the prefill engine was answered for another one of that length."""
    first = await complete(
        urls.prefill,
        prompt(length, seed="another"),
        max_tokens=1,
        kv_transfer_params={"do_remote_decode": True},
    )
    return prompt(length, seed="the right one"), first["kv_transfer_params"]


async def ghosts_load(urls: Urls, length: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt of an engine that is not there."""
    ghost = {"agent_id": "ghost", "ranks": 1}
    kv = {"do_remote_prefill": True, "transfer_id": secrets.token_hex(16), "source": ghost, "destination": ghost}
    return prompt(length, seed="ghost"), kv


@pytest.mark.parametrize(("load", "code"), [(other_prompts_load, "incompatible"), (ghosts_load, "peer_gone")])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_load_that_failed_fails_its_request_and_is_named_in_log_and_metrics(
    urls: Urls, load: Callable[[Urls, int], Awaitable[tuple[list[int], dict[str, Any]]]], code: str, stream: bool
) -> None:
    loads, label = "vllm:kvxfer_loads_total{", f'outcome="{code}"'
    before = await metric(urls.decode, loads, label)
    log = (urls.directory / "d.log").stat().st_size
    ids, kv = await load(urls, 300 + stream)
    request_id = f"req-{code}-{stream}"
    answer = await post(urls.decode, ids, {"x-request-id": request_id}, kv_transfer_params=kv, stream=stream)
    assert answer.status_code == (200 if stream else 500)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert json.loads(events[0])["error"]["code"] == 500  # of why vLLM tells the client nothing
    await until_metric(urls.decode, loads, label, before + 1)
    with (urls.directory / "d.log").open() as file:
        file.seek(log)
        told = [line for line in file if "a load failed" in line]
    assert len(told) == 1
    for field in (f" code={code}", f" transfer_id={kv['transfer_id']}", f" request_id=cmpl-{request_id}-"):
        assert field in told[0]
    assert tokens(await complete(urls.decode, ids)) == tokens(await complete(urls.prefill, ids))
    for url in (urls.decode, urls.prefill):
        await until_metric(url, "vllm:kv_cache_usage_perc", "", 0.0)


async def test_engines_of_different_block_sizes_are_a_pair(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    options = ("--block-size", "32", "--num-gpu-blocks-override", "256")
    async with serving(tmp_path, tiny_model, prefill_options=options) as urls:
        ids = prompt(700, seed="unequal")
        alone = await complete(urls.decode, ids)
        answer = await complete(urls.router, ids)
        assert tokens(answer) == tokens(alone)
        assert answer["headers"]["x-kvxfer-prefill"] == "remote"
        account = answer["kv_transfer_params"]["kvxfer"]
        assert (account["code"], account["bytes"] > 0) == ("", True)


async def test_the_router_knows_how_long_a_request_each_engine_holds(urls: Urls) -> None:
    """And leaves the decision of what vLLM would cut to vLLM."""
    async with httpx.AsyncClient(trust_env=False) as client:
        workers = (await client.get(f"{urls.router}/v1/workers")).json()["data"]
        assert (await client.get(f"{urls.router}/ready")).status_code == 200
    assert {(worker["agent_id"], worker["max_context_tokens"]) for worker in workers} == {("p", 2048), ("d", 2048)}
    assert {worker["pool_tokens"] for worker in workers} == {64 * 128}
    refused = await post(urls.router, prompt(2048, seed="too long"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    text = "the quick brown fox " * 4000
    refused = await post(urls.router, text)  # type: ignore[arg-type]
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(tokens(await complete(urls.router, prompt(2040, seed="cut"), max_tokens=100))) == 8


async def test_loaded_tokens_are_not_counted_as_cached(urls: Urls) -> None:
    """Neither engine here keeps a prefix cache. vLLM's own count would be all of the prompt but its last token."""
    answer = await complete(urls.router, prompt(300, seed="uncached"))
    assert answer["kv_transfer_params"]["kvxfer"]["cached_tokens"] == 0
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
