"""Makes arrays of strided runs from boxes of bytes and segments of tokens. Decides along which axis a run steps, and
which neighbouring ranges become one; must never know layers, heads or why the bytes move.
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
    """The runs of one box and many segments: one run for each pair of a base and a place, all places of the first base
    first.

    A *base* is a byte offset in a region (one for each layer, part and step of the axes that no run steps along). The
    arrays of bases have shape (e,). A *place* is the bytes from a base to a segment: ``source_at`` and
    ``destination_at`` have shape (s,). Length, count and strides are one number for all runs, or have shape (s,).
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
    """Runs of segments of any number of tokens, where both sides are token-linear; ``box`` is that of one token."""
    ours, theirs = box.source.token_stride, box.destination.token_stride
    if ours == theirs == box.length:
        lengths = segments.tokens * box.length
        axis = _best_axis(box, int(lengths.max(initial=0)))
        is_uniform = bool((lengths == lengths[0]).all())
        return _bundle(box, segments, int(lengths[0]) if is_uniform else lengths, axis)
    # A run may step from token to token. Where an axis (heads, for example) ends on both sides exactly where the next
    # token begins, the run may step along that axis instead, and go on through all tokens.
    inner = next(
        (
            axis
            for axis in box.axes
            if ours == axis.size * axis.source_stride and theirs == axis.size * axis.destination_stride
        ),
        Axis(1, ours, theirs, True),
    )
    axis = _best_axis(box, box.length)
    mean_count = int(segments.tokens.sum()) * inner.size / len(segments)
    is_overlapping = min(inner.source_stride, inner.destination_stride) < box.length
    if is_overlapping or (axis is not None and _weighted_size(axis) > mean_count * NEAR_WEIGHT):
        # Runs along ``inner`` overlap, or would be shorter: each token is a place, and runs step along another axis.
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
    return max(usable, key=_weighted_size, default=None)


def _weighted_size(axis: Axis) -> int:
    """The steps of an axis, those within a block weighted."""
    return axis.size * (NEAR_WEIGHT if axis.is_near else 1)


def _places(box: StridedBox, segments: TokenSegments) -> tuple[I64, I64]:
    """Bytes from a base to each segment, at the source and at the destination."""
    return (
        place(box.source, segments.source_block, segments.source_slot),
        place(box.destination, segments.destination_block, segments.destination_slot),
    )


def place(base: Base, block: I64, slot: I64) -> I64:
    """Bytes from a base to that slot of that block."""
    return block * base.block_stride + slot * base.token_stride


def _bundle(box: StridedBox, segments: TokenSegments, length: int | I64, axis: Axis | None) -> Bundle:
    """Runs along ``axis`` (``None``: along the segments), with ``length`` bytes at each place. Places that continue
    each other on both sides become one, where the longer range still fits into a step of the axis."""
    bases = box.spread(tuple(other for other in box.axes if other is not axis))
    source_at, destination_at = _places(box, segments)
    joins = (source_at[:-1] + _but_last(length) == source_at[1:]) & (
        destination_at[:-1] + _but_last(length) == destination_at[1:]
    )
    if joins.any():
        begins = np.flatnonzero(np.concatenate([[True], ~joins]))
        merged = np.add.reduceat(np.broadcast_to(np.asarray(length), source_at.shape), begins)
        if axis is None or int(merged.max()) <= min(axis.source_stride, axis.destination_stride):
            source_at, destination_at, length = source_at[begins], destination_at[begins], merged
    if axis is not None:
        steps = (axis.source_stride, axis.destination_stride)
        return Bundle(*bases, source_at, destination_at, length, axis.size, *steps)
    return _progressions(bases, source_at, destination_at, length)


def _but_last(value: int | I64) -> int | I64:
    return value if isinstance(value, int) else value[:-1]


def _progressions(bases: tuple[I64, I64, I64, I64], source_at: I64, destination_at: I64, length: int | I64) -> Bundle:
    """Three or more places of one length, at one step on each side, become one run that steps from place to place."""
    source_steps, destination_steps = np.diff(source_at), np.diff(destination_at)
    shortest_step = length if isinstance(length, int) else length[:-2]
    # is_even[i]: the places i, i + 1 and i + 2 have equal steps and lengths, and do not overlap.
    is_even = (source_steps[1:] == source_steps[:-1]) & (destination_steps[1:] == destination_steps[:-1])
    is_even &= (source_steps[1:] >= shortest_step) & (destination_steps[1:] >= shortest_step)
    if not isinstance(length, int):
        is_even &= (length[1:-1] == length[:-2]) & (length[2:] == length[:-2])
    if not is_even.any():
        return Bundle(*bases, source_at, destination_at, length, 1, length, length)
    # follows[i]: place i belongs to the run of the place before it.
    follows = np.zeros(len(source_at), bool)
    follows[2:] = is_even
    follows[1:-1] |= is_even
    starts = np.flatnonzero(is_even & ~np.concatenate([[False], is_even[:-1]]))
    # A place can be the last of one progression and the first of the next. The earlier run keeps it, and the later run
    # begins at the place after it.
    follows[starts[follows[starts]] + 1] = False
    begins = np.flatnonzero(~follows)
    counts = np.diff(begins, append=len(source_at))
    lengths = np.broadcast_to(np.asarray(length), source_at.shape)[begins]
    is_long = counts > 1
    steps = np.minimum(begins, len(source_steps) - 1)
    return Bundle(
        *bases,
        source_at[begins],
        destination_at[begins],
        lengths,
        counts,
        np.where(is_long, source_steps[steps], lengths),
        np.where(is_long, destination_steps[steps], lengths),
    )
