"""A prompt of 30,000 tokens behind others in the API server of a prefill engine, which makes tokens of texts before its
engine hears of them: the decode engine waits for it, and does not compute it again.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.vllm.servers import NAME, Urls, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS, LONGEST = 30_000, 32_768
OTHERS = int(os.environ.get("OTHERS", "12"))
"""Texts before it, each a little too long for the engine: only the API server has work with them."""
ANSWER_S = 400.0
OPTIONS = ("--max-model-len", str(LONGEST), "--num-gpu-blocks-override", "300", "--max-num-batched-tokens", "1024")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from kvxfer.engine.tiny import make_tiny_model

    path = tmp_path_factory.mktemp("long") / "tiny"
    return make_tiny_model(
        path, layers=1, hidden=128, heads=2, kv_heads=1, vocab=1024, max_position_embeddings=LONGEST, seed=1234
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def urls(tmp_path_factory: pytest.TempPathFactory, long_model: pathlib.Path) -> AsyncIterator[Urls]:
    arrivals = ("--middleware", "kvxfer.connectors.vllm.arrivals.Arrivals")
    directory = tmp_path_factory.mktemp("long-servers")
    async with serving(directory, long_model, options=OPTIONS, prefill_options=arrivals) as urls:
        yield urls


def text_of(tokenizer: Any, tokens: int, seed: str) -> str:
    """A text of about so many tokens."""
    draw = random.Random(seed)
    ids = [draw.randrange(300, len(tokenizer)) for _ in range(tokens)]
    return str(tokenizer.decode(ids))


async def post(url: str, prompt: str | list[int], tokens: int, kv: dict[str, Any] | None = None) -> httpx.Response:
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
        return await client.post(f"{url}/v1/completions", json={**body, **({"kv_transfer_params": kv} if kv else {})})


async def test_a_long_prompt_behind_others_is_moved(urls: Urls, long_model: pathlib.Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(long_model)
    text = text_of(tokenizer, TOKENS, "long")
    ids = tokenizer(text)["input_ids"]
    assert TOKENS * 0.8 < len(ids) < LONGEST - 16
    shared = {
        "transfer_id": secrets.token_hex(16),
        "source": {"agent_id": "p", "ranks": 1},
        "destination": {"agent_id": "d", "ranks": 1},
    }
    others = [text_of(tokenizer, LONGEST + 2000, f"other {number}") for number in range(OTHERS)]
    queue = [asyncio.create_task(post(urls.prefill, other, 1)) for other in others]
    await asyncio.sleep(0.05)
    begun_s = time.monotonic()
    decode = asyncio.create_task(post(urls.decode, ids, 4, {"do_remote_prefill": True, **shared}))
    prefill = await post(urls.prefill, text, 1, {"do_remote_decode": True, **shared})
    print(f"{len(ids)} tokens computed after {time.monotonic() - begun_s:.1f} s")
    assert prefill.status_code == 200, prefill.text
    answer = (await decode).json()
    account = answer["kv_transfer_params"]["kvxfer"]
    print(f"fetched after {time.monotonic() - begun_s:.1f} s: {account}")
    assert account["code"] == "", account["text"]
    assert account["blocks"] >= (len(ids) - 1) // 128
    assert answer["choices"][0]["token_ids"][0] == prefill.json()["choices"][0]["token_ids"][0]
    assert {refused.status_code for refused in await asyncio.gather(*queue)} == {400}
