"""Writes a plan as indices into strided ranges that cover whole pools. Decides whether block ids can be the indices,
and whether that list is shorter than a list of runs; must never know what a list travels in.

A strided range over a pool numbers its descriptors from 0: by block, where all segments begin at the same slot of their
blocks, or by *unit*, where a token-linear pool is divided into units of as many tokens as a segment has. Segments are
of one *kind* where the same strided ranges can number them, at the source and at the destination.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.layout.kv_layout import I64, KvLayout
from kvxfer.layout.runs import U64
from kvxfer.layout.span import TokenSpan
from kvxfer.layout.strided_boxes import Base
from kvxfer.layout.token_segments import TokenSegments

RANGE_BYTES = 36
INDEX_BYTES = 4
"""Bytes of one strided range, and of one index, in a list on the wire."""

DESCRIPTORS_MAX = (1 << 32) - 1
"""Most descriptors of one list of strided ranges: an index has 32 bits."""

KINDS_MAX = 16
"""Most kinds of segments in one span. With more kinds, a list of runs is shorter anyway."""


class IndexedRanges(NamedTuple):
    """Two lists of descriptors, equally long: descriptor ``source_indices[i]`` is copied to descriptor
    ``destination_indices[i]``.

    The strided ranges are (n, 5) and (m, 5) uint64: region, offset, stride, length, count; indices are (k,) uint32.
    """

    source: U64
    source_indices: npt.NDArray[np.uint32]
    destination: U64
    destination_indices: npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True)
class _Side:
    """How one side numbers the segments of one kind: segment i is descriptor ``indices[i]`` of the ``count``
    descriptors of a strided range. The range begins at slot ``slot`` of block 0. It steps by ``stride_tokens`` tokens,
    or by one block where that is 0."""

    indices: I64
    count: int
    slot: int
    stride_tokens: int

    def stride(self, base: Base) -> int:
        return self.stride_tokens * base.token_stride or base.block_stride


def pool_ranges(spans: tuple[TokenSpan, ...], bytes_below: int) -> IndexedRanges | None:
    """The plan as indices. None where block ids cannot be indices, or where the list would take ``bytes_below`` bytes
    or more."""
    tables: tuple[list[U64], list[U64]] = ([], [])
    indices: tuple[list[I64], list[I64]] = ([], [])
    numbered = [0, 0]  # descriptors of the strided ranges so far, on each side
    cost = 0
    for span in spans:
        for segments in _segments_by_kind(span):
            if segments is None:
                return None
            tokens = int(segments.tokens[0])
            sides = (
                _side(span.source, segments.source_block, segments.source_slot, tokens),
                _side(span.destination, segments.destination_block, segments.destination_slot, tokens),
            )
            for box in span.boxes(tokens):
                # Axes within a block vary fastest, so that descriptors in the same memory pages follow each other.
                near = tuple(axis for axis in box.axes if axis.is_near)
                far = tuple(axis for axis in box.axes if not axis.is_near)
                inner = math.prod(axis.size for axis in near)
                bases = len(box.source.offset) * math.prod(axis.size for axis in box.axes)
                cost += bases * (RANGE_BYTES + INDEX_BYTES * len(segments))
                if cost >= bytes_below:
                    return None
                from_region, from_offset, to_region, to_offset = box.spread(far + near)
                for which, (side, base, region, offset) in enumerate(
                    (
                        (sides[0], box.source, from_region, from_offset),
                        (sides[1], box.destination, to_region, to_offset),
                    )
                ):
                    stride = side.stride(base)
                    if side.count > 1 and stride < box.length:
                        return None
                    table = np.empty((bases, 5), np.uint64)
                    table[:, 0] = region
                    table[:, 1] = offset + side.slot * base.token_stride
                    table[:, 2:] = (stride, box.length, side.count)
                    tables[which].append(table)
                    firsts = (numbered[which] + np.arange(bases) * side.count).reshape(-1, 1, inner)
                    indices[which].append((firsts + side.indices[:, None]).ravel())
                    numbered[which] += bases * side.count
    if not tables[0] or max(numbered) > DESCRIPTORS_MAX:
        return None
    return IndexedRanges(
        np.concatenate(tables[0]),
        np.concatenate(indices[0]).astype(np.uint32),
        np.concatenate(tables[1]),
        np.concatenate(indices[1]).astype(np.uint32),
    )


def _segments_by_kind(span: TokenSpan) -> Iterator[TokenSegments | None]:
    """The segments of each kind. None at the end where there are more than KINDS_MAX kinds."""
    rest = span.segments
    # Numbers that are equal for segments of one kind: their tokens, and their start key on each side.
    ours, theirs = span.source, span.destination
    kind = rest.tokens * ours.block_tokens + _start_key(ours, rest.source_slot, rest.tokens)
    kind = kind * theirs.block_tokens + _start_key(theirs, rest.destination_slot, rest.tokens)
    for _ in range(KINDS_MAX):
        if len(rest) == 0:
            return
        is_alike = kind == kind[0]
        if is_alike.all():
            yield rest
            return
        yield rest.take(is_alike)
        rest, kind = rest.take(~is_alike), kind[~is_alike]
    yield None


def _start_key(layout: KvLayout, slot: I64, tokens: I64) -> I64:
    """What the slots of segments of one kind have in common on one side: all of the slot; or, where the side numbers by
    unit, its remainder by the tokens of a unit."""
    return slot % tokens if _is_divided_in_units(layout, tokens) else slot


def _is_divided_in_units(layout: KvLayout, tokens: I64 | int) -> bool:
    """Whether a layout can number by units of so many tokens: it is token-linear, and units fill each block exactly."""
    return layout.is_token_linear and bool(np.all(layout.block_tokens % np.asarray(tokens) == 0))


def _side(layout: KvLayout, block: I64, slot: I64, tokens: int) -> _Side:
    """Number the segments of one kind on one side: by block where they begin at one slot, else by unit."""
    first = int(slot[0])
    if (slot == first).all():
        return _Side(block, layout.block_count, first, 0)
    units = layout.block_tokens // tokens
    offset = first % tokens
    # Where units do not begin at slot 0, the last one would end after the pool's end.
    count = layout.block_count * units - (1 if offset else 0)
    return _Side(block * units + slot // tokens, count, offset, tokens)
