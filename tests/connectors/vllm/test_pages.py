"""Pages of a KV cache in the layouts that vLLM has, against the tensors' own indexing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.connectors.vllm.pages import Pages
from kvxfer.errors import ConfigError
from kvxfer.types import MemoryKind

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}


def caches(order: str, spare: int = 0) -> dict[str, torch.Tensor]:
    """One tensor a layer, shape [B, H, N, C], all views of one storage in that order of axes."""
    sizes = [AXES[axis] for axis in order]
    whole = torch.arange(int(np.prod(sizes)) + spare, dtype=torch.float32)
    view = whole[: whole.numel() - spare].view(sizes).permute([order.index(axis) for axis in "LBHNC"])
    return {f"model.layers.{layer}.attn": view[layer] for layer in range(LAYERS)}


def page(pages: Pages, layer: int, block: int) -> bytes:
    """The bytes of one page, found as the core finds them."""
    store = next(s for s in pages.stores if s.first_layer <= layer < s.first_layer + s.layers)
    index = store.ids([block]).tolist()[layer - store.first_layer]
    storage: Any = store.region.owner
    return bytes(storage[index * pages.page_bytes : (index + 1) * pages.page_bytes])


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "one storage a layer"])
def test_pages_are_the_blocks_of_each_layer(order: str) -> None:
    if order == "one storage a layer":
        tensors = {name: tensor.clone() for name, tensor in caches("LBHNC").items()}
    else:
        tensors = caches(order, spare=7)
    pages = Pages.of(tensors)
    assert len(pages.stores) == (LAYERS if " " in order else 1)
    assert sum(store.page_count for store in pages.stores) == LAYERS * BLOCKS
    inside = "NHC" if order.endswith("NHC") else "HNC"
    for layer, tensor in enumerate(tensors.values()):
        for block in range(BLOCKS):
            content = tensor[block].permute(["HNC".index(axis) for axis in inside]).contiguous()
            assert page(pages, layer, block) == content.numpy().tobytes()


def test_pages_go_layer_by_layer_and_neighbours_are_one_run() -> None:
    (store,) = Pages.of(caches("LBHNC")).stores
    assert store.ids(range(1, 4)).tolist() == [1, 2, 3, 6, 7, 8, 11, 12, 13]


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_blocks_in_pieces_are_refused(order: str) -> None:
    with pytest.raises(ConfigError, match="not one piece"):
        Pages.of(caches(order))


def test_storages_without_order_are_refused() -> None:
    tensors = caches("LBHNC")
    names = list(tensors)
    tensors = {names[0]: tensors[names[0]], "other": tensors[names[1]].clone(), names[2]: tensors[names[2]]}
    with pytest.raises(ConfigError, match="without order"):
        Pages.of(tensors)


def test_layers_of_different_shape_are_refused() -> None:
    tensors = caches("LBHNC")
    tensor = next(iter(tensors.values()))
    tensors["half"] = tensor[:, :, :2]
    with pytest.raises(ConfigError, match="layer half"):
        Pages.of(tensors)


class OnDevice:
    """A tensor of the host that says it lies on a device."""

    def __init__(self, tensor: torch.Tensor, device: str) -> None:
        self.tensor = tensor
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.mark.parametrize(("device", "number"), [("cpu", None), ("cuda", 0), ("cuda:3", 3)])
def test_pages_lie_where_the_tensors_do(device: str, number: int | None) -> None:
    pages = Pages.of({name: OnDevice(tensor, device) for name, tensor in caches("LBHNC").items()})
    assert pages.cuda_device == number
    (store,) = pages.stores
    assert store.region.memory is (MemoryKind.HOST if number is None else MemoryKind.CUDA)


@pytest.mark.parametrize("devices", [("meta",) * 3, ("cuda:0", "cuda:0", "cuda:1"), ("cpu", "cuda:0", "cuda:0")])
def test_other_and_several_devices_are_refused(devices: tuple[str, ...]) -> None:
    layers = zip(caches("LBHNC").items(), devices, strict=True)
    with pytest.raises(ConfigError, match=f"{devices[0]}.*$"):
        Pages.of({name: OnDevice(tensor, device) for (name, tensor), device in layers})


def test_no_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        Pages.of({})


def test_layers_that_share_their_cache_are_moved_once() -> None:
    tensors = caches("LBHNC")
    shared = Pages.of({**tensors, "reads the first": next(iter(tensors.values()))})
    assert shared.layers == tuple(tensors)
    (store,) = shared.stores
    pages = list(store.ids(range(BLOCKS)))
    assert len(set(pages)) == len(pages) == LAYERS * BLOCKS
