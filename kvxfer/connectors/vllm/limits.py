"""Configurations of vLLM whose KV cache this connector cannot move correctly: refused by name when the engine starts.

Reads vLLM's configuration objects by attribute, as far as a version has them; imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any

from kvxfer.errors import ConfigError

KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
"""vLLM's classes for caches that grow by a block for each so many tokens and keep all of them."""


def check_engine(vllm_config: Any) -> None:
    """Raise ConfigError for an engine whose blocks change under what was promised of them, or lack what belongs to
    them elsewhere."""
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "kvxfer does not follow the KV cache through sleep mode, which gives its memory away: leave "
            "--enable-sleep-mode out"
        )
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        raise ConfigError(
            "kvxfer moves no routed experts, which a decode engine would have to return for the prompt: leave "
            "--enable-return-routed-experts out"
        )


def check_transferable(kv_cache_config: Any) -> None:
    """Raise ConfigError unless every layer's blocks are those of a prompt's tokens, in order, and none is ever cut,
    reused or rebuilt while the prompt exists; a kind of cache that is not known is none of them."""
    for group in kv_cache_config.kv_cache_groups:
        if not getattr(group, "enable_kv_transfer", True):
            raise ConfigError(
                f"vLLM keeps the KV cache of {len(group.layer_names)} layers from {group.layer_names[0]} on to this "
                "engine: kvxfer cannot move it"
            )
        whole = group.kv_cache_spec
        for spec in getattr(whole, "kv_cache_specs", {"": whole}).values():
            if type(spec).__name__ not in KINDS or getattr(spec, "tokens_per_state", 1) not in (None, 1):
                raise ConfigError(f"kvxfer does not move KV caches of the kind {type(spec).__name__} yet")
