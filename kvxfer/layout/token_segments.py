"""The tokens of a transfer cut into segments: parts of a sequence that lie within one block at the source and within
one at the destination. Decides where lists of blocks of any two sizes meet; must never know heads, layers or bytes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidArgumentError
from kvxfer.layout.kv_layout import I64


@dataclasses.dataclass(frozen=True)
class TokenSegments:
    """Segment i is ``tokens[i]`` tokens from slot ``source_slot[i]`` of block ``source_block[i]`` on at the source, and
    the like at the destination. All arrays (n,) int64.

    Where a side is token-linear (:attr:`KvLayout.is_token_linear`), a segment may continue into the next blocks.
    """

    source_block: I64
    source_slot: I64
    destination_block: I64
    destination_slot: I64
    tokens: I64

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, which: I64 | npt.NDArray[np.bool_]) -> TokenSegments:
        count = len(which) if which.dtype.kind == "i" else int(np.count_nonzero(which))

        def gather(values: I64) -> I64:
            # Most slots and token counts are equal, and the comparison costs less than indexing.
            is_same = values.strides == (0,) or (len(values) > 0 and bool((values == values[0]).all()))
            return np.broadcast_to(values[:1], (count,)) if is_same else values[which]

        return TokenSegments(
            gather(self.source_block),
            gather(self.source_slot),
            gather(self.destination_block),
            gather(self.destination_slot),
            gather(self.tokens),
        )

    def singles(self) -> TokenSegments:
        """The same tokens, one a segment."""
        segment = np.repeat(np.arange(len(self)), self.tokens)
        within = np.arange(len(segment)) - (np.cumsum(self.tokens) - self.tokens)[segment]
        return TokenSegments(
            self.source_block[segment],
            self.source_slot[segment] + within,
            self.destination_block[segment],
            self.destination_slot[segment] + within,
            np.ones(len(segment), np.int64),
        )


@dataclasses.dataclass(frozen=True)
class BlockList:
    """Blocks that hold a sequence from token ``start`` on, ``block_tokens`` each; ``blocks`` is (n,) int64."""

    name: str
    blocks: I64
    block_tokens: int
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.blocks) * self.block_tokens

    def cuts(self, first: int, last: int) -> I64:
        """The tokens after ``first`` and before ``last`` at which a block begins."""
        next_block = (first - self.start) // self.block_tokens + 1
        return np.arange(self.start + next_block * self.block_tokens, last, self.block_tokens, dtype=np.int64)

    def check_distinct(self, first: int, last: int, block_count: int) -> None:
        """Raise InvalidArgumentError where two of the blocks that hold tokens [first, last) are one."""
        used = self.blocks[(first - self.start) // self.block_tokens : -(-(last - self.start) // self.block_tokens)]
        is_used = np.zeros(block_count, bool)
        is_used[used] = True
        if np.count_nonzero(is_used) != len(used):
            blocks, times = np.unique(used, return_counts=True)
            raise InvalidArgumentError(f"{self.name}: block {blocks[times > 1][0]} is named twice")

    def locate(self, tokens: I64) -> tuple[I64, I64]:
        """``(block, slot)`` of each token; tokens ascend, and none skips a block."""
        places = tokens - self.start
        index = places // self.block_tokens
        slots = places - index * self.block_tokens
        if index[-1] - index[0] == len(index) - 1:
            return self.blocks[index[0] : index[0] + len(index)], slots
        return self.blocks[index], slots


def check_blocks(name: str, blocks: npt.ArrayLike, block_count: int) -> I64:
    """Block ids as int64, shape (n,). Raises InvalidArgumentError unless each is 0 to ``block_count`` - 1."""
    ids = np.asarray(blocks)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{name}: block ids must be whole numbers in one dimension, not {ids.dtype} {ids.shape}"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < block_count:
        wrong = int(np.argmax((ids < 0) | (ids >= block_count)))
        raise InvalidArgumentError(f"{name}: block {ids[wrong]} (number {wrong}) is not one of {block_count}")
    return ids.astype(np.int64, copy=False)


def cut(source: BlockList, destination: BlockList, first: int, last: int) -> TokenSegments:
    """Cut tokens [first, last), which both lists must hold, where a block begins on either side. The segments are in
    the order in which they lie in the source pool."""
    cuts, their_cuts = source.cuts(first, last), destination.cuts(first, last)
    if not np.array_equal(cuts, their_cuts):
        cuts = np.union1d(cuts, their_cuts)
    starts = np.concatenate([np.array([first], np.int64), cuts])
    tokens = np.diff(starts, append=last)
    segments = TokenSegments(*source.locate(starts), *destination.locate(starts), tokens)
    places = segments.source_block * source.block_tokens + segments.source_slot
    if (places[1:] >= places[:-1]).all():
        return segments
    return segments.take(np.argsort(places))


def join(segments: TokenSegments, source_tokens: int, destination_tokens: int) -> TokenSegments:
    """Merge neighbouring segments that continue each other on both sides.

    ``source_tokens`` (``destination_tokens``): the tokens of a block, where that side is token-linear. Else 0: then no
    merged segment crosses a block's end.
    """
    if len(segments) < 2:
        return segments
    is_continued = _is_continued(segments.source_block, segments.source_slot, segments.tokens, source_tokens)
    is_continued &= _is_continued(
        segments.destination_block, segments.destination_slot, segments.tokens, destination_tokens
    )
    if not is_continued.any():
        return segments
    begins = np.flatnonzero(np.concatenate([[True], ~is_continued]))
    joined = segments.take(begins)
    return dataclasses.replace(joined, tokens=np.add.reduceat(segments.tokens, begins))


def _is_continued(block: I64, slot: I64, tokens: I64, linear_tokens: int) -> npt.NDArray[np.bool_]:
    """Whether segment i + 1 begins where segment i ends, shape (n - 1,)."""
    if linear_tokens:
        slot, block = block * linear_tokens + slot, np.zeros_like(block)
    meets: npt.NDArray[np.bool_] = (block[:-1] == block[1:]) & (slot[:-1] + tokens[:-1] == slot[1:])
    return meets
