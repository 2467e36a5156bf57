"""What says which bytes a block of an engine has, beside its tokens: the record whose digest is part of every block's
name. Decides which facts of an engine count. Reads vLLM's configuration objects by attribute.

It takes more facts than a block needs to be read, because a block that does not match costs a computation, and one that
wrongly matches costs the truth: engines of two versions of vLLM, or on two kinds of device, share no block.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from kvxfer.connectors.vllm.facts import engine_facts
from kvxfer.connectors.vllm.record import check_scales
from kvxfer.errors import ConfigError
from kvxfer.protocol.facts import digest_of

FORMAT = 1
OWN = frozenset({"rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"})
"""Facts of one process among those that share blocks."""


def check_engine(vllm_config: Any) -> None:
    """Raises ConfigError for an engine whose block hashes do not say all that its blocks depend on."""
    if getattr(vllm_config, "lora_config", None) is not None:
        raise ConfigError(
            "a kvxfer tier does not keep blocks of engines with LoRA: vLLM's block hashes have an adapter's name, and "
            "nothing of what is in it"
        )
    check_scales(vllm_config.cache_config)


def engine_record(
    vllm_config: Any, kv_cache_config: Any, offloading: Any, row_bytes: int, platform: dict[str, str]
) -> str:
    """Canonical JSON of all facts but the weights. ``offloading``: vLLM's OffloadingConfig; ``row_bytes``: bytes of one
    block of all workers; ``platform``: what the code runs on and how it hashes. Raises as :func:`check_engine`."""
    check_engine(vllm_config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = {name: value for name, value in dataclasses.asdict(offloading.parallel).items() if name not in OWN}
    facts = {
        "format": FORMAT,
        "model": ",".join(model.architectures or ()),
        "config": digest_of(engine_facts(vllm_config)),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
        "offloaded": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in offloading.groups],
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "row_bytes": row_bytes,
        "layout": str(offloading.kv_cache_layout),
        "is_canonical": bool(offloading.canonical_layout),
        "is_replicated": bool(offloading.replicated_layout),
        "parallel": parallel,
        "backend": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "platform": platform,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def record_digest(record: str, weights_fingerprint: str, hash_root: bytes) -> bytes:
    """SHA-256 of a record, of known weights, and of what the engine's chains of block hashes begin with."""
    return hashlib.sha256(json.dumps([record, weights_fingerprint, hash_root.hex()]).encode()).digest()


def _group(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    shown = {
        name: str(getattr(spec, name))
        for name in ("block_size", "page_size_bytes", "dtype", "sliding_window", "attention_chunk_size")
        if getattr(spec, name, None) is not None
    }
    return [type(spec).__name__, sorted(shown.items()), list(group.layer_names)]
