"""Registered memory as the ``memory`` lane sees it: blocks of pools and elements of regions as bytes. Decides where
each lies; must never know which peers may read or fill it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvxfer._native import _core
from kvxfer.errors import KvxferError, LaneUnavailableError
from kvxfer.transport.base import Region, check_segments
from kvxfer.types import MemoryKind, PoolRecord, Segment


def _check_host(region: Region) -> None:
    if region.memory is not MemoryKind.HOST:
        raise LaneUnavailableError("an in-process network moves host memory only")


class BlockMemory:
    """The blocks of one registered pool as bytes, whatever their segments."""

    def __init__(self, pool: PoolRecord, region: Region, segments: Sequence[Segment]) -> None:
        _check_host(region)
        check_segments(
            segments, block_count=pool.block_count, block_bytes=pool.block_bytes, length_bytes=region.length_bytes
        )
        self._owner = region.owner
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * region.length_bytes).from_address(region.address))
        self._views = [
            np.lib.stride_tricks.as_strided(
                flat[segment.offset_bytes :],
                shape=(pool.block_count, segment.length_bytes),
                strides=(segment.stride_bytes, 1),
            )
            for segment in segments
        ]

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of ``blocks``, shape [len(blocks), block_bytes], segments in order."""
        index = np.asarray(blocks, dtype=np.int64)
        return np.concatenate([view[index] for view in self._views], axis=1)

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """The reverse of :meth:`read`."""
        index = np.asarray(blocks, dtype=np.int64)
        begin = 0
        for view in self._views:
            end = begin + view.shape[1]
            view[index] = data[:, begin:end]
            begin = end


def places_of(extent: _core.Extent) -> list[tuple[int, int, int]]:
    """(region, offset, length) of each element of an extent over ranges."""
    if extent.ranges is None:
        raise KvxferError("an extent over a pool has no ranges")
    rows = np.array(extent.ranges.rows, dtype=np.int64).reshape(-1, 5)
    elements = np.asarray(extent.blocks, dtype=np.int64)
    ends = np.cumsum(rows[:, 4])
    row = np.searchsorted(ends, elements, side="right")
    offsets = rows[row, 1] + (elements - (ends - rows[:, 4])[row]) * rows[row, 2]
    return list(zip(rows[row, 0].tolist(), offsets.tolist(), rows[row, 3].tolist(), strict=True))


class RegionMemory:
    """One registered region as bytes. Peers read only where ``can_read``, as they would get no mapping of it."""

    def __init__(self, region: Region, can_read: bool) -> None:
        _check_host(region)
        self.can_read = can_read
        self._owner = region.owner
        self._flat = np.ctypeslib.as_array((ctypes.c_uint8 * region.length_bytes).from_address(region.address))

    def view(self, offset: int, length: int) -> npt.NDArray[np.uint8] | None:
        """``None`` for what leaves the region."""
        return self._flat[offset : offset + length] if offset + length <= len(self._flat) else None


class Memories:
    """All memory of one transport, by pool or region id."""

    def __init__(self) -> None:
        self.pools: dict[int, BlockMemory] = {}
        self.regions: dict[int, RegionMemory] = {}

    def clear(self) -> None:
        self.pools.clear()
        self.regions.clear()

    def read(self, extent: _core.Extent) -> list[bytes] | None:
        """The bytes of each element, for a peer; ``None`` where its memory is not registered for that."""
        if extent.ranges is None:
            pool = self.pools.get(extent.pool)
            return None if pool is None else [row.tobytes() for row in pool.read(extent.blocks)]
        views = self._views(extent, is_peer=True)
        return None if views is None else [view.tobytes() for view in views]

    def write(self, extent: _core.Extent, data: Sequence[bytes]) -> None:
        """The reverse of :meth:`read`."""
        if extent.ranges is None:
            rows = np.stack([np.frombuffer(element, np.uint8) for element in data])
            self.pools[extent.pool].write(extent.blocks, rows)
            return
        views = self._views(extent, is_peer=False)
        if views is None:
            raise KvxferError("the machines let bytes land in a region that is not registered")
        for view, element in zip(views, data, strict=True):
            view[:] = np.frombuffer(element, np.uint8)

    def _views(self, extent: _core.Extent, *, is_peer: bool) -> list[npt.NDArray[np.uint8]] | None:
        views = []
        for region, offset, length in places_of(extent):
            memory = self.regions.get(region)
            view = None if memory is None or (is_peer and not memory.can_read) else memory.view(offset, length)
            if view is None:
                return None
            views.append(view)
        return views
