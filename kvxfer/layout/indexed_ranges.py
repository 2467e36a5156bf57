"""Plans as indices into strided ranges over whole pools. Decides whether block ids can be the indices, and whether that
list is shorter than the runs themselves; must never know what a list travels in.
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
"""What one strided range, and one index, takes in a list on the wire."""

DESCRIPTORS_MAX = (1 << 32) - 1
"""Of one list of strided ranges: an index is 32 bits."""

KINDS_MAX = 16
"""Ways in which segments may lie in their blocks, of one plan; with more, runs are shorter anyway."""


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
    """Where the segments of one kind lie: segment i is descriptor ``indices[i]`` of ``count``, in a strided range that
    begins at slot ``slot`` of block 0, with steps of ``stride_tokens`` tokens (0: of a block)."""

    indices: I64
    count: int
    slot: int
    stride_tokens: int

    def stride(self, base: Base) -> int:
        return self.stride_tokens * base.token_stride or base.block_stride


def pool_ranges(spans: tuple[TokenSpan, ...], bytes_below: int) -> IndexedRanges | None:
    """The plan as indices; None where block ids cannot be indices, or the list would take ``bytes_below`` or more."""
    tables: tuple[list[U64], list[U64]] = ([], [])
    indices: tuple[list[I64], list[I64]] = ([], [])
    numbered = [0, 0]
    cost = 0
    for span in spans:
        for segments in _kinds(span):
            if segments is None:
                return None
            tokens = int(segments.tokens[0])
            sides = (
                _side(span.source, segments.source_block, segments.source_slot, tokens),
                _side(span.destination, segments.destination_block, segments.destination_slot, tokens),
            )
            for box in span.boxes(tokens):
                # Descriptors of one block follow each other, layer by layer: near ones lie in the same pages.
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


def _kinds(span: TokenSpan) -> Iterator[TokenSegments | None]:
    """Segments sorted by how they lie in their blocks on both sides; a None at the end: there are too many kinds."""
    rest = span.segments
    ours, theirs = span.source, span.destination
    kind = rest.tokens * ours.block_tokens + _phase(ours, rest.source_slot, rest.tokens)
    kind = kind * theirs.block_tokens + _phase(theirs, rest.destination_slot, rest.tokens)
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


def _phase(layout: KvLayout, slot: I64, tokens: I64) -> I64:
    """What segments of one kind have in common: the slot, or where it may be any multiple of their tokens, the rest."""
    return slot % tokens if _is_unit_free(layout, tokens) else slot


def _is_unit_free(layout: KvLayout, tokens: I64 | int) -> bool:
    """Whether descriptors of so many tokens may be numbered across blocks: token-linear, and they divide a block."""
    return layout.is_token_linear and bool(np.all(layout.block_tokens % np.asarray(tokens) == 0))


def _side(layout: KvLayout, block: I64, slot: I64, tokens: int) -> _Side:
    first = int(slot[0])
    if (slot == first).all():
        return _Side(block, layout.block_count, first, 0)
    each = layout.block_tokens // tokens
    phase = first % tokens
    return _Side(block * each + slot // tokens, layout.block_count * each - (phase > 0), phase, tokens)
