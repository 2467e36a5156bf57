"""What two vLLM engines must have in common before a byte moves: the compatibility record of a rank's pages.

Decides which facts of an engine say what its blocks mean. Reads vLLM's configuration objects by attribute; imports vLLM
only to ask which attention backend was chosen.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from typing import Any, BinaryIO

from kvxfer.connectors.vllm.pages import Pages
from kvxfer.errors import ConfigError
from kvxfer.rpc.convert import POOLS_MAX
from kvxfer.types import CompatibilityRecord

BOOKKEEPING = frozenset(
    {"_attn_implementation", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Keys of a model's config that say nothing about the KV of a token; the dtype is a field of its own."""

SAMPLES = 64
SAMPLE_BYTES = 4096
HEADER_BYTES_MAX = 1 << 26


def make_record(vllm_config: Any, kv_cache_config: Any, pages: Pages) -> CompatibilityRecord:
    """The record of this rank. Raises ConfigError for a model whose KV cache kvxfer cannot move."""
    check_groups(kv_cache_config)
    check_parallel(vllm_config.parallel_config)
    check_pages(pages, kv_cache_config.num_blocks)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    backend, packing = _attention(vllm_config)
    kind = str(cache.cache_dtype)
    return CompatibilityRecord(
        model=",".join(model.architectures or ()),
        config_fingerprint=config_fingerprint(model.hf_config.to_dict()),
        weights_fingerprint=weights_fingerprint(model.model, str(model.revision or ""), str(model.seed)),
        dtype=str(model.dtype).removeprefix("torch.") if kind == "auto" else kind,
        layers=len(pages.layers),
        kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_dim=model.get_head_size(),
        block_tokens=cache.block_size,
        axes=axes_of(_layout(cache), pages),
        packing=packing,
        rope="config",
        attention_backend=backend,
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


def check_groups(kv_cache_config: Any) -> None:
    """Raise ConfigError unless all layers share one block table that grows with the prompt and is never cut."""
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or any(name in kind for kind in kinds for name in ("Mamba", "Sliding", "Chunked")):
        raise ConfigError(
            f"kvxfer does not move hybrid models yet: this one has {len(groups)} KV cache groups ({', '.join(kinds)})"
        )
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):  # loads begin before vLLM does that
        raise ConfigError("kvxfer does not move KV caches whose blocks vLLM zeroes (mixed precision) yet")


def check_pages(pages: Pages, blocks: int) -> None:
    """Raise ConfigError where a device's pages are not vLLM's blocks: other attention backends cut them otherwise."""
    found, wanted = sum(store.page_count for store in pages.stores), blocks * len(pages.layers)
    if pages.cuda_device is not None and not wanted <= found < 2 * wanted:
        raise ConfigError(
            f"this attention backend cuts the KV cache into {found} pages, not one a layer for each of {blocks} blocks"
        )


def check_parallel(parallel_config: Any) -> None:
    """Raise ConfigError unless each rank keeps all tokens of all layers, of some heads."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel_config, name, 1)
        if size != 1:
            raise ConfigError(f"kvxfer does not move the KV cache of engines with {name} {size} yet; it must be 1")


def config_fingerprint(config: dict[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a model's config without paths and versions: 64 hex digits."""
    kept = {key: value for key, value in config.items() if key not in BOOKKEEPING}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_fingerprint(model: str, revision: str, seed: str) -> str:
    """SHA-256 over the weight files in the directory ``model``: names of tensors, sizes, and samples of their bytes; 64
    hex digits. Without such files over the model's name, revision and seed.
    """
    directory = pathlib.Path(model)
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    whole = hashlib.sha256()
    if not files:
        whole.update(json.dumps([model, revision, seed]).encode())
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            header = min(int.from_bytes(file.read(8), "little"), HEADER_BYTES_MAX, size)
            whole.update(f"{path.name} {size}\n".encode() + file.read(header))
            _update_with_samples(whole, file, 8 + header, size)
    return whole.hexdigest()


def adapter_fingerprint(path: str) -> str:
    """SHA-256 over the ``adapter_*`` files of a LoRA adapter in the directory ``path``: names, sizes, and samples of
    their bytes; 64 hex digits. Without such files over ``path``."""
    try:
        files = sorted(pathlib.Path(path).expanduser().glob("adapter_*"))
        stats = [file.stat() for file in files]
        return _adapter_fingerprint(path, tuple(files), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))
    except OSError:
        return _adapter_fingerprint(path, (), ())


@functools.lru_cache(maxsize=256)
def _adapter_fingerprint(path: str, files: tuple[pathlib.Path, ...], stamps: tuple[tuple[int, int], ...]) -> str:
    whole = hashlib.sha256(b"" if files else path.encode())
    for name, (size, _) in zip(files, stamps, strict=True):
        with name.open("rb") as file:
            whole.update(f"{name.name} {size}\n".encode())
            _update_with_samples(whole, file, 0, size)
    return whole.hexdigest()


def _update_with_samples(whole: Any, file: BinaryIO, start: int, end: int) -> None:
    for sample in range(SAMPLES):
        file.seek(start + (end - start) * sample // SAMPLES)
        whole.update(file.read(SAMPLE_BYTES))


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
