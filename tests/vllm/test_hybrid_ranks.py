"""Hybrid models on two tensor parallel ranks at both ends, in real vLLM: each rank has its share of every group, and
each byte of it is that of the same rank at the source. Four processes a kind: only with `RANKS=1`."""

from __future__ import annotations

import asyncio
import os
import pathlib
from typing import Any

import pytest

from tests.support.vllm.checks import STARVED, TRIES, wait_free
from tests.support.vllm.engines import Answer, Cluster, both_legs, hand_over
from tests.support.vllm.hybrid import token_ids
from tests.support.vllm.hybrid_models import KINDS, WINDOW, make_hybrid_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="function"),
    pytest.mark.skipif(os.environ.get("RANKS") != "1", reason="RANKS=1 starts engines of two ranks"),
]
RANKS = 2
BLOCKS = 255
"""Of 256: vLLM keeps one for itself."""
LENGTHS = (2, WINDOW, WINDOW + 1, 5 * WINDOW - 1)


@pytest.mark.parametrize("name", ["gemma3", "gptoss", "qwen3next"])
async def test_each_rank_has_its_share_of_every_group(name: str, tmp_path: pathlib.Path) -> None:
    kind = KINDS[name]
    shared: dict[str, Any] = {
        **kind.engine,
        "num_gpu_blocks_override": BLOCKS + 1,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "tests.support.vllm.worker_digests.WorkerDigests",
        "tensor_parallel_size": RANKS,
    }
    async with Cluster(tmp_path, make_hybrid_model(kind, tmp_path / "model")) as cluster:
        await cluster.start("hp", "kv_producer", **shared)
        await cluster.start("hd", "kv_consumer", **shared)
        await cluster.start("mono", None, **kind.engine, enable_prefix_caching=False)
        for engine in cluster.engines.values():
            await engine.wait_ready()
        moved = []
        for at_once in (False, True):
            for length in LENGTHS:
                ids = token_ids(length, (name, at_once))
                answer = await _moved(cluster, ids, at_once=at_once)
                if kind.dtype == "float32":
                    whole = await cluster["mono"].generate(ids, 8)
                    assert answer.tokens == whole.tokens, f"{length} tokens: {answer.report}"
                moved.append((length, answer.report["transfer_id"]))
        await wait_free(cluster["hp"], BLOCKS, within_s=10.0)
        await wait_free(cluster["hd"], BLOCKS, within_s=10.0)
        sent, arrived = [await cluster[engine].ask("rank digests") for engine in ("hp", "hd")]
        for length, transfer_id in moved:
            for rank in range(RANKS):
                there = _rows(sent[rank], f"{transfer_id}/source/")
                here = _rows(arrived[rank], f"{transfer_id}/destination/0")
                assert here == there, f"{length} tokens, rank {rank}"
                assert len(here) == kind.config.get("num_hidden_layers", 6)


def _rows(rank: dict[str, list[list[str]]], key: str) -> list[list[str]]:
    (found,) = [rows for name, rows in rank.items() if name.startswith(key)]
    return found


async def _moved(cluster: Cluster, ids: list[int], *, at_once: bool) -> Answer:
    prefill, decode = cluster["hp"], cluster["hd"]
    for _ in range(TRIES):
        if at_once:
            legs = both_legs(prefill, decode, (RANKS, RANKS))
            _, answer = await asyncio.gather(prefill.generate(ids, 1, legs[0]), decode.generate(ids, 8, legs[1]))
        else:
            _, answer = await hand_over(prefill, decode, ids, 8)
        if answer.report["code"] == "":
            return answer
        assert answer.report["code"] in STARVED, answer.report["text"]
    raise AssertionError(f"the source fell silent in {TRIES} tries of {len(ids)} tokens")
