"""LoRA adapters and weights that change while engines run: what was loaded counts, and what changed since is computed
where it is wanted. Two engines of their own, which end with unknown weights."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from tests.support.vllm.checks import prompt
from tests.support.vllm.engines import Answer, Cluster, Engine, hand_over

pytestmark = pytest.mark.asyncio(loop_scope="package")
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "enable_prefix_caching": False}
HIDDEN, LAYERS, RANK = 256, 4, 8


@pytest_asyncio.fixture(loop_scope="package", scope="module")
async def poets(cluster: Cluster) -> AsyncIterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine that take adapters."""
    engines = [
        await cluster.start("pl", "kv_producer", extra={"kv_lease_duration": 4.0}, **LORA),
        await cluster.start("dl", "kv_consumer", **LORA),
    ]
    for engine in engines:
        await engine.wait_ready()
    yield engines[0], engines[1]
    for name in ("pl", "dl"):
        await cluster.engines.pop(name).stop()


def write(directory: pathlib.Path, seed: int) -> None:
    """An adapter, over what is there."""
    directory.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=draw)
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=draw)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})


async def both(
    poets: tuple[Engine, Engine], seed: str, loras: tuple[dict[str, Any], dict[str, Any]] | None = None
) -> tuple[Answer, list[int]]:
    """What came of a prompt that was handed over, and the tokens of the decode engine alone."""
    ids, used = prompt(300, seed=seed), loras or (None, None)
    _, answer = await hand_over(*poets, ids, 12, loras=used)
    return answer, (await poets[1].generate(ids, 12, lora=used[1])).tokens


async def test_an_adapter_replaced_in_place_gives_no_wrong_pair(
    poets: tuple[Engine, Engine], tmp_path: pathlib.Path
) -> None:
    place = tmp_path / "adapter"
    write(place, 1)
    await asyncio.sleep(2.1)  # as old as files of any file system must be
    old, new = ({"id": number, "name": f"poet {number}", "path": str(place)} for number in (1, 2))
    for engine in poets:
        await engine.load_lora(old)
    first, alone = await both(poets, "old", (old, old))
    plain, _ = await both(poets, "old")
    if first.report["code"] == "weights_unknown":  # its files were still being read
        first, alone = await both(poets, "old", (old, old))
    assert (first.report["code"], first.tokens) == ("", alone)
    assert first.tokens != plain.tokens, "the adapter changes nothing"

    write(place, 2)
    stale, alone = await both(poets, "replaced", (old, old))
    assert (stale.report["code"], stale.tokens) == ("weights_unknown", alone)
    assert "changed after they were loaded" in stale.report["text"]

    await asyncio.sleep(2.1)
    await poets[1].load_lora(new)
    half, alone = await both(poets, "half of a rolling update", (old, new))
    assert (half.report["code"], half.tokens) == ("weights_unknown", alone)

    await poets[0].load_lora(new)
    await both(poets, "to have it read", (new, new))
    last, alone = await both(poets, "the whole of it", (new, new))
    assert (last.report["code"], last.tokens) == ("", alone)


async def test_weights_loaded_into_a_running_engine_are_unknown(poets: tuple[Engine, Engine]) -> None:
    known, alone = await both(poets, "before")
    assert (known.report["code"], known.tokens) == ("", alone)
    await poets[1].rpc("reload_weights")
    later, alone = await both(poets, "after")
    assert (later.report["code"], later.tokens) == ("weights_unknown", alone)
    assert "reload_weights was called" in later.report["text"]
    await poets[0].rpc("reload_weights")
    last, alone = await both(poets, "at the source too")
    assert (last.report["code"], last.tokens) == ("weights_unknown", alone)
