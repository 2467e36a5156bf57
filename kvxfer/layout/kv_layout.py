"""Describes where one rank keeps the keys and values of its layers and heads. Transfer plans are made from two of these
descriptions. Decides what a sound layout is (no two elements share a byte); must never know an address, an engine or a
wire.

An element is named by (layer, part, token, head, dim). A part is one thing kept for every token: ``k`` and ``v``, or
the one ``latent`` of MLA. A token of a sequence lies in a slot of a block, and the element's byte offset is

    offsets[layer][part] + block * block_stride + slot * token_stride
                         + (head - head_offset) * head_stride + dim * dim_stride

in region ``regions[layer][part]``. The strides describe HND, NHD, K before V, K beside V, one region or one for each
layer, token-major pools and transposed keys; ``packing`` names an order that they cannot describe.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError

OFFSET_MAX = 1 << 62
"""Bytes: every offset of a layout stays below, so that sums of two fit a signed 64-bit number."""

I64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class KvPart:
    """One thing kept for every token and head of every layer, and its strides, all in bytes.

    ``dims`` elements of ``dtype_bytes`` each; ``block_stride`` from a block to the next one of the same layer,
    ``token_stride`` from a slot to the next one of the same block.
    """

    name: str
    dims: int
    dtype_bytes: int
    block_stride: int
    token_stride: int
    head_stride: int
    dim_stride: int


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a rank holds of the model: layers (global ids), and ``heads`` of ``total_heads`` KV heads, from
    ``head_offset`` on.

    Raises InvalidArgumentError naming the field.
    """

    layers: tuple[int, ...]
    head_offset: int
    heads: int
    total_heads: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidArgumentError("layers: at least one is needed")
        if len(set(self.layers)) != len(self.layers):
            raise InvalidArgumentError("layers: a layer is named twice")
        if min(self.layers) < 0:
            raise InvalidArgumentError(f"layers: {min(self.layers)} is negative")
        _check_positive("heads", self.heads)
        if not 0 <= self.head_offset <= self.total_heads - self.heads:
            raise InvalidArgumentError(
                f"head_offset: heads {self.head_offset} to {self.head_offset + self.heads - 1} "
                f"are not among the model's {self.total_heads}"
            )


@dataclasses.dataclass(frozen=True)
class KvLayout:
    """The KV cache of one rank.

    ``regions`` and ``offsets`` (bytes) have one row a layer of ``layers`` and one column a part. ``head_offset`` is the
    first of the model's ``total_heads`` KV heads that is held here; ranks that hold the same ones are replicas.
    ``packing`` is empty where the strides say it all; else it names an order within a head of a block that they do not,
    and such blocks move whole, to a pool of the same packing.

    Raises InvalidArgumentError naming the first field that is wrong.
    """

    parts: tuple[KvPart, ...]
    layers: tuple[int, ...]
    regions: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    block_tokens: int
    block_count: int
    heads: int
    head_offset: int = 0
    total_heads: int = 0
    packing: str = ""

    def __post_init__(self) -> None:
        if self.total_heads == 0:
            object.__setattr__(self, "total_heads", self.heads)
        if not self.parts or len({part.name for part in self.parts}) != len(self.parts):
            raise InvalidArgumentError("parts: at least one is needed, each with a name of its own")
        _check_positive("block_tokens", self.block_tokens)
        _check_positive("block_count", self.block_count)
        Holding(self.layers, self.head_offset, self.heads, self.total_heads)
        for name, table, limit in (("regions", self.regions, 1 << 32), ("offsets", self.offsets, OFFSET_MAX)):
            if len(table) != len(self.layers) or any(len(row) != len(self.parts) for row in table):
                raise InvalidArgumentError(f"{name}: one row a layer ({len(self.layers)}), one column a part is needed")
            if not all(0 <= value < limit for row in table for value in row):
                raise InvalidArgumentError(f"{name}: every one must be 0 to {limit - 1}")
        for part in self.parts:
            self._check_part(part)
        if self.reach and max(self.reach.values()) > OFFSET_MAX:
            raise InvalidArgumentError(f"offsets: the last byte lies past {OFFSET_MAX}")
        self._check_planes()

    @functools.cached_property
    def holding(self) -> Holding:
        return Holding(self.layers, self.head_offset, self.heads, self.total_heads)

    @functools.cached_property
    def is_token_linear(self) -> bool:
        """Whether the slots of neighbouring blocks continue each other, as if the pool were one long block."""
        return self.packing == "" and all(
            part.block_stride == self.block_tokens * part.token_stride for part in self.parts
        )

    @functools.cached_property
    def reach(self) -> Mapping[int, int]:
        """Region id to the bytes of it that the layout needs; a registered region must be at least so long."""
        found: dict[int, int] = {}
        for regions, offsets in zip(self.regions, self.offsets, strict=True):
            for part, region, offset in zip(self.parts, regions, offsets, strict=True):
                end = offset + _extent(self._axes(part), part.dtype_bytes)
                found[region] = max(found.get(region, 0), end)
        return found

    @functools.cached_property
    def bytes_per_token(self) -> int:
        """Of all layers and heads held here."""
        return len(self.layers) * self.heads * sum(part.dims * part.dtype_bytes for part in self.parts)

    def planes(self, part: int, rows: I64) -> tuple[I64, I64]:
        """``(region, offset)`` of that part in the layers at ``rows``, each shape (len(rows),)."""
        regions, offsets = self._tables
        return regions[rows, part], offsets[rows, part]

    @functools.cached_property
    def _tables(self) -> tuple[I64, I64]:
        return np.array(self.regions, np.int64), np.array(self.offsets, np.int64)

    def _axes(self, part: KvPart) -> list[tuple[int, int]]:
        """(stride, size) of the part's axes longer than one, widest stride first."""
        axes = [
            (part.block_stride, self.block_count),
            (part.token_stride, self.block_tokens),
            (part.head_stride, self.heads),
            (part.dim_stride, part.dims),
        ]
        return sorted((axis for axis in axes if axis[1] > 1), reverse=True)

    def _check_part(self, part: KvPart) -> None:
        _check_positive(f"{part.name}.dims", part.dims)
        _check_positive(f"{part.name}.dtype_bytes", part.dtype_bytes)
        axes: list[tuple[int, int, str]] = []
        for field, size in (
            ("block_stride", self.block_count),
            ("token_stride", self.block_tokens),
            ("head_stride", self.heads),
            ("dim_stride", part.dims),
        ):
            stride: Any = getattr(part, field)
            if not isinstance(stride, int) or not 0 <= stride < OFFSET_MAX:
                raise InvalidArgumentError(f"{part.name}.{field}: {stride!r} is not a number of bytes")
            axes.append((stride, size, field))
        inner = part.dtype_bytes
        for stride, size, field in sorted(axis for axis in axes if axis[1] > 1):
            if stride < inner:
                raise InvalidArgumentError(
                    f"{part.name}.{field}: {stride} is less than the {inner} bytes that lie within; "
                    "elements would overlap"
                )
            inner += stride * (size - 1)

    def _check_planes(self) -> None:
        """Raise InvalidArgumentError where a byte belongs to two layers or parts.

        A *plane* is one part of one layer. Two planes of a region overlap where an element of one overlaps an element
        of the other. The check takes the axes of both planes from the widest to the narrowest, as long as their strides
        are equal. A step along such an axis moves one element against the other by its stride, so the check subtracts
        from the planes' distance the number of steps that brings it nearest to zero. The remaining axes are shorter
        than a stride (``_check_part``), so only the next steps below and above zero can matter: both are kept. At the
        end the planes overlap where a distance is shorter than the extent of the remaining axes. Where the remaining
        axes have different strides, planes that interleave without an overlap are refused too: no known engine has
        such planes.
        """
        regions, offsets = self._tables
        for a, b in itertools.combinations_with_replacement(range(len(self.parts)), 2):
            same_region = regions[:, a, None] == regions[None, :, b]
            if a == b:
                same_region &= ~np.eye(len(self.layers), dtype=bool)
            rows_a, rows_b = np.nonzero(same_region)
            distances = (offsets[rows_b, b] - offsets[rows_a, a])[:, None]
            axes_a, axes_b = self._axes(self.parts[a]), self._axes(self.parts[b])
            while axes_a and axes_b and axes_a[0][0] == axes_b[0][0]:
                (stride, size_a), (_, size_b) = axes_a.pop(0), axes_b.pop(0)
                steps = distances // stride
                distances = np.concatenate(
                    [distances - np.clip(steps + up, 1 - size_b, size_a - 1) * stride for up in (0, 1)], axis=1
                )
            length_a = _extent(axes_a, self.parts[a].dtype_bytes)
            length_b = _extent(axes_b, self.parts[b].dtype_bytes)
            clash = ((distances < length_a) & (distances > -length_b)).any(axis=1)
            if clash.any():
                at = int(np.argmax(clash))
                raise InvalidArgumentError(
                    f"offsets: {self.parts[a].name} of layer {self.layers[rows_a[at]]} and {self.parts[b].name} of "
                    f"layer {self.layers[rows_b[at]]} overlap in region {regions[rows_a[at], a]}"
                )


def _extent(axes: list[tuple[int, int]], item: int) -> int:
    """Bytes from the begin of the first element to the end of the last one."""
    return sum(stride * (size - 1) for stride, size in axes) + item


def _check_positive(field: str, value: Any) -> None:
    if not isinstance(value, int) or value <= 0:
        raise InvalidArgumentError(f"{field}: {value!r} is not a number above 0")
