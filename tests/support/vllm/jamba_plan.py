"""What moves of the prompts of a Jamba model, over memory that vLLM lays out for it, without a forward: vLLM has no
kernel of its for CPU. Run by vLLM's own Python.

usage: jamba_plan.py DIRECTORY

Prints a JSON object: the KV ``groups``, and how many ``pages`` were moved and compared.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")

LAYERS, ATTENTION = 8, 4
BLOCKS = 160
CONFIG = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": LAYERS,
    "attn_layer_offset": ATTENTION,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "max_position_embeddings": 4096,
}
HEADS, DIMS = 2, 32


def cache_config(directory: pathlib.Path) -> tuple[Any, Any]:
    """vLLM's plan of that model's KV cache, and the order of its memory."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.jamba import JambaForCausalLM
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    (directory / "config.json").write_text(json.dumps(CONFIG))
    engine = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=4096,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=False,
    ).create_engine_config()
    engine.cache_config.kv_cache_layout = "LBHNC"
    tokens = engine.cache_config.block_size
    page = tokens * HEADS * 2 * DIMS * 4
    shapes = JambaForCausalLM.get_mamba_state_shape_from_config(engine)
    dtypes = JambaForCausalLM.get_mamba_state_dtype_from_config(engine)
    specs: dict[str, Any] = {}
    for layer in range(LAYERS):
        if layer == ATTENTION:
            name = f"model.layers.{layer}.self_attn.attn"
            specs[name] = FullAttentionSpec(block_size=tokens, num_kv_heads=HEADS, head_size=DIMS, dtype=torch.float32)
        else:
            specs[f"model.layers.{layer}.mamba"] = MambaSpec(
                shapes=shapes,
                dtypes=dtypes,
                block_size=engine.cache_config.mamba_block_size,
                page_size_padded=page,
                mamba_type="mamba1",
            )
    (config,) = get_kv_cache_configs(engine, [specs], [1 << 30])
    return config, engine.cache_config.get_resolved_kv_cache_layout()


def main() -> None:
    import numpy as np
    import torch
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvxfer.connectors.vllm.groups import GROUP_BITS
    from kvxfer.connectors.vllm.limits import groups_of
    from kvxfer.connectors.vllm.pages import Pages
    from kvxfer.connectors.vllm.record import check_page_bytes

    config, layout = cache_config(pathlib.Path(sys.argv[1]))
    groups = groups_of(config)
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]

    def memory(seed: int | None) -> tuple[dict[str, Any], Pages, Any]:
        caches = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
        pages = Pages.of(caches, tuple(group.layers for group in groups.groups), config.num_blocks)
        check_page_bytes(pages, config)
        storage = next(iter(caches.values())).untyped_storage()
        flat = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()[: pages.stores[0].region.length_bytes]
        flat[:] = 0xA5 if seed is None else np.random.Generator(np.random.PCG64(seed)).integers(0, 256, flat.size, "u1")
        return caches, pages, flat.reshape(-1, pages.page_bytes)

    draw, moved = random.Random(5), 0
    state = groups.groups[0].block_tokens
    full = groups.block_tokens
    for tokens in (1, 2, full - 1, full, full + 1, state - 1, state, state + 1, 2 * state, 3 * full + 5):
        theirs, source, source_rows = memory(seed=tokens)
        ours, destination, rows = memory(seed=None)
        tables = []
        for _ in range(2):
            ids = draw.sample(range(1, BLOCKS), BLOCKS - 1)
            tables.append([[ids.pop() for _ in range(-(-tokens // group.block_tokens))] for group in groups.groups])
        sequence = groups.sequence(tokens)
        numbers = [sequence.numbers(table) for table in tables]
        assert numbers[0] is not None
        assert numbers[1] is not None
        assert [number >> GROUP_BITS for number in numbers[0]] == [number >> GROUP_BITS for number in numbers[1]]
        taken, given = destination.stores[0].ids(numbers[1]), source.stores[0].ids(numbers[0])
        assert len(set(taken.tolist())) == len(taken) == len(given)
        rows[taken] = source_rows[given]
        moved += len(taken)
        for number, group in enumerate(groups.groups):
            needed = len(tables[0][number]) if group.kind.value == "full" else 1
            for name in group.layers:
                for at in range(1, needed + 1):
                    mine, other = ours[name][tables[1][number][-at]], theirs[name][tables[0][number][-at]]
                    assert mine.numpy().tobytes() == other.numpy().tobytes(), f"{tokens} tokens: {name}, block {-at}"
        untouched = np.ones(len(rows), bool)
        untouched[taken] = False
        assert (rows[untouched] == 0xA5).all(), f"{tokens} tokens: other pages were written"
    kinds = [(group.kind.value, group.block_tokens, len(group.layers)) for group in groups.groups]
    print(json.dumps({"groups": kinds, "pages": moved}))


if __name__ == "__main__":
    main()
