"""Plans as picks from grids over whole pools. Decides whether block ids can be the picks, and whether that is shorter
than the runs themselves; must never know what a list travels in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.policy.boxes import Base
from kvxfer.policy.layout import I64, KvLayout
from kvxfer.policy.runs import U64
from kvxfer.policy.segments import Segments
from kvxfer.policy.stretch import Stretch

GRID_BYTES = 36
PICK_BYTES = 4
"""What one row of grids, and one picked piece, takes in a list on the wire."""

PIECES_MAX = (1 << 32) - 1
"""Of one list of grids: a pick is 32 bits."""

KINDS_MAX = 16
"""Ways in which segments may lie in their blocks, of one plan; with more, runs are shorter anyway."""


class Grids(NamedTuple):
    """Two lists of pieces; piece ``source_ids[i]`` goes to piece ``destination_ids[i]``, and they are equally long.

    The grids are (n, 5) and (m, 5) uint64: region, offset, stride, length, count; ids are (k,) uint32.
    """

    source: U64
    source_ids: npt.NDArray[np.uint32]
    destination: U64
    destination_ids: npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True)
class _Side:
    """Where the segments of one kind lie: segment i is piece ``ids[i]`` of ``count``, in a grid that begins at slot
    ``slot`` of block 0, with steps of ``stride_tokens`` tokens (0: of a block)."""

    ids: I64
    count: int
    slot: int
    stride_tokens: int

    def stride(self, base: Base) -> int:
        return self.stride_tokens * base.token_stride or base.block_stride


def pool_grids(stretches: tuple[Stretch, ...], bytes_below: int) -> Grids | None:
    """The plan as picks, or None where blocks cannot be picked, or the list would take ``bytes_below`` or more."""
    tables: tuple[list[U64], list[U64]] = ([], [])
    picks: tuple[list[I64], list[I64]] = ([], [])
    numbered = [0, 0]
    cost = 0
    for stretch in stretches:
        for segments in _kinds(stretch):
            if segments is None:
                return None
            tokens = int(segments.tokens[0])
            sides = (
                _side(stretch.source, segments.source_block, segments.source_slot, tokens),
                _side(stretch.destination, segments.destination_block, segments.destination_slot, tokens),
            )
            for box in stretch.boxes(tokens):
                # Pieces of one block one after the other, layer by layer: near ones share pages on both sides.
                near = tuple(axis for axis in box.axes if axis.is_near)
                far = tuple(axis for axis in box.axes if not axis.is_near)
                inner = math.prod(axis.size for axis in near)
                bases = len(box.source.offset) * math.prod(axis.size for axis in box.axes)
                cost += bases * (GRID_BYTES + PICK_BYTES * len(segments))
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
                    picks[which].append((firsts + side.ids[:, None]).ravel())
                    numbered[which] += bases * side.count
    if not tables[0] or max(numbered) > PIECES_MAX:
        return None
    return Grids(
        np.concatenate(tables[0]),
        np.concatenate(picks[0]).astype(np.uint32),
        np.concatenate(tables[1]),
        np.concatenate(picks[1]).astype(np.uint32),
    )


def _kinds(stretch: Stretch) -> Iterator[Segments | None]:
    """Segments sorted by how they lie in their blocks on both sides; a None at the end: there are too many kinds."""
    rest = stretch.segments
    ours, theirs = stretch.source, stretch.destination
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
    """Whether pieces of so many tokens may be numbered across blocks: token-linear, and a block is some of them."""
    return layout.is_token_linear and bool(np.all(layout.block_tokens % np.asarray(tokens) == 0))


def _side(layout: KvLayout, block: I64, slot: I64, tokens: int) -> _Side:
    first = int(slot[0])
    if (slot == first).all():
        return _Side(block, layout.block_count, first, 0)
    each = layout.block_tokens // tokens
    phase = first % tokens
    return _Side(block * each + slot // tokens, layout.block_count * each - (phase > 0), phase, tokens)
