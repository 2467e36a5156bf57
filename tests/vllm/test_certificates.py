"""Two `vllm serve` behind kvxfer's router where every process has a certificate and asks for one: the calls to the
coordinator, the engines' and the router's HTTP, and the blocks, which move on encrypted streams only.
"""

from __future__ import annotations

import pathlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.trust import ClusterAuthority
from tests.support.vllm.checks import prompt
from tests.support.vllm.servers import NAME, Urls, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> ClusterAuthority:
    return ClusterAuthority(tmp_path_factory.mktemp("trust") / "certs")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def urls(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: pathlib.Path, authority: ClusterAuthority
) -> AsyncIterator[Urls]:
    async with serving(tmp_path_factory.mktemp("secured"), tiny_model, policy="fail", authority=authority) as urls:
        yield urls


async def complete(url: str, ids: list[int], verify: ssl.SSLContext | bool) -> dict[str, Any]:
    body = {"model": NAME, "prompt": ids, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    async with httpx.AsyncClient(trust_env=False, timeout=60.0, verify=verify) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json(), headers=dict(answer.headers))


@pytest.mark.parametrize("length", [2, 129, 1500])
async def test_the_tokens_are_those_of_the_decode_engine_alone(urls: Urls, length: int) -> None:
    assert all(url.startswith("https://") for url in (urls.prefill, urls.decode, urls.router))
    ids = prompt(length, seed="secured")
    alone = await complete(urls.decode, ids, urls.verify)
    answer = await complete(urls.router, ids, urls.verify)
    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert answer["headers"]["x-kvxfer-prefill"] == "remote"
    report = answer["kv_transfer_params"]["kvxfer"]
    assert (report["code"], report["lane"]) == ("", "stream")
    assert report["bytes"] > 0


async def test_an_engine_and_the_router_take_no_caller_without_what_they_ask_for(
    urls: Urls, authority: ClusterAuthority
) -> None:
    """An engine asks for a certificate; the router's clients need to show none, and believe the CA."""
    believing = ssl.create_default_context(cafile=authority.ca_file)
    for url in (urls.prefill, urls.decode):
        async with httpx.AsyncClient(trust_env=False, timeout=10.0, verify=believing) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{url}/health")
    async with httpx.AsyncClient(trust_env=False, timeout=10.0, verify=believing) as client:
        assert (await client.get(f"{urls.router}/v1/models")).status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate"):
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            await client.get(f"{urls.router}/v1/models")
