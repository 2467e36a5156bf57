"""What two SGLang engines must have in common before a byte moves: the compatibility record of a rank's pages. Decides
which facts of an engine say what its pages mean. SGLang's objects are read by attribute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from kvxfer.connectors.common.checkpoint import ModelName, NotKnown, unknown
from kvxfer.connectors.common.weights import PENDING
from kvxfer.connectors.sglang.limits import shortened
from kvxfer.types import CompatibilityRecord

BOOKKEEPING = frozenset(
    {"_attn_implementation", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Keys of a model's config that say nothing about the KV of a token; the dtype is a field of its own."""
LOCAL_FORMATS = frozenset(
    ("auto", "safetensors", "pt", "npcache", "gguf", "bitsandbytes", "mistral", "fastsafetensors", "sharded_state")
)
"""SGLang's load formats that read the files of a directory, and nothing else."""
FACTS = ("quantization", "json_model_override_args", "speculative_algorithm", "kv_cache_dtype", "model_impl")
"""Settings of SGLang that change KV and stand in no model's config."""


def make_record(arguments: Any, model: Any, kv_args: Any, *, is_mla: bool, tp_size: int) -> CompatibilityRecord:
    """Of one rank, but for its weights: those are not known yet. ``arguments``: SGLang's, resolved; ``model``: its
    ModelConfig."""
    return CompatibilityRecord(
        model=",".join(getattr(model.hf_config, "architectures", None) or ()),
        config_fingerprint=config_fingerprint(model.hf_config.to_dict(), facts_of(arguments)),
        weights_fingerprint=unknown(PENDING),
        dtype=str(kv_args.kv_cache_dtype_str),
        layers=len(kv_args.kv_data_ptrs),
        kv_heads=int(model.get_total_num_kv_heads()),
        head_dim=int(model.head_dim),
        block_tokens=int(kv_args.page_size),
        axes=f"page:{getattr(kv_args, 'kv_layout', None) or 'default'}:{'mla' if is_mla else 'mha'}",
        packing=shortened(tuple(kv_args.kv_item_lens)),
        rope="config",
        attention_backend=str(arguments.attention_backend),
        tp_rank=0 if is_mla else int(kv_args.engine_rank) % tp_size,
        tp_size=1 if is_mla else tp_size,
    )


def facts_of(arguments: Any) -> dict[str, Any]:
    """Those that are there, and neither empty nor off: versions add settings."""
    return {name: value for name in FACTS if (value := getattr(arguments, name, None)) and value not in ("auto", "{}")}


def config_fingerprint(config: dict[str, Any], facts: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a model's config, without paths and versions, and of ``facts``: 64 hex
    digits."""
    kept = {key: value for key, value in config.items() if key not in BOOKKEEPING}
    text = json.dumps([kept, facts], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def models_of(arguments: Any) -> Callable[[], list[ModelName]]:
    """What finds the models whose layers write an engine's KV cache: its own, and a draft model. It raises NotKnown
    where their weights are no files of this host."""

    def find() -> list[ModelName]:
        load_format = str(getattr(arguments.load_format, "value", arguments.load_format))
        if load_format not in LOCAL_FORMATS:
            raise NotKnown(f"load_format {load_format!r} reads no files that could be compared")
        place = getattr(arguments, "download_dir", None)
        names = [ModelName(str(arguments.model_path), str(arguments.revision or ""), place)]
        draft = getattr(arguments, "speculative_draft_model_path", None)
        if draft:
            revision = getattr(arguments, "speculative_draft_model_revision", None)
            names.append(ModelName(str(draft), str(revision or ""), place))
        return names

    return find
