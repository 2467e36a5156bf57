"""What two SGLang engines must have in common before a byte moves: the compatibility record of a rank's pages. Decides
which facts of an engine say what its pages mean. SGLang's objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.connectors.common.checkpoint import ModelName, NotKnown, unknown
from kvxfer.connectors.common.weights import PENDING
from kvxfer.connectors.sglang.facts import facts_of
from kvxfer.connectors.sglang.limits import LOCAL_FORMATS, load_formats, shortened
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.views import neutral
from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.layout.tp_sharding import tp_heads
from kvxfer.protocol.facts import digest_of, facts_text
from kvxfer.types import CompatibilityRecord

CUT_MAX = 2048
"""The most buffers of a shape: a shape of more is too long for a message between engines (:mod:`.greetings`)."""
NHD = "nhd"
"""The packing of pages whose shape is known: tokens, heads, dimensions."""


def make_record(
    arguments: Any, model: Any, kv_args: Any, *, is_mla: bool, tp_size: int, shape: KvShape | None
) -> CompatibilityRecord:
    """The record of one rank, with unknown weights, because they are still being read. ``arguments``: SGLang's server
    arguments, resolved; ``model``: its ModelConfig. If the ``shape`` of the pages is known, the two engines compare
    shapes, and may differ in layers, heads and tokens of a page. So the record leaves those out."""
    facts = facts_of(arguments, model)
    record = CompatibilityRecord(
        model=",".join(getattr(model.hf_config, "architectures", None) or ()),
        config_fingerprint=digest_of(facts),
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
        facts=facts_text(facts),
    )
    return record if shape is None else neutral(record, layers=0, block_tokens=0, packing=NHD)


def shape_of(
    kv_args: Any,
    *,
    total_heads: int,
    is_latent: bool,
    tp_size: int,
    first_layer: int = 0,
    total_layers: int | None = None,
) -> KvShape | None:
    """Which part of the model a rank's pages hold, by SGLang's KVArgs. ``None`` if it is not known; then only whole
    pages can be moved. It is known if each layer has two buffers (``is_latent``: one), and a page in a buffer is its
    tokens in order, and a token is its heads in order.

    ``first_layer``: the first layer of this rank's pipeline stage. ``total_layers``: of the whole model; ``None``: this
    rank has all layers. The buffers of a draft model follow those of the model."""
    items, tokens = tuple(map(int, kv_args.kv_item_lens)), int(kv_args.page_size)
    drafts = int(getattr(kv_args, "num_draft_entries", 0) or 0)
    parts = ("latent",) if is_latent else ("k", "v")
    layers, remainder = divmod(len(items) - drafts, len(parts))
    is_compressed = kv_args.kv_layout is not None or getattr(kv_args, "mla_compression_ratios", None) is not None
    is_joint = is_latent and layers == 1  # one buffer holds all layers
    if is_compressed or is_joint or remainder or layers < 1 or len(items) > CUT_MAX:
        return None
    buffers = [(first_layer + layer, part) for part in parts for layer in range(layers)]
    buffers += [((total_layers or layers) + draft, "draft") for draft in range(drafts)]
    heads, rank = 1 if is_latent else total_heads, int(kv_args.engine_rank) % tp_size
    try:
        token_heads = tokens * len(tp_heads(heads, tp_size, rank))
        if any(size % token_heads for size in items):
            return None
        sizes = tuple(size // token_heads for size in items)
        numbers, names = tuple(layer for layer, _ in buffers), tuple(part for _, part in buffers)
        return KvShape(numbers, names, sizes, tokens, rank, tp_size, heads)
    except (InvalidArgumentError, ConfigError):
        return None


def models_of(arguments: Any) -> Callable[[], list[ModelName]]:
    """A function that finds the models whose layers write an engine's KV cache: its own, and a draft model. It raises
    NotKnown if their weights are no files of this host."""

    def find() -> list[ModelName]:
        for flag, load_format in load_formats(arguments).items():
            if load_format not in LOCAL_FORMATS:
                raise NotKnown(f"{flag} {load_format} reads no files that could be compared")
        place = getattr(arguments, "download_dir", None)
        names = [ModelName(str(arguments.model_path), str(arguments.revision or ""), place)]
        draft = getattr(arguments, "speculative_draft_model_path", None)
        if draft:
            revision = getattr(arguments, "speculative_draft_model_revision", None)
            names.append(ModelName(str(draft), str(revision or ""), place))
        return names

    return find
