"""Whose memory a pool may be: decides by shape alone what a tensor, array, buffer or bare pointer offers, and refuses
what is not plain bytes of the host or of a CUDA device. Must never import a tensor library, nor touch a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvxfer.errors import InvalidArgumentError, LaneUnavailableError
from kvxfer.transport.base import Region
from kvxfer.transport.buffer_formats import is_plain
from kvxfer.types import MemoryKind

POINTERS = "mean nothing elsewhere: give its bytes"


def region_of(memory: Any) -> Region:
    """The contiguous, writable memory behind ``memory``, which is kept alive with the Region.

    Taken: an object with ``data_ptr()`` (torch; on the CPU or a CUDA device), with ``__array_interface__`` (numpy) or
    with the buffer protocol, or a pair ``(address, length_bytes)`` of host memory, whose owner the caller must keep.
    Raises InvalidArgumentError for memory with gaps, read-only or empty memory, and items that are not plain numbers
    and bytes (pointers, Python objects); LaneUnavailableError for memory of other devices.
    """
    if isinstance(memory, tuple):
        region = _from_pair(memory)
    elif hasattr(memory, "data_ptr"):
        region = _from_tensor(memory)
    elif hasattr(memory, "__cuda_array_interface__"):
        raise LaneUnavailableError("this array is on a GPU and does not say on which: give it as a tensor")
    elif hasattr(memory, "__array_interface__"):
        region = _from_interface(memory)
    else:
        region = _from_buffer(memory)
    if region.length_bytes <= 0 or region.address <= 0:
        raise InvalidArgumentError("memory to register must not be empty")
    return region


def _from_pair(pair: tuple[Any, ...]) -> Region:
    if len(pair) != 2 or not all(isinstance(value, int) for value in pair):
        raise InvalidArgumentError("memory given as a tuple must be (address, length_bytes)")
    return Region(pair[0], pair[1], None)


def _from_tensor(tensor: Any) -> Region:
    device: Any = getattr(tensor, "device", "cpu")
    kind = getattr(device, "type", str(device))
    if kind not in ("cpu", "cuda"):
        raise LaneUnavailableError(f"kvxfer moves memory of the host and of CUDA devices: this tensor is on {device}")
    try:
        is_contiguous = getattr(tensor, "is_contiguous", None)
        if is_contiguous is not None and not is_contiguous():
            raise InvalidArgumentError("a tensor must be contiguous to be a pool")
        length = getattr(tensor, "nbytes", None)
        if not isinstance(length, int):
            length = int(tensor.numel()) * int(tensor.element_size())
        address = int(tensor.data_ptr())
    except (AttributeError, TypeError, RuntimeError) as error:  # a storage, a sparse tensor
        what = type(tensor).__name__
        raise InvalidArgumentError(f"memory must be a dense tensor, and this {what} is none: {error!s:.200}") from None
    if kind == "cuda":
        return Region(address, length, tensor, memory=MemoryKind.CUDA, device=int(device.index or 0))
    return Region(address, length, tensor)


def _from_interface(memory: Any) -> Region:
    """Of an array, or of what has an array's interface."""
    what = type(memory).__name__
    try:
        array = np.asarray(memory)
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"memory of type {what} is no array: {error!s:.200}") from None
    if array is not memory and array.flags.owndata:
        raise InvalidArgumentError(f"{what} is a value, and its memory would be a copy: give an array")
    return _from_array(array, memory)


def _from_array(array: np.ndarray[Any, Any], owner: object) -> Region:
    if array.dtype.hasobject:
        raise InvalidArgumentError(f"an array of Python objects has pointers, which {POINTERS}")
    if not array.flags.c_contiguous:
        raise InvalidArgumentError("an array must be C-contiguous to be a pool")
    if not array.flags.writeable:
        raise InvalidArgumentError("memory to register must not be read-only")
    return Region(int(array.__array_interface__["data"][0]), array.nbytes, (owner, array))


def _from_buffer(memory: Any) -> Region:
    what = type(memory).__name__
    try:
        view = memoryview(memory)
    except TypeError:
        raise InvalidArgumentError(
            f"{what} is no memory: give a tensor, an array, a buffer or (address, length_bytes)"
        ) from None
    except (ValueError, BufferError) as error:  # it was released or closed, or has items that no format says
        raise InvalidArgumentError(f"the memory of this {what} cannot be had: {error!s:.200}") from None
    if not is_plain(view.format, view.itemsize):
        raise InvalidArgumentError(
            f"a buffer of items of {view.itemsize} bytes in the format {view.format!r:.100} may have pointers or "
            f"Python objects, which {POINTERS}"
        )
    if not view.c_contiguous:
        raise InvalidArgumentError("a buffer must be contiguous to be a pool")
    if view.readonly:
        raise InvalidArgumentError("memory to register must not be read-only")
    if not view.nbytes:
        raise InvalidArgumentError("memory to register must not be empty")
    return _from_array(np.frombuffer(view, dtype=np.uint8), view)
