"""The built-in engine on a CUDA device: prefill in one process, decode in another, as the command line starts them."""

from __future__ import annotations

import asyncio
import importlib.util
import pathlib

import pytest
import torch

from kvxfer.engine.model import LoadedModel
from kvxfer.engine.runner import Chunk, Runner
from tests.support.cuda.ends import DEVICE, LIBRARY, each_lane, needs_device

NO_SERVERS = [name for name in ("fastapi", "httpx", "uvicorn") if importlib.util.find_spec(name) is None]
pytestmark = [needs_device, pytest.mark.skipif(bool(NO_SERVERS), reason=f"not installed: {', '.join(NO_SERVERS)}")]
LENGTHS = (1, 2, 16, 17, 33, 128, 129, 255, 1000, 2000)
TOKENS = 48
BLOCK_TOKENS = 16
TIE_GAP = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from kvxfer.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("cuda") / "tiny", max_position_embeddings=8192, seed=1)


class Alone:
    """The same model, runner and device in this process, without a transfer: a block of tokens at a time."""

    def __init__(self, path: pathlib.Path, chunk_tokens: int) -> None:
        self.model = LoadedModel.load(path, device=DEVICE)
        self.runner = Runner(self.model, block_count=256, block_tokens=BLOCK_TOKENS)
        self.chunk_tokens = chunk_tokens

    def answer(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens, and how far the best was from the second best."""
        table, last, end = list(range(256)), len(prompt) - 1, 0
        while end < last:
            start, end = end, min(end + self.chunk_tokens, last)
            self.runner.forward([Chunk(prompt[start:end], start, table, False)])
        tokens, gaps, token = [], [], prompt[-1]
        for at in range(count):
            best = torch.topk(self.runner.forward([Chunk([token], last + at, table, True)])[0], 2)
            token = int(best.indices[0])
            tokens.append(token)
            gaps.append(float(best.values[0] - best.values[1]))
        return tokens, gaps


@each_lane
async def test_prefill_and_decode_equal_one_process(
    lane: str, model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.e2e.client import ask, completion
    from tests.support.e2e.cluster import running
    from tests.support.e2e.reference import make_prompt

    monkeypatch.setenv("KVXFER_UCX_LIBRARY", LIBRARY.path) if lane == "ucx" else None
    flags = {"device": DEVICE, "lanes": lane, "record_block_digests": True, "chunk_tokens": 128}
    alone = Alone(model, chunk_tokens=128)
    prompts = [make_prompt(length, seed) for seed in range(2) for length in LENGTHS]
    async with running(tmp_path, model, {"p1": flags, "d1": flags}) as cluster:
        url, turn = cluster.url("router"), asyncio.Semaphore(4)

        async def one(prompt: list[int]):
            async with turn:
                return await ask(url, completion(prompt, TOKENS, "tiny"))

        answers = await asyncio.gather(*map(one, prompts))
        source, destination = await cluster.digests("p1"), await cluster.digests("d1")
        await cluster.assert_drained()
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, answer.body
        account = answer.account
        assert account["prefill"] == ("local" if len(prompt) == 1 else "remote"), account
        tokens, gaps = alone.answer(prompt, TOKENS)
        at = next((n for n, pair in enumerate(zip(answer.token_ids, tokens, strict=True)) if pair[0] != pair[1]), None)
        assert at is None or gaps[at] < TIE_GAP, f"prompt of {len(prompt)}: token {at} differs, gap {gaps[at]:.1e}"
        if len(prompt) == 1:
            continue
        assert account["lane"] == lane
        sent = source[f"{account['transfer_id']}/source"]["blocks"]
        arrived = destination[f"{account['transfer_id']}/destination"]
        assert arrived["blocks"] == sent[arrived["first"] :]
        compared += len(arrived["blocks"])
    assert compared > 2 * sum(LENGTHS) // BLOCK_TOKENS * 3 // 4
