"""vLLM's KV cache as pools of pages: a page is what one layer keeps of one block, all heads of this rank.

Decides which page is which; must never know what a page is used for. The whole storage behind the layers' tensors is
one region and one pool, registered once, whatever the order of its layers and blocks; versions of vLLM that give each
layer a storage of its own have a pool for each. Page lists go layer by layer, so that neighbouring blocks are
neighbours in memory too and travel as one run.

The layers of a model with several KV groups overlay each other in one storage: a block, and so each of its pages,
belongs to one group at a time. Their pages have one size.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvxfer.connectors.vllm.groups import GROUP_BITS, ID_MASK
from kvxfer.errors import ConfigError
from kvxfer.transport.base import Region
from kvxfer.types import MemoryKind

Ids = npt.NDArray[np.uint32]
P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class LayerStorage:
    """One storage: the layers ``first_layer`` to ``first_layer + layers`` (in the order in which the model computes
    them). The page of block ``b`` in the i-th of them is ``first[i] + b * step[i]``."""

    region: Region
    page_count: int
    first_layer: int
    first: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64] | None = None
    """The KV group of each of these layers; ``None``: all layers are of one."""
    blocks_of_whole: int | None = None
    """Blocks of each layer, where these are some of the storage's layers; ``None``: these are all of them."""

    @property
    def blocks(self) -> int:
        """Blocks of each layer."""
        return self.page_count // self.layers if self.blocks_of_whole is None else self.blocks_of_whole

    @property
    def layers(self) -> int:
        return len(self.first)

    def cut(self, layers: range) -> LayerStorage | None:
        """Those of its layers that are among ``layers``, numbered as ``first_layer``; ``None``: there are none."""
        begin = max(layers.start - self.first_layer, 0)
        end = min(layers.stop - self.first_layer, self.layers)
        if begin >= end:
            return None
        if end - begin == self.layers:
            return self
        return dataclasses.replace(
            self,
            first_layer=self.first_layer + begin,
            first=self.first[begin:end],
            step=self.step[begin:end],
            group=None if self.group is None else self.group[begin:end],
            blocks_of_whole=self.blocks,
        )

    def ids(self, blocks: Iterable[int]) -> Ids:
        """The pages of the blocks with these numbers (:mod:`.groups`): those of the first layer, then those of the
        next; of each layer its group's."""
        index = np.fromiter(blocks, np.int64)
        if self.group is None:
            return (self.first[:, None] + index[None, :] * self.step[:, None]).ravel().astype(np.uint32)
        groups, index = index >> GROUP_BITS, index & ID_MASK
        own = [index[groups == group] for group in range(int(self.group.max()) + 1)]
        pages = [
            first + own[group] * step for first, step, group in zip(self.first, self.step, self.group, strict=True)
        ]
        return np.concatenate(pages).astype(np.uint32)

    def ends(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """How many of :meth:`ids`' pages are those of the first layer, of the first two, and so on."""
        if self.group is None:
            return tuple(range(len(blocks), (self.layers + 1) * len(blocks), len(blocks))) or (0,) * self.layers
        counts = collections.Counter(block >> GROUP_BITS for block in blocks)
        return tuple(itertools.accumulate(counts[group] for group in self.group.tolist()))


@dataclasses.dataclass(frozen=True)
class Pages:
    """The pages of one rank: ``layers`` by name, in the order of ``stores``."""

    layers: tuple[str, ...]
    page_bytes: int
    stores: tuple[LayerStorage, ...]

    @property
    def cuda_device(self) -> int | None:
        """Whose memory they are; ``None``: the host's."""
        region = self.stores[0].region
        return region.device if region.memory is MemoryKind.CUDA else None

    @classmethod
    def of(cls, caches: Mapping[str, Any], groups: Sequence[Sequence[str]] = (), blocks: int = 0) -> Pages:
        """From the tensors that vLLM registers, one a layer, shape [blocks, ...]. ``groups``: the layers of each KV
        group, of an engine with ``blocks`` blocks; empty: all layers are of one, and dense.

        Raises ConfigError for caches that are not pages of the host's or one CUDA device's memory, or whose layers are
        spread over storages without order.
        """
        if not caches:
            raise ConfigError("vLLM registered no KV cache")
        if groups:
            return _of_groups(caches, groups, blocks)
        caches = _without_aliases(caches)
        _check_devices(caches)
        names, tensors = tuple(caches), list(caches.values())
        shape, itemsize = tuple(tensors[0].shape), tensors[0].element_size()
        page_bytes = itemsize * int(np.prod(shape[1:]))
        for name, tensor in caches.items():
            if tuple(tensor.shape) != shape or tensor.element_size() != itemsize:
                raise ConfigError(
                    f"layer {name} keeps blocks of another shape or precision than {names[0]}; kvxfer needs equal ones"
                )
            if not _is_dense(tensor):
                raise ConfigError(f"a block of layer {name} is not one piece of memory: strides {tensor.stride()}")
        stores = []
        for base, group in itertools.groupby(range(len(names)), lambda layer: _base(tensors[layer])):
            layers = list(group)
            stores.append(_store(base, layers[0], names, [tensors[layer] for layer in layers], page_bytes))
        if len({store.region.address for store in stores}) != len(stores):
            raise ConfigError("the layers of the KV cache are spread over storages without order")
        return cls(names, page_bytes, tuple(stores))


def cut_stores(
    pools: Sequence[P], stores: Sequence[LayerStorage], layers: range
) -> Iterator[tuple[int, P, LayerStorage]]:
    """Of each storage with some of these layers of a rank: its number, its pool, and those layers of it."""
    for index, (pool, store) in enumerate(zip(pools, stores, strict=True)):
        own = store.cut(layers)
        if own is not None:
            yield index, pool, own


def _check_devices(caches: Mapping[str, Any]) -> None:
    devices = sorted({str(tensor.device) for tensor in caches.values()})
    if len(devices) > 1 or devices[0].partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(
            f"kvxfer moves KV caches of the host or of one CUDA device: this one is on {', '.join(devices)}"
        )


def _of_groups(caches: Mapping[str, Any], groups: Sequence[Sequence[str]], blocks: int) -> Pages:
    """Of layers that overlay each other. A page may have room that its layer leaves unused; it travels whole."""
    group_of = {name: group for group, names in enumerate(groups) for name in names}
    missing = sorted(group_of.keys() - caches.keys())
    if missing:
        raise ConfigError(f"vLLM registered no KV cache of layer {missing[0]}")
    caches = {name: tensor for name, tensor in caches.items() if name in group_of}  # others read what these keep
    _check_devices(caches)
    names, tensors = tuple(caches), list(caches.values())
    bases = {_base(tensor) for tensor in tensors}
    if len(bases) != 1:
        raise ConfigError(
            f"kvxfer moves models with several KV groups from one storage: this version of vLLM has {len(bases)}"
        )
    strides = []
    for name, tensor in caches.items():
        pieces, rest = divmod(tensor.shape[0], max(blocks, 1))
        if rest or pieces == 0:
            raise ConfigError(f"layer {name} has {tensor.shape[0]} pieces, which {blocks} blocks do not divide")
        strides.append(pieces * tensor.stride(0) * tensor.element_size())
    outer = [(tensor.data_ptr(), stride) for tensor, stride in zip(tensors, strides, strict=True)]
    # The largest size of which every layer's place and step is a multiple: where layers are outermost, a page.
    page_bytes = math.gcd(*(address - min(bases) for address, _ in outer), *strides)
    needed = max(_content_bytes(tensor, blocks) for tensor in tensors)
    if page_bytes < needed:
        raise ConfigError(f"the KV groups' pages of {needed} bytes overlap: their layers lie {page_bytes} bytes apart")
    store = _store(min(bases), 0, names, tensors, page_bytes, strides)
    group = np.asarray([group_of[name] for name in names])
    return Pages(names, page_bytes, (dataclasses.replace(store, group=group),))


def _content_bytes(tensor: Any, blocks: int) -> int:
    return int(tensor.numel()) * int(tensor.element_size()) // blocks


def _without_aliases(caches: Mapping[str, Any]) -> dict[str, Any]:
    """The layers without those that read what another one keeps."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in caches.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())), name)
    return {name: caches[name] for name in first.values()}


def _base(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _store(
    base: int,
    first_layer: int,
    names: tuple[str, ...],
    tensors: list[Any],
    page_bytes: int,
    strides: Sequence[int] = (),
) -> LayerStorage:
    """``strides``: bytes from block to block of each layer; empty: its tensor's."""
    first, step = [], []
    own = strides or [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    for layer, (tensor, stride) in enumerate(zip(tensors, own, strict=True), first_layer):
        offset = tensor.data_ptr() - base
        if offset % page_bytes or stride % page_bytes:
            raise ConfigError(
                f"layer {names[layer]} lies at byte {offset}, stride {stride}: not on pages of {page_bytes}"
            )
        first.append(offset // page_bytes)
        step.append(stride // page_bytes)
    region = _region(base, tensors[0], page_bytes)
    return LayerStorage(region, region.length_bytes // page_bytes, first_layer, np.asarray(first), np.asarray(step))


def _is_dense(tensor: Any) -> bool:
    """Whether one block is contiguous, in whatever order of its axes."""
    inner = 1
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != inner:
            return False
        inner *= size
    return True


def _region(base: int, tensor: Any, page_bytes: int) -> Region:
    storage = tensor.untyped_storage()
    length = storage.nbytes() // page_bytes * page_bytes
    kind, _, index = str(tensor.device).partition(":")
    if kind == "cuda":
        return Region(base, length, storage, memory=MemoryKind.CUDA, device=int(index or 0))
    return Region(base, length, storage)
