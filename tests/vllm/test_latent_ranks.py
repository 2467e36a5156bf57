"""MLA in engines of unequal tensor parallel sizes: every rank keeps the same latents; a reader takes them from one, and
tells the others. Six more processes: only with `RANKS=1`.

vLLM's kernels for DeepSeek round otherwise in each of its forwards on CPU, so of it only bytes prove something."""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.vllm.checks import STARVED, TRIES, wait_free
from tests.support.vllm.engines import Cluster, both_legs, hand_over
from tests.support.vllm.hybrid import token_ids
from tests.support.vllm.hybrid_models import KINDS, make_hybrid_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(os.environ.get("RANKS") != "1", reason="RANKS=1 starts engines of two ranks"),
]
KIND = KINDS["deepseek"]
RANKS = {"lp": 1, "ld": 1, "lp2": 2, "ld2": 2}
PAIRS = [("lp2", "ld"), ("lp", "ld2"), ("lp2", "ld2")]
BLOCKS = 127
"""Of 128: vLLM keeps one for itself."""


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def latent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory: pathlib.Path = tmp_path_factory.mktemp("latent")
    options = {
        **KIND.engine,
        "num_gpu_blocks_override": BLOCKS + 1,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "tests.support.vllm.worker_digests.WorkerDigests",
    }
    async with Cluster(directory, make_hybrid_model(KIND, directory / "model")) as cluster:
        for name, ranks in RANKS.items():
            role = "kv_producer" if name.startswith("lp") else "kv_consumer"
            await cluster.start(name, role, tensor_parallel_size=ranks, **options)
        for engine in cluster.engines.values():
            await engine.wait_ready()
        yield cluster


async def test_every_rank_has_the_sources_latents(latent: Cluster) -> None:
    """Then every byte that arrived at any rank is its source's."""
    moved = []
    for names in PAIRS:
        prefill, decode = (latent[name] for name in names)
        for length in (1, 15, 16, 17, 200, 900):
            for at_once in (False, True):
                transfer_id = await _moved(latent, names, length, at_once=at_once)
                moved.append((names, length, transfer_id))
        await wait_free(prefill, BLOCKS, within_s=10.0)
        await wait_free(decode, BLOCKS, within_s=10.0)
    said = {name: await latent[name].ask("rank digests") for name in RANKS}
    for (source, reader), length, transfer_id in moved:
        if length == 1:  # its one token is computed by the reader
            continue
        sent = [_rows(rank, f"{transfer_id}/source/") for rank in said[source]]
        assert all(rows == sent[0] for rows in sent), "ranks of the source differ"
        for rank in said[reader]:
            rows = _rows(rank, f"{transfer_id}/destination/0")
            assert len(rows) == KIND.config["num_hidden_layers"]
            assert rows == sent[0], f"{length} tokens from {source} to {reader}"


def _rows(rank: dict[str, list[list[str]]], key: str) -> list[list[str]]:
    found = [rows for name, rows in rank.items() if name.startswith(key)]
    assert len(found) == 1, f"{len(found)} of {key}"
    return found[0]


async def _moved(cluster: Cluster, names: tuple[str, str], length: int, *, at_once: bool) -> str:
    prefill, decode = (cluster[name] for name in names)
    for attempt in range(TRIES):
        ids = token_ids(length, (names, at_once, attempt))
        legs = both_legs(prefill, decode, (RANKS[names[0]], RANKS[names[1]]))
        if at_once:
            _, answer = await asyncio.gather(prefill.generate(ids, 1, legs[0]), decode.generate(ids, 4, legs[1]))
        else:
            _, answer = await hand_over(prefill, decode, ids, 4)
        assert len(answer.tokens) == 4
        if length == 1 or answer.report["code"] == "":
            return str(answer.report.get("transfer_id", ""))
        assert answer.report["code"] in STARVED, answer.report["text"]
    raise AssertionError(f"the source fell silent in {TRIES} tries of {length} tokens")
