"""Pages of a KV cache in the layouts that vLLM has, against the tensors' own indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvxfer.connectors.vllm.pages import Pages
from kvxfer.errors import ConfigError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}


def caches(order: str, spare: int = 0) -> dict[str, torch.Tensor]:
    """One tensor a layer, shape [B, H, N, C], all views of one storage in that order of axes."""
    sizes = [AXES[axis] for axis in order]
    whole = torch.arange(int(np.prod(sizes)) + spare, dtype=torch.float32)
    view = whole[: whole.numel() - spare].view(sizes).permute([order.index(axis) for axis in "LBHNC"])
    return {f"model.layers.{layer}.attn": view[layer] for layer in range(LAYERS)}


def page_bytes(pages: Pages, storage: torch.UntypedStorage, page: int) -> bytes:
    return bytes(storage[page * pages.page_bytes : (page + 1) * pages.page_bytes])


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_are_the_blocks_of_each_layer(order: str) -> None:
    tensors = caches(order, spare=7)
    pages = Pages.of(tensors)
    storage = next(iter(tensors.values())).untyped_storage()
    blocks = [4, 0, 2]
    ids = pages.ids(blocks).tolist()
    assert pages.count == LAYERS * BLOCKS
    assert pages.region.address == storage.data_ptr()
    inside = "HNC" if order.endswith("HNC") else "NHC"
    for layer, tensor in enumerate(tensors.values()):
        for at, block in enumerate(blocks):
            content = tensor[block].permute(["HNC".index(axis) for axis in inside]).contiguous()
            assert page_bytes(pages, storage, ids[layer * len(blocks) + at]) == content.numpy().tobytes()


def test_neighbours_are_one_run() -> None:
    assert np.diff(Pages.of(caches("LBHNC")).ids(range(1, 4))).tolist() == [1, 1, 3, 1, 1, 3, 1, 1]


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_blocks_in_pieces_are_refused(order: str) -> None:
    with pytest.raises(ConfigError, match="not one piece"):
        Pages.of(caches(order))


def test_several_storages_are_refused() -> None:
    tensors = caches("LBHNC") | {"other": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)}
    with pytest.raises(ConfigError, match="2 storages"):
        Pages.of(tensors)


def test_layers_of_different_shape_are_refused() -> None:
    tensors = caches("LBHNC")
    tensor = next(iter(tensors.values()))
    tensors["half"] = tensor[:, :, :2]
    with pytest.raises(ConfigError, match="layer half"):
        Pages.of(tensors)


def test_no_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        Pages.of({})
