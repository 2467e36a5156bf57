"""Which models an engine of vLLM loads, by its configuration. Decides which load formats read comparable files."""

from __future__ import annotations

from typing import Any

from kvxfer.connectors.common.checkpoint import ModelName, NotKnown

LOCAL_FORMATS = frozenset(
    (
        *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor"),
        *("sharded_state", "gguf", "bitsandbytes", "runai_streamer", "runai_streamer_sharded"),
    )
)
"""vLLM's load formats that read the files of a directory, and nothing else."""


def models_of(vllm_config: Any) -> list[ModelName]:
    """The models whose layers write an engine's KV cache: its own, and a draft model. Raises NotKnown where their
    weights are no files of this host."""
    load = vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format not in LOCAL_FORMATS:
        raise NotKnown(f"load_format {load_format!r} reads no files that could be compared")
    drafted = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    names = []
    for config in (vllm_config.model_config, drafted):
        if config is None:
            continue
        remote = getattr(config, "model_weights", "")
        if remote and remote != config.model:
            raise NotKnown(f"the weights come from {remote}")
        name = ModelName(str(config.model), str(config.revision or ""), load.download_dir)
        if name not in names:
            names.append(name)
    return names
