"""A tier of kvxfer's in real vLLM, for the models whose layers keep different KV caches, and for engines of several
ranks: evicted prefixes come back with the same tokens.

The answer to a prompt that comes back is compared with vLLM's own to the prompt that it still has: then both compute
the same tokens from the same KV.
"""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from tests.support.vllm.hybrid import token_ids
from tests.support.vllm.hybrid_models import KINDS, make_hybrid_model
from tests.support.vllm.tiered import ALL, FILE, LLM, WHOLE, Driven, files

pytestmark = [pytest.mark.nightly]


@dataclasses.dataclass(frozen=True)
class Small:
    """Caches that hold one prompt, and not two. Of a prompt all full blocks before its last token can come back."""

    prompt: int
    device_blocks: int
    host_bytes: int
    longest: int = 512


CACHES = {
    "gemma3": Small(400, 110, 1_000_000),
    "gptoss": Small(400, 80, 1_000_000),
    "llama4": Small(400, 110, 1_600_000),
    "mistral": Small(400, 19, 250_000, 448),
    "qwen3next": Small(900, 24, 900_000, 1024),
    "deepseek": Small(410, 60, 2_000_000),
}
PROMPTS = 8


@pytest.mark.parametrize("name", CACHES)
def test_prefixes_of_a_hybrid_model_come_back(tmp_path: pathlib.Path, name: str) -> None:
    kind, small = KINDS[name], CACHES[name]
    llm = {
        **kind.engine,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": small.device_blocks,
        "max_model_len": small.longest,
        "max_num_seqs": 4,
    }
    model = make_hybrid_model(kind, tmp_path / "model")
    store = {"store": "file", "path": str(tmp_path / "kv"), "capacity_bytes": 1 << 30}
    engine = Driven(model, store, tmp_path / "engine.log", llm=llm, cpu_bytes=small.host_bytes)
    try:
        engine.wait_ready()
        groups = engine.ask("groups")
        assert len(groups["groups"]) == len(kind.groups), "vLLM's hybrid manager is off"
        block = max(groups["block_tokens"])  # vLLM makes it as large as a layer's state, which differs by processor
        whole = (small.prompt - 1) // block * block
        prompts = [token_ids(small.prompt, seed) for seed in range(PROMPTS)]
        computed, kept = [], []
        for ids in prompts:
            computed.append(engine.ask("generate", ids=ids, n=8))
            kept.append(engine.ask("generate", ids=ids, n=8))
        assert all(answer["cached"] == 0 for answer in computed)
        assert len({tuple(answer["tokens"]) for answer in computed}) == PROMPTS, (
            "KV of another prompt would not be seen"
        )
        before = engine.metrics()
        back = [engine.ask("generate", ids=ids, n=8) for ids in prompts]
        assert [answer["cached"] for answer in back] == [whole] * PROMPTS
        assert [answer["tokens"] for answer in back] == [answer["tokens"] for answer in kept]
        if kind.is_repeatable:
            assert [answer["tokens"] for answer in back] == [answer["tokens"] for answer in computed]
        loaded = "vllm:kvxfer_tier_loaded_blocks{}"
        assert engine.metrics()[loaded] > before.get(loaded, 0)
        assert engine.errors() == {}
    finally:
        engine.end()


def test_prefixes_of_two_ranks_come_back(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    """Tensor parallel size 2."""
    store = {"store": "file", "path": str(tmp_path / "kv"), "capacity_bytes": 64 * FILE}
    ranks = {**LLM, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = Driven(tiny_model, store, tmp_path / "engine.log", llm=ranks)
    try:
        engine.wait_ready()
        first = engine.tokens([1, 2, 3, 4])
        assert engine.generate(1) == (first[0], ALL)
        assert engine.metrics()["vllm:kvxfer_tier_loaded_blocks{}"] == WHOLE
        assert len(files(tmp_path / "kv")) == 4 * WHOLE
        engine.ask("changed")  # in the workers' memory
        engine.tokens([3, 4])
        assert engine.generate(2)[1] == 0
        assert engine.errors()["save weights_unknown"]
    finally:
        engine.end()
