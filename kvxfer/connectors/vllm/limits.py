"""Configurations of vLLM whose KV cache this connector cannot move correctly: refused by name when the engine starts.

Reads vLLM's configuration objects by attribute, as far as a version has them; imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any

from kvxfer.connectors.vllm.groups import GroupKind, KvGroup, KvGroups
from kvxfer.errors import ConfigError

FULL_KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
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


def groups_of(kv_cache_config: Any) -> KvGroups:
    """The KV groups of an engine. Raises ConfigError for layers whose blocks are not those of a prompt's tokens or its
    state, or are rebuilt while the prompt exists; a kind of cache that is not known is none of them."""
    return KvGroups(tuple(map(_group_of, kv_cache_config.kv_cache_groups)))


def check_groups(kv_cache_config: Any, vllm_config: Any, connector_base: type[Any]) -> None:
    """Raise ConfigError where ``connector_base``, vLLM's class of connectors, or the engine's other features lack what
    several groups, windows or states need."""
    groups = groups_of(kv_cache_config)
    zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    if zeroes and not hasattr(connector_base, "get_loaded_kv_cache_group_ids"):
        raise ConfigError(
            "this version of vLLM zeroes KV blocks while kvxfer writes into them (states, mixed precision): 0.32 and "
            "newer do not"
        )
    if len(groups.groups) > 1 and not hasattr(connector_base, "get_transfer_results"):
        raise ConfigError(
            "this version of vLLM cannot be told that a load of several KV groups failed: 0.30 and newer can"
        )
    if groups.has_states and getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError("kvxfer does not move states of an engine that decodes speculatively yet")


def _group_of(group: Any) -> KvGroup:
    if not getattr(group, "enable_kv_transfer", True):
        raise ConfigError(
            f"vLLM keeps the KV cache of {len(group.layer_names)} layers from {group.layer_names[0]} on to this "
            "engine: kvxfer cannot move it"
        )
    whole = group.kv_cache_spec
    specs = list(getattr(whole, "kv_cache_specs", {"": whole}).values())
    for spec in specs:
        kind = _kind_of(spec)
        if kind is None or (len(specs) > 1 and kind is not GroupKind.FULL):
            raise ConfigError(f"kvxfer does not move KV caches of the kind {type(spec).__name__} yet")
    spec, kind = specs[0], _kind_of(specs[0])
    assert kind is not None
    window = 0
    if kind is GroupKind.SLIDING:
        window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    elif kind is GroupKind.CHUNKED:
        window = int(spec.attention_chunk_size)
    block_tokens = int(getattr(whole, "block_size", spec.block_size))
    return KvGroup(kind, block_tokens, window, tuple(group.layer_names), _content_of(spec, kind))


def _kind_of(spec: Any) -> GroupKind | None:
    name = type(spec).__name__
    if name == "MambaSpec":
        return GroupKind.STATE
    if getattr(spec, "tokens_per_state", 1) not in (None, 1):
        return None
    if name in FULL_KINDS:
        return GroupKind.FULL
    return {"SlidingWindowSpec": GroupKind.SLIDING, "ChunkedLocalAttentionSpec": GroupKind.CHUNKED}.get(name)


def _content_of(spec: Any, kind: GroupKind) -> str:
    if kind is GroupKind.STATE:
        parts = zip(spec.shapes, spec.dtypes, strict=True)
        return " ".join(f"{'x'.join(map(str, shape))} {_dtype(dtype)}" for shape, dtype in parts)
    names = ("num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode")
    return " ".join(f"{name} {_dtype(getattr(spec, name, None))}" for name in names)


def _dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")
