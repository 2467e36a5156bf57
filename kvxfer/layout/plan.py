"""Plans a transfer between two pools: it turns the block ids and layouts of both into coalesced strided runs. Decides
which bytes of the source are copied to which bytes of the destination; must never know lanes, peers or when it happens.

The terms of this package:

- a *span* (``span``): some tokens, layers and heads that move between two layouts; a plan is a list of spans;
- a *segment* (``token_segments``): a part of the tokens that lies within one block on both sides;
- a *box* (``strided_boxes``): the bytes of one segment, as equal contiguous ranges at regular steps;
- a *bundle* (``runs``): one box times many segments, as arrays;
- a *run*: ``count`` contiguous ranges (*descriptors*) of one length, at one step on each side.

No step loops over blocks in Python. The arrays are made when a caller first asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvxfer.errors import IncompatibleError, InvalidArgumentError, LimitExceededError
from kvxfer.layout.indexed_ranges import DESCRIPTORS_MAX, INDEX_BYTES, RANGE_BYTES, IndexedRanges, pool_ranges
from kvxfer.layout.kv_layout import KvLayout
from kvxfer.layout.runs import U64, Bundle
from kvxfer.layout.span import TokenSpan
from kvxfer.layout.token_segments import BlockList, check_blocks, cut


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """Run i is ``count[i]`` descriptors of ``length[i]`` bytes. Its descriptor j begins at ``source_offset[i] + j *
    source_stride[i]`` in region ``source_region[i]``, and is copied to the descriptor j of the destination.

    All arrays (n,) uint64; the descriptors of a run overlap on neither side.
    """

    source_region: U64
    source_offset: U64
    source_stride: U64
    destination_region: U64
    destination_offset: U64
    destination_stride: U64
    length: U64
    count: U64


@dataclasses.dataclass(frozen=True)
class LayoutPlan:
    """Every byte to be moved, once. Arrays are made when first asked for, and kept."""

    spans: tuple[TokenSpan, ...]

    @staticmethod
    def join(plans: Iterable[LayoutPlan]) -> LayoutPlan:
        """Several plans as one, in that order: for example the cache groups of a hybrid model, for the same two
        ranks."""
        return LayoutPlan(tuple(span for plan in plans for span in plan.spans))

    @functools.cached_property
    def bytes(self) -> int:
        return sum(span.bytes for span in self.spans)

    @property
    def count(self) -> int:
        """Runs: the length of each array of ``runs``; 0 where nothing is to be moved."""
        return sum(bundle.rows for bundle in self._bundles)

    @property
    def descriptor_count(self) -> int:
        """Contiguous byte ranges in all runs together."""
        return sum(bundle.descriptors for bundle in self._bundles)

    @functools.cached_property
    def runs(self) -> Runs:
        source, destination = self._tables
        return Runs(
            source[:, 0],
            source[:, 1],
            source[:, 2],
            destination[:, 0],
            destination[:, 1],
            destination[:, 2],
            source[:, 3],
            source[:, 4],
        )

    def as_indexed_ranges(self) -> IndexedRanges:
        """The plan as two lists: strided ranges (region, offset, stride, length, count), and indices that say which
        of their descriptors are copied in which order.

        There are two forms, and the one that is shorter on the wire is taken. Scattered blocks become strided ranges
        over the whole pool, with the block ids as indices. Anything else becomes one strided range for each run, with
        all descriptors in order.
        Raises LimitExceededError where there are more descriptors than a list can number.
        """
        descriptors, rows = self.descriptor_count, self.count
        ranges = pool_ranges(self.spans, rows * RANGE_BYTES + (descriptors * INDEX_BYTES if descriptors > rows else 0))
        if ranges is not None:
            return ranges
        if descriptors > DESCRIPTORS_MAX:
            raise LimitExceededError(
                f"the plan has {descriptors} descriptors; a list numbers at most {DESCRIPTORS_MAX}"
            )
        indices = np.arange(descriptors, dtype=np.uint32)
        return IndexedRanges(self._tables[0], indices, self._tables[1], indices)

    @functools.cached_property
    def _bundles(self) -> tuple[Bundle, ...]:
        return tuple(bundle for span in self.spans for bundle in span.bundles())

    @functools.cached_property
    def _tables(self) -> tuple[U64, U64]:
        source = np.empty((self.count, 5), np.uint64)
        destination = np.empty((self.count, 5), np.uint64)
        at = 0
        for bundle in self._bundles:
            bundle.fill(source[at : at + bundle.rows], destination[at : at + bundle.rows])
            at += bundle.rows
        return source, destination


def plan_transfer(
    source: KvLayout,
    destination: KvLayout,
    source_blocks: npt.ArrayLike,
    destination_blocks: npt.ArrayLike,
    tokens: range | None = None,
    layers: Iterable[int] | None = None,
    *,
    heads: range | None = None,
    source_start: int = 0,
    destination_start: int = 0,
) -> LayoutPlan:
    """Plan the move of ``tokens`` of a sequence from blocks of one pool to blocks of another.

    ``source_blocks`` and ``destination_blocks`` are block ids in the order of the sequence, shape (n,), of any
    whole-number dtype; the first of them holds the sequence's token ``source_start`` (``destination_start``) in its
    first slot, so a destination with a prefix in its cache may name the blocks of the missing tail alone. Defaults: all
    tokens that both lists hold, and all layers (global ids) and heads (of the model) that both layouts hold;
    ``tp_sharding.choose_sources`` says which ranks together hold everything.

    Raises IncompatibleError with the field that differs, where these layouts cannot be joined; InvalidArgumentError
    naming the argument, where it asks for what one side does not hold, or would write to a block twice.
    """
    _check_compatible(source, destination)
    layers = _common_layers(source, destination, layers)
    heads = _common_heads(source, destination, heads)
    ours = BlockList(
        "source_blocks",
        check_blocks("source_blocks", source_blocks, source.block_count),
        source.block_tokens,
        source_start,
    )
    theirs = BlockList(
        "destination_blocks",
        check_blocks("destination_blocks", destination_blocks, destination.block_count),
        destination.block_tokens,
        destination_start,
    )
    first, last = _token_range(ours, theirs, tokens)
    if first >= last:
        return LayoutPlan(())
    if source.packing:
        for side in (ours, theirs):
            if any((edge - side.start) % side.block_tokens for edge in (first, last)):
                raise InvalidArgumentError(
                    f"tokens: {first} to {last - 1} cut a block, and blocks packed as {source.packing!r} move whole"
                )
    theirs.check_distinct(first, last, destination.block_count)
    return LayoutPlan((TokenSpan(source, destination, layers, heads, cut(ours, theirs, first, last)),))


def _check_compatible(source: KvLayout, destination: KvLayout) -> None:
    if source.total_heads != destination.total_heads:
        raise _incompatible("total_heads", source.total_heads, destination.total_heads)
    if source.packing != destination.packing:
        raise _incompatible("packing", source.packing, destination.packing)
    theirs = {part.name: part for part in destination.parts}
    names = sorted(part.name for part in source.parts)
    if names != sorted(theirs):
        raise _incompatible("parts", names, sorted(theirs))
    packed_fields = ("token_stride", "dim_stride") if source.packing else ()
    for part in source.parts:
        for field in ("dims", "dtype_bytes", *packed_fields):
            if getattr(part, field) != getattr(theirs[part.name], field):
                raise _incompatible(f"{part.name}.{field}", getattr(part, field), getattr(theirs[part.name], field))
    if source.packing and source.block_tokens != destination.block_tokens:
        raise _incompatible("block_tokens", source.block_tokens, destination.block_tokens)


def _incompatible(field: str, ours: object, theirs: object) -> IncompatibleError:
    return IncompatibleError(f"{field}: the source has {ours!r}, the destination {theirs!r}", field=field)


def _common_layers(source: KvLayout, destination: KvLayout, wanted: Iterable[int] | None) -> tuple[int, ...]:
    ours, theirs = set(source.layers), set(destination.layers)
    if wanted is None:
        common = tuple(layer for layer in source.layers if layer in theirs)
        if not common:
            raise IncompatibleError("layers: the two pools hold none in common", field="layers")
        return common
    layers = tuple(wanted)
    for layer in layers:
        if layer not in ours or layer not in theirs:
            side = "destination" if layer in ours else "source"
            raise InvalidArgumentError(f"layers: the {side} does not hold layer {layer}")
    if not layers or len(set(layers)) != len(layers):
        raise InvalidArgumentError("layers: at least one, each once, is needed")
    return layers


def _common_heads(source: KvLayout, destination: KvLayout, wanted: range | None) -> range:
    first = max(source.head_offset, destination.head_offset)
    stop = min(source.head_offset + source.heads, destination.head_offset + destination.heads)
    if wanted is None:
        if first >= stop:
            raise IncompatibleError("heads: the two pools hold none in common", field="heads")
        return range(first, stop)
    if wanted.step != 1 or not first <= wanted.start < wanted.stop <= stop:
        raise InvalidArgumentError(f"heads: {wanted} is not among heads {first} to {stop - 1}, which both sides hold")
    return wanted


def _token_range(source: BlockList, destination: BlockList, wanted: range | None) -> tuple[int, int]:
    for side in (source, destination):
        if side.start < 0:
            raise InvalidArgumentError(f"{side.name}: the first token {side.start} is negative")
    if wanted is None:
        return max(source.start, destination.start), min(source.end, destination.end)
    if wanted.step != 1:
        raise InvalidArgumentError(f"tokens: {wanted} leaves some out")
    for side in (source, destination):
        if len(wanted) and not side.start <= wanted.start < wanted.stop <= side.end:
            raise InvalidArgumentError(
                f"tokens: {wanted.start} to {wanted.stop - 1} are not all in {side.name}, which hold tokens "
                f"{side.start} to {side.end - 1}"
            )
    return wanted.start, wanted.stop
