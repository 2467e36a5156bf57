"""What SGLang says of a rank's pages, as a shape and a record; what cannot be cut is no shape."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.sglang.memory import Buffers, EngineMemory
from kvxfer.connectors.sglang.record import make_record, shape_of
from kvxfer.connectors.sglang.shape import common

LAYERS, TOKENS, HEAD = 3, 16, 32


def kv_args(*, rank: int = 0, held: int = 2, items: tuple[int, ...] = (), **changes: Any) -> Any:
    """Of a rank that holds so many heads."""
    values = {
        "engine_rank": rank,
        "page_size": TOKENS,
        "kv_item_lens": items or (TOKENS * held * HEAD,) * (2 * LAYERS),
        "kv_data_ptrs": [1] * (len(items) or 2 * LAYERS),
        "kv_layout": None,
        "kv_cache_dtype_str": "bfloat16",
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(("tp", "rank", "held", "heads"), [(1, 0, 4, "0-3"), (2, 3, 2, "2-3"), (8, 5, 1, "2")])
def test_heads_are_those_that_sglang_gives_a_rank(tp: int, rank: int, held: int, heads: str) -> None:
    shape = shape_of(kv_args(rank=rank, held=held), total_heads=4, is_latent=False, tp_size=tp)
    assert shape is not None
    assert f"{shape.heads.start}-{shape.heads.stop - 1}" == (heads if "-" in heads else f"{heads}-{heads}")
    assert (shape.layers, shape.parts) == ((0, 1, 2) * 2, ("k",) * 3 + ("v",) * 3)
    assert (shape.head_bytes, shape.page_tokens, shape.tp_rank) == ((HEAD,) * 6, TOKENS, rank % tp)
    sizes = kv_args(held=held).kv_item_lens
    EngineMemory(Buffers((1,) * 6, sizes, sizes), Buffers((1,), (8,), (8,)), shape=shape)


def test_a_latent_is_whole_on_every_rank() -> None:
    items = (TOKENS * 576,) * 5
    one, other = (
        shape_of(kv_args(items=items, rank=rank), total_heads=128, is_latent=True, tp_size=tp)
        for tp, rank in ((1, 0), (4, 3))
    )
    assert one is not None
    assert other is not None
    assert one.parts == ("latent",) * 5
    assert common(one, other).is_whole


def test_a_draft_models_layers_follow_the_models() -> None:
    items = (TOKENS * 2 * HEAD,) * 6 + (TOKENS * 2 * 8,) * 2
    shape = shape_of(kv_args(items=items, num_draft_entries=2), total_heads=2, is_latent=False, tp_size=1)
    assert shape is not None
    assert (shape.layers[6:], shape.parts[6:], shape.head_bytes[6:]) == ((3, 4), ("draft", "draft"), (8, 8))


@pytest.mark.parametrize(
    ("changes", "is_latent", "heads", "tp"),
    [
        ({"kv_layout": "v4"}, False, 2, 1),
        ({"mla_compression_ratios": [4, 128]}, True, 1, 1),
        ({"items": (4096,)}, False, 2, 1),
        ({"items": (4096,)}, True, 1, 1),
        ({"items": (4096,) * 5}, False, 2, 1),
        ({"items": (4096,) * 2050}, False, 2, 1),
        ({"items": (4096,) * 2, "num_draft_entries": 2}, False, 2, 1),
        ({"items": (4096, 4090)}, False, 2, 1),
        ({}, False, 4, 3),
        ({}, False, 0, 1),
    ],
    ids=[
        "another layout",
        "compressed",
        "k and v in one",
        "layers in one",
        "odd",
        "many",
        "only a draft",
        "uneven",
        "3 of 4",
        "0",
    ],
)
def test_pages_that_cannot_be_cut_have_no_shape(changes: dict[str, Any], is_latent: bool, heads: int, tp: int) -> None:
    assert shape_of(kv_args(**changes), total_heads=heads, is_latent=is_latent, tp_size=tp) is None


def test_a_record_says_nothing_that_a_shape_says() -> None:
    """So that ranks which are cut differently have one."""
    arguments = SimpleNamespace(attention_backend="fa3")
    config = SimpleNamespace(architectures=["Llama"], to_dict=lambda: {"layers": 3})
    model = SimpleNamespace(hf_config=config, get_total_num_kv_heads=lambda: 4, head_dim=16)

    def records(*cuts: tuple[int, int, int]) -> list[Any]:
        found = []
        for tp, rank, tokens in cuts:
            args = kv_args(rank=rank, items=(tokens * 4 // tp * HEAD,) * 6, page_size=tokens)
            shape = shape_of(args, total_heads=4, is_latent=False, tp_size=tp)
            assert shape is not None
            for known in (shape, None):
                record = make_record(arguments, model, args, is_mla=False, tp_size=tp, shape=known)
                found.append(dataclasses.replace(record, weights_fingerprint="w"))
        return found

    shaped, plain, other_shaped, other_plain = records((1, 0, 16), (2, 1, 64))
    assert shaped == other_shaped
    differ = {name for name in vars(plain) if getattr(plain, name) != getattr(other_plain, name)}
    assert differ == {"block_tokens", "packing", "tp_rank", "tp_size"}
