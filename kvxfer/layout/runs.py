"""Strided runs as arrays: boxes of bytes times segments of tokens. Decides which axis a run steps along, and which
neighbours are one run; must never know layers, heads or why the bytes move.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvxfer.layout.kv_layout import I64
from kvxfer.layout.strided_boxes import Axis, Base, StridedBox
from kvxfer.layout.token_segments import TokenSegments

U64 = npt.NDArray[np.uint64]

NEAR_WEIGHT = 4
"""A step within a block is worth so many steps across the pool: the next descriptor lies in the same pages."""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """``e`` bases times ``s`` places: e * s runs, base by base.

    ``source_at`` and ``destination_at`` are (s,) bytes to add to a base; length, count and strides are one number for
    all runs, or (s,).
    """

    source_region: I64
    source_base: I64
    destination_region: I64
    destination_base: I64
    source_at: I64
    destination_at: I64
    length: int | I64
    count: int | I64
    source_stride: int | I64
    destination_stride: int | I64

    @property
    def rows(self) -> int:
        return len(self.source_base) * len(self.source_at)

    @property
    def descriptors(self) -> int:
        each = self.count * len(self.source_at) if isinstance(self.count, int) else int(self.count.sum())
        return each * len(self.source_base)

    def fill(self, source: U64, destination: U64) -> None:
        """Write all runs as rows (region, offset, stride, length, count) into two (rows, 5) arrays."""
        for table, region, base, at, stride in (
            (source, self.source_region, self.source_base, self.source_at, self.source_stride),
            (destination, self.destination_region, self.destination_base, self.destination_at, self.destination_stride),
        ):
            view = table.reshape(len(base), len(at), 5)
            view[..., 0] = region[:, None]
            view[..., 1] = base[:, None] + at
            view[..., 2] = stride
            view[..., 3] = self.length
            view[..., 4] = self.count


def bundle_blocks(box: StridedBox, segments: TokenSegments) -> Bundle:
    """Runs of segments that all have the number of tokens the box was built with."""
    return _bundle(box, segments, box.length, _best_axis(box, box.length))


def bundle_tokens(box: StridedBox, segments: TokenSegments) -> Bundle:
    """Runs of segments of any length, of a box of one token, where both sides are token-linear."""
    ours, theirs = box.source.token_stride, box.destination.token_stride
    if ours == theirs == box.length:
        lengths = segments.tokens * box.length
        axis = _best_axis(box, int(lengths.max(initial=0)))
        is_uniform = bool((lengths == lengths[0]).all())
        return _bundle(box, segments, int(lengths[0]) if is_uniform else lengths, axis)
    # An axis that tokens continue makes the steps of a run shorter and more: heads in tokens, say.
    inner = next(
        (
            axis
            for axis in box.axes
            if ours == axis.size * axis.source_stride and theirs == axis.size * axis.destination_stride
        ),
        Axis(1, ours, theirs, True),
    )
    axis = _best_axis(box, box.length)
    mean = int(segments.tokens.sum()) * inner.size / len(segments)
    is_overlapping = min(inner.source_stride, inner.destination_stride) < box.length
    if is_overlapping or (axis is not None and _worth(axis) > mean * NEAR_WEIGHT):
        return _bundle(box, segments.singles(), box.length, axis)
    return Bundle(
        *box.spread(tuple(other for other in box.axes if other is not inner)),
        *_places(box, segments),
        box.length,
        segments.tokens * inner.size,
        inner.source_stride,
        inner.destination_stride,
    )


def _best_axis(box: StridedBox, length: int) -> Axis | None:
    """The axis that a run of descriptors of ``length`` bytes steps along; they must not overlap on either side."""
    usable = [axis for axis in box.axes if min(axis.source_stride, axis.destination_stride) >= length]
    return max(usable, key=_worth, default=None)


def _worth(axis: Axis) -> int:
    return axis.size * (NEAR_WEIGHT if axis.is_near else 1)


def _places(box: StridedBox, segments: TokenSegments) -> tuple[I64, I64]:
    return (
        place(box.source, segments.source_block, segments.source_slot),
        place(box.destination, segments.destination_block, segments.destination_slot),
    )


def place(base: Base, block: I64, slot: I64) -> I64:
    """Bytes from a base to that slot of that block."""
    return block * base.block_stride + slot * base.token_stride


def _bundle(box: StridedBox, segments: TokenSegments, length: int | I64, axis: Axis | None) -> Bundle:
    bases = box.spread(tuple(other for other in box.axes if other is not axis))
    source_at, destination_at = _places(box, segments)
    ends = (source_at[:-1] + _but_last(length) == source_at[1:]) & (
        destination_at[:-1] + _but_last(length) == destination_at[1:]
    )
    if ends.any():
        heads = np.flatnonzero(np.concatenate([[True], ~ends]))
        merged = np.add.reduceat(np.broadcast_to(np.asarray(length), source_at.shape), heads)
        if axis is None or int(merged.max()) <= min(axis.source_stride, axis.destination_stride):
            source_at, destination_at, length = source_at[heads], destination_at[heads], merged
    if axis is not None:
        steps = (axis.source_stride, axis.destination_stride)
        return Bundle(*bases, source_at, destination_at, length, axis.size, *steps)
    return _progressions(bases, source_at, destination_at, length)


def _but_last(value: int | I64) -> int | I64:
    return value if isinstance(value, int) else value[:-1]


def _progressions(bases: tuple[I64, I64, I64, I64], source_at: I64, destination_at: I64, length: int | I64) -> Bundle:
    """Three or more places at equal steps on both sides become one run that steps along the blocks."""
    ours, theirs = np.diff(source_at), np.diff(destination_at)
    longest = length if isinstance(length, int) else length[:-2]
    is_even = (ours[1:] == ours[:-1]) & (theirs[1:] == theirs[:-1])
    is_even &= (ours[1:] >= longest) & (theirs[1:] >= longest)
    if not isinstance(length, int):
        is_even &= (length[1:-1] == length[:-2]) & (length[2:] == length[:-2])
    if not is_even.any():
        return Bundle(*bases, source_at, destination_at, length, 1, length, length)
    follows = np.zeros(len(source_at), bool)
    follows[2:] = is_even
    follows[1:-1] |= is_even
    starts = np.flatnonzero(is_even & ~np.concatenate([[False], is_even[:-1]]))
    # Where one progression ends and another begins at the same place, the first one keeps it.
    follows[starts[follows[starts]] + 1] = False
    heads = np.flatnonzero(~follows)
    counts = np.diff(heads, append=len(source_at))
    lengths = np.broadcast_to(np.asarray(length), source_at.shape)[heads]
    is_long = counts > 1
    steps = np.minimum(heads, len(ours) - 1)
    return Bundle(
        *bases,
        source_at[heads],
        destination_at[heads],
        lengths,
        counts,
        np.where(is_long, ours[steps], lengths),
        np.where(is_long, theirs[steps], lengths),
    )
