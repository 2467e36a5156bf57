"""Divides the bytes of one segment of tokens into boxes: equal byte ranges, as few and as long as both layouts allow.
Decides which axes are contiguous on both sides at once; must never know block ids.

A box is a contiguous byte range that repeats along some regular axes, at several bases (one for each layer). Three
steps make boxes fewer and ranges longer. An axis that is contiguous on both sides becomes part of the range. Two axes
that continue each other become one axis. The boxes of two parts become one box, where the parts touch or lie at one
distance on both sides. All of this is arithmetic on strides, so equal layouts need no special case.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvxfer.layout.kv_layout import I64, KvLayout


@dataclasses.dataclass(frozen=True)
class Axis:
    """``size`` steps of ``source_stride`` and ``destination_stride`` bytes. ``is_near``: the steps stay within a block
    at the source."""

    size: int
    source_stride: int
    destination_stride: int
    is_near: bool


@dataclasses.dataclass(frozen=True)
class Base:
    """One side of a box: its bases (``region`` and ``offset``, shape (m,) int64), and the bytes by which the block and
    the slot of a segment move them."""

    region: I64
    offset: I64
    block_stride: int
    token_stride: int

    def moves_like(self, other: Base) -> bool:
        """Whether every segment moves both by the same bytes, in the same regions."""
        strides = (self.block_stride, self.token_stride)
        return strides == (other.block_stride, other.token_stride) and np.array_equal(self.region, other.region)

    def moved(self, distance: int) -> Base:
        return dataclasses.replace(self, offset=self.offset + distance)

    def distance_to(self, other: Base) -> int | None:
        """Bytes to ``other``'s offset, where they are the same for all bases."""
        distances = other.offset - self.offset
        return int(distances[0]) if (distances == distances[0]).all() else None

    def step(self) -> int | None:
        """Bytes from each base to the next one, where they are the same for all and in one region."""
        steps = np.diff(self.offset)
        return int(steps[0]) if (steps == steps[0]).all() and (self.region == self.region[0]).all() else None

    def only_first(self) -> Base:
        return dataclasses.replace(self, region=self.region[:1], offset=self.offset[:1])


@dataclasses.dataclass(frozen=True)
class StridedBox:
    """Ranges of ``length`` bytes at every base and every step of every axis. Both sides have the same steps, so the
    ranges pair."""

    length: int
    axes: tuple[Axis, ...]
    source: Base
    destination: Base

    def spread(self, axes: tuple[Axis, ...]) -> tuple[I64, I64, I64, I64]:
        """The bases and their copies along ``axes``, the last axis fastest: region and offset at the source, region and
        offset at the destination, shape (e,) each."""
        source, destination = self.source.offset, self.destination.offset
        for axis in axes:
            steps = np.arange(axis.size, dtype=np.int64)
            source = (source[:, None] + steps * axis.source_stride).ravel()
            destination = (destination[:, None] + steps * axis.destination_stride).ravel()
        times = len(source) // len(self.source.offset)
        return self.source.region.repeat(times), source, self.destination.region.repeat(times), destination


def build_boxes(
    source: KvLayout, destination: KvLayout, layers: tuple[int, ...], heads: range, tokens: int
) -> list[StridedBox]:
    """The boxes of ``tokens`` tokens of these layers and heads, which both sides hold.

    ``tokens`` 1 leaves the token axis to the caller.
    """
    source_rows = np.array([source.layers.index(layer) for layer in layers])
    destination_rows = np.array([destination.layers.index(layer) for layer in layers])
    columns = {part.name: column for column, part in enumerate(destination.parts)}
    # A segment that fills a block begins at slot 0, unless the side is token-linear. Its slot moves no base then, so
    # the token strides of two parts may differ: transposed keys and their values can still be joined in one range.
    is_whole = [tokens == side.block_tokens and not side.is_token_linear for side in (source, destination)]
    boxes = []
    for column, ours in enumerate(source.parts):
        theirs = destination.parts[columns[ours.name]]
        from_region, from_offset = source.planes(column, source_rows)
        to_region, to_offset = destination.planes(columns[ours.name], destination_rows)
        from_offset = from_offset + (heads.start - source.head_offset) * ours.head_stride
        to_offset = to_offset + (heads.start - destination.head_offset) * theirs.head_stride
        axes = (
            Axis(ours.dims, ours.dim_stride, theirs.dim_stride, True),
            Axis(len(heads), ours.head_stride, theirs.head_stride, True),
            Axis(tokens, ours.token_stride, theirs.token_stride, True),
        )
        box = StridedBox(
            ours.dtype_bytes,
            tuple(axis for axis in axes if axis.size > 1),
            Base(from_region, from_offset, ours.block_stride, 0 if is_whole[0] else ours.token_stride),
            Base(to_region, to_offset, theirs.block_stride, 0 if is_whole[1] else theirs.token_stride),
        )
        boxes.append(_fuse(_with_layer_axis(box)))
    # Parts that lie at one distance can fuse into boxes that touch, hence the second pass for those.
    for is_touching in (True, False, True):
        boxes = _join_all(boxes, is_touching)
    return boxes


def _with_layer_axis(box: StridedBox) -> StridedBox:
    """The bases as one more axis, where they lie at equal steps on both sides."""
    if len(box.source.offset) < 2:
        return box
    ours, theirs = box.source.step(), box.destination.step()
    if ours is None or theirs is None or not ours or (ours < 0) != (theirs < 0):
        return box
    size = len(box.source.offset)
    source, destination = box.source.only_first(), box.destination.only_first()
    if ours < 0:
        source, destination = source.moved(ours * (size - 1)), destination.moved(theirs * (size - 1))
        ours, theirs = -ours, -theirs
    axis = Axis(size, ours, theirs, ours < box.source.block_stride)
    return StridedBox(box.length, (*box.axes, axis), source, destination)


def _fuse(box: StridedBox) -> StridedBox:
    """Take contiguous axes into the range, and merge axes that continue each other, until nothing changes."""
    length, axes = box.length, list(box.axes)
    is_changed = True
    while is_changed:
        is_changed = False
        for axis in axes:
            if axis.source_stride == axis.destination_stride == length:
                length *= axis.size
                axes.remove(axis)
                is_changed = True
                break
        for inner in axes:
            outer = next((axis for axis in axes if _continues(inner, axis)), None)
            if outer is not None:
                axes[axes.index(inner)] = dataclasses.replace(inner, size=inner.size * outer.size)
                axes.remove(outer)
                is_changed = True
                break
    axes.sort(key=lambda axis: axis.source_stride, reverse=True)
    return dataclasses.replace(box, length=length, axes=tuple(axes))


def _continues(inner: Axis, outer: Axis) -> bool:
    return (
        outer.source_stride == inner.size * inner.source_stride
        and outer.destination_stride == inner.size * inner.destination_stride
    )


def _join_all(boxes: list[StridedBox], is_touching: bool) -> list[StridedBox]:
    """Join each box with the first earlier one that it can be joined with."""
    joined: list[StridedBox] = []
    for box in boxes:
        for at, known in enumerate(joined):
            both = _join(known, box, is_touching) or _join(box, known, is_touching)
            if both is not None:
                joined[at] = _fuse(both)
                break
        else:
            joined.append(box)
    return joined


def _join(first: StridedBox, second: StridedBox, is_touching: bool) -> StridedBox | None:
    """Two parts as one box: one longer range where they touch (``is_touching``), else an axis of two steps. None where
    they cannot be joined."""
    if first.axes != second.axes or len(first.source.offset) != len(second.source.offset):
        return None
    if not first.source.moves_like(second.source) or not first.destination.moves_like(second.destination):
        return None
    ours = first.source.distance_to(second.source)
    theirs = first.destination.distance_to(second.destination)
    if ours is None or theirs is None:
        return None
    if is_touching:
        if ours != first.length or theirs != first.length:
            return None
        return dataclasses.replace(first, length=first.length + second.length)
    if first.length != second.length or ours <= 0 or theirs <= 0:
        return None
    axis = Axis(2, ours, theirs, ours < first.source.block_stride)
    return dataclasses.replace(first, axes=(*first.axes, axis))
