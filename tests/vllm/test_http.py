"""`vllm serve` twice behind kvxfer's router, over HTTP as clients come."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from checks import prompt
from servers import NAME, Urls, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def urls(tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path) -> AsyncIterator[Urls]:
    async with serving(tmp_path_factory.mktemp("servers"), tiny_model) as urls:
        yield urls


async def complete(url: str, ids: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": NAME, "prompt": ids, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **more}
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not more.get("stream"):
            return dict(answer.json(), headers=dict(answer.headers))
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    return {"choices": [{"token_ids": [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]}]}


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


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
    before = await metric(urls.decode, loads)
    bytes_before = await metric(urls.decode, "vllm:kvxfer_bytes_total")
    await asyncio.gather(*(complete(urls.router, prompt(300, seed=f"metrics {i}")) for i in range(4)))
    for _ in range(300):  # vLLM counts them with its next step
        if await metric(urls.decode, loads) - before >= 4:
            break
        await asyncio.sleep(0.1)
    assert await metric(urls.decode, "vllm:kvxfer_bytes_total") - bytes_before == 4 * 3 * 4 * 128 * 2 * 2 * 64 * 4
    assert await metric(urls.prefill, loads) == 0


async def test_several_answers_to_one_prompt_are_those_of_the_decode_engine_alone(urls: Urls) -> None:
    ids = prompt(400, seed="several")
    alone = await complete(urls.decode, ids)
    first = await complete(urls.prefill, ids, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    answer = await complete(
        urls.decode, ids, kv_transfer_params=first["kv_transfer_params"], n=3, temperature=0.0001, top_k=1
    )
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens(alone)] * 3


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
