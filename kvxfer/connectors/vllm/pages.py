"""vLLM's KV cache as one pool of pages: a page is what one layer keeps of one block, all heads of this rank.

Decides which page is which; must never know what a page is used for. The whole storage behind the layers' tensors is
one region, registered once, whatever the order of its layers and blocks. Page lists go layer by layer, so that
neighbouring blocks are neighbours in memory too and travel as one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import ConfigError
from kvxfer.transport.base import Region
from kvxfer.types import MemoryKind

Ids = npt.NDArray[np.uint32]


class Pages:
    """The pages of one rank. ``layers`` are names in the order in which the model computes them."""

    def __init__(self, region: Region, layers: tuple[str, ...], page_bytes: int, first: Ids, step: Ids) -> None:
        """The page of block ``b`` in layer ``i`` is ``first[i] + b * step[i]``."""
        self.region = region
        self.layers = layers
        self.page_bytes = page_bytes
        self.count = region.length_bytes // page_bytes
        self._first = first.astype(np.int64)
        self._step = step.astype(np.int64)

    @classmethod
    def of(cls, caches: Mapping[str, Any]) -> Pages:
        """From the tensors that vLLM registers, one a layer, shape [blocks, ...].

        Raises ConfigError for caches that are not dense pages of one storage.
        """
        if not caches:
            raise ConfigError("vLLM registered no KV cache")
        names, tensors = tuple(caches), list(caches.values())
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        if len(storages) != 1:
            raise ConfigError(f"the KV cache lies in {len(storages)} storages; kvxfer needs one")
        (base, storage), itemsize = next(iter(storages.items())), tensors[0].element_size()
        shape = tuple(tensors[0].shape)
        page_bytes = itemsize * int(np.prod(shape[1:]))
        first, step = [], []
        for name, tensor in caches.items():
            if tuple(tensor.shape) != shape or tensor.element_size() != itemsize:
                raise ConfigError(
                    f"layer {name} keeps blocks of another shape than {names[0]}; kvxfer needs them equal"
                )
            if not _is_dense(tensor):
                raise ConfigError(
                    f"a block of layer {name} is not one piece of memory: layout with strides {tensor.stride()}"
                )
            offset, stride = tensor.data_ptr() - base, tensor.stride(0) * itemsize
            if offset % page_bytes or stride % page_bytes:
                raise ConfigError(
                    f"layer {name} lies at byte {offset}, stride {stride}: not on pages of {page_bytes} bytes"
                )
            first.append(offset // page_bytes)
            step.append(stride // page_bytes)
        return cls(_region(base, storage, tensors[0], page_bytes), names, page_bytes, _ids(first), _ids(step))

    def ids(self, blocks: Iterable[int]) -> Ids:
        """The pages of these blocks: those of the first layer, then those of the next."""
        index = np.fromiter(blocks, np.int64)
        return (self._first[:, None] + index[None, :] * self._step[:, None]).ravel().astype(np.uint32)


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


def _region(base: int, storage: Any, tensor: Any, page_bytes: int) -> Region:
    length = storage.nbytes() // page_bytes * page_bytes
    is_device = tensor.device.type == "cuda"
    memory = MemoryKind.CUDA if is_device else MemoryKind.HOST
    return Region(base, length, storage, memory=memory, device=int(tensor.device.index or 0) if is_device else 0)


def _ids(values: list[int]) -> Ids:
    return np.asarray(values, dtype=np.uint32)
