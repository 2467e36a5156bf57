"""What two vLLM engines must have in common before a byte moves: the compatibility record of a rank's pages.

Decides which facts of an engine say what its blocks mean. Reads vLLM's configuration objects by attribute; imports vLLM
only to ask which attention backend was chosen.
"""

from __future__ import annotations

import os
from typing import Any

from kvxfer.connectors.common.checkpoint import (
    ModelName,
    NotKnown,
    fingerprint_of,
    unknown,
    weight_files,
)
from kvxfer.connectors.common.file_digests import FileChanged, shared_cache, stamps_of
from kvxfer.connectors.vllm.adapters import adapter_digest, adapter_files
from kvxfer.connectors.vllm.facts import engine_facts
from kvxfer.connectors.vllm.groups import KvGroups
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.parallel import stages_text
from kvxfer.errors import ConfigError
from kvxfer.protocol.facts import digest_of, facts_text
from kvxfer.rpc.convert import POOLS_MAX
from kvxfer.types import CompatibilityRecord


def make_record(vllm_config: Any, kv_cache_config: Any, groups: KvGroups, pages: Pages) -> CompatibilityRecord:
    """The record of this rank, but for its weights: those are not known yet. Raises ConfigError for a model whose KV
    cache kvxfer cannot move."""
    check_scales(vllm_config.cache_config)
    check_pages(pages, kv_cache_config.num_blocks)
    check_page_bytes(pages, kv_cache_config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    backend, packing = _attention(vllm_config)
    kind, facts = str(cache.cache_dtype), engine_facts(vllm_config)
    return CompatibilityRecord(
        model=",".join(model.architectures or ()),
        config_fingerprint=digest_of(facts),
        weights_fingerprint=unknown("its weights are still being read"),
        dtype=str(model.dtype).removeprefix("torch.") if kind == "auto" else kind,
        layers=int(ends.rpartition(",")[2]) if (ends := stages_text(vllm_config)) else len(pages.layers),
        kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_dim=model.get_head_size(),
        block_tokens=groups.block_tokens,
        axes=axes_of(_layout(cache), pages),
        packing=packing,
        rope="config",
        attention_backend=backend,
        groups=groups.to_text(pages.layers),
        facts=facts_text(facts, len(pages.stores)),
    )


def axes_of(layout: str, pages: Pages) -> str:
    """What the blocks of this rank's pools are: pages in the order ``layout``, and of how many layers each storage
    keeps them, if there are several: two engines' storages are read one by one, by their place.

    Raises ConfigError for more storages than an agent publishes pools.
    """
    if len(pages.stores) > POOLS_MAX:
        raise ConfigError(
            f"this version of vLLM keeps the KV cache in {len(pages.stores)} storages, and kvxfer moves at most "
            f"{POOLS_MAX}: 0.29 and newer keep it in one"
        )
    layers = "+".join(str(store.layers) for store in pages.stores)
    return f"page:{layout}" if len(pages.stores) == 1 else f"page:{layout}:{layers}"


def check_pages(pages: Pages, blocks: int) -> None:
    """Raise ConfigError where a device's pages are not vLLM's blocks: other attention backends cut them otherwise."""
    if pages.cuda_device is None or any(store.group is not None for store in pages.stores):
        return
    found, wanted = sum(store.page_count for store in pages.stores), blocks * len(pages.layers)
    if not wanted <= found < 2 * wanted:
        raise ConfigError(
            f"this attention backend cuts the KV cache into {found} pages, not one a layer for each of {blocks} blocks"
        )


def check_page_bytes(pages: Pages, kv_cache_config: Any) -> None:
    """Raise ConfigError where vLLM's page of a layer is not the page that moves: what is beside the tensors that it
    registers, such as the scales of each token, would be left behind. Kernels may cut a block into several pages."""
    for group in kv_cache_config.kv_cache_groups:
        whole = group.kv_cache_spec
        for spec in getattr(whole, "kv_cache_specs", {"": whole}).values():
            size = getattr(spec, "unpadded_page_size_bytes", getattr(spec, "page_size_bytes", None))
            if not isinstance(size, int):
                continue
            fits = size <= pages.page_bytes if pages.stores[0].group is not None else size % pages.page_bytes == 0
            if not fits:
                raise ConfigError(
                    f"kvxfer would move pages of {pages.page_bytes} bytes, and vLLM keeps {size} for each block of a "
                    f"layer ({type(spec).__name__}): something lies beside the tensors that it registers"
                )


def check_scales(cache_config: Any) -> None:
    """Raise ConfigError where each engine finds out by itself what its KV bytes are to be multiplied with."""
    if getattr(cache_config, "calculate_kv_scales", False):
        raise ConfigError("kvxfer does not move KV caches whose scales each engine calculates: leave it off")


def weights_fingerprint(model: str, revision: str = "", seed: str = "") -> str:
    """XXH3-128 over names, sizes and whole contents of the weight files of ``model``, a directory or a name of the hub:
    32 hex digits. Where there are none, or one changes meanwhile, a text that says so and equals no other: weights
    drawn by a ``seed`` are no files. It reads now; an engine's are found out in the background (`weights.Weights`).
    """
    try:
        return fingerprint_of(stamps_of(weight_files(ModelName(model, revision))), shared_cache())
    except (NotKnown, OSError, FileChanged) as error:
        return unknown(str(error))


def adapter_fingerprint(path: str) -> str:
    """SHA-256 over names, sizes and whole contents of the files of a LoRA adapter in the directory ``path``: 64 hex
    digits; else as :func:`weights_fingerprint`. It reads now what is there now."""
    try:
        return adapter_digest(dict(adapter_files(os.path.expanduser(path))), shared_cache())
    except (OSError, FileChanged) as error:
        return unknown(str(error))


def _attention(vllm_config: Any) -> tuple[str, str]:
    """The attention backend, and the order within a block that its name does not say."""
    from vllm.distributed.kv_transfer.kv_connector import utils

    backends = sorted({backend.get_name() for backend in utils.get_current_attn_backends(vllm_config)})
    if backends != ["CPU_ATTN"]:
        return ",".join(backends), ""
    from vllm.v1.attention.backends import cpu_attn

    model, cache = vllm_config.model_config, vllm_config.cache_config
    isa = cpu_attn._get_attn_isa(model.dtype, cache.block_size, model.get_head_size())
    return "CPU_ATTN", f"isa {isa}"


def _layout(cache: Any) -> str:
    """The order of heads, tokens and content within a page; versions that do not say have one order."""
    resolved = getattr(cache, "get_resolved_kv_cache_layout", None)
    if resolved is None:
        return "HNC"
    return "".join(axis for axis in resolved().name if axis in "HNC")
