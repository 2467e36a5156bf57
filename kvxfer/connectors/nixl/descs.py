"""What a program may give where NIXL expects descriptors: tuples, arrays, tensors, lists of tensors. Decides by shape
alone which list is meant; must never import a tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from kvxfer.connectors.nixl.dlists import nixlRegDList, nixlRemoteDList, nixlXferDList
from kvxfer.connectors.nixl.enums import nixl_mem_t
from kvxfer.connectors.nixl.errors import nixlInvalidParamError

MEMORY: Mapping[str, nixl_mem_t] = {
    "DRAM": nixl_mem_t.DRAM_SEG,
    "VRAM": nixl_mem_t.VRAM_SEG,
    "FILE": nixl_mem_t.FILE_SEG,
    "BLOCK": nixl_mem_t.BLK_SEG,
    "OBJ": nixl_mem_t.OBJ_SEG,
    "cpu": nixl_mem_t.DRAM_SEG,
    "cuda": nixl_mem_t.VRAM_SEG,
}
"""The last two are NIXL's older names."""

DListT = TypeVar("DListT", nixlXferDList, nixlRegDList, nixlRemoteDList)


class NoDescriptors(nixlInvalidParamError):
    """The whole of it is not of a form that NIXL makes a list of: what NIXL logs and answers with None. A row that is
    wrong, or nothing at all, raises there too."""


def to_dlist(kind: type[DListT], descs: Any, mem_type: str | None) -> DListT:
    """Raises NoDescriptors, nixlInvalidParamError; KeyError for a memory type that there is not, as in NIXL."""
    if isinstance(descs, kind):
        return descs
    if isinstance(descs, (nixlXferDList, nixlRegDList, nixlRemoteDList)):
        raise NoDescriptors(f"expected a {kind.__name__}, not a {type(descs).__name__}")
    if isinstance(descs, np.ndarray):
        memory = _memory_of(mem_type)
        if descs.ndim != 2 or descs.shape[1] != 3:
            raise NoDescriptors(f"descriptors must be an array of shape [n, 3], not {list(descs.shape)}")
        return kind(memory, descs)
    if _is_tensor(descs):
        return _from_tensors(kind, [descs])
    if not isinstance(descs, (list, tuple, str, bytes)) or not descs:
        raise nixlInvalidParamError(f"{descs!r:.80} is no list of descriptors, array, tensor or list of tensors")
    if _is_tensor(descs[0]):
        return _from_tensors(kind, descs)
    if not isinstance(descs[0], tuple):
        raise NoDescriptors(f"each descriptor must be a tuple, not {type(descs[0]).__name__}")
    if len(descs[0]) != kind.WIDTH:
        raise NoDescriptors(f"a descriptor here is {kind.LAYOUT}, not {len(descs[0])} elements")
    return kind(_memory_of(mem_type), list(descs))


def _memory_of(mem_type: str | None) -> nixl_mem_t:
    if mem_type is None:
        raise NoDescriptors("mem_type must be given where descriptors are not tensors")
    return MEMORY[mem_type]


def _is_tensor(value: object) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "is_contiguous")


def _from_tensors(kind: type[DListT], tensors: Any) -> DListT:
    rows = np.zeros((len(tensors), 3), np.uint64)
    devices = set()
    for place, tensor in enumerate(tensors):
        if not _is_tensor(tensor):
            raise NoDescriptors(f"element {place} is {type(tensor).__name__}, not a tensor as the first is")
        if not tensor.is_contiguous():
            raise NoDescriptors(f"tensor {place} is not contiguous: give a list of contiguous tensors")
        devices.add(str(tensor.device))
        device = int(tensor.get_device())
        rows[place] = tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(device, 0)
    if len(devices) > 1:
        raise NoDescriptors(f"all tensors of a list must be on one device, not on {', '.join(sorted(devices))}")
    is_host = devices == {"cpu"}
    descs = kind(nixl_mem_t.DRAM_SEG if is_host else nixl_mem_t.VRAM_SEG, rows)
    descs.owners = tuple(tensors)
    return descs
