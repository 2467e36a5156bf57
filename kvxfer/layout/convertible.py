"""Whether blocks of one kind can be made into blocks of another without a bit lost: where two pools differ only in how
tokens are cut into blocks and heads among ranks, and the order of bytes within a block is known. Decides nothing else;
`kvxfer.layout.plan` says which bytes go where, and a connector copies them.
"""

from __future__ import annotations

import dataclasses

from kvxfer.types import MemoryKind, PoolRecord

TRANSPOSED_KEYS = frozenset({"isa vec", "isa vec16"})
"""Packings of CPU_ATTN that keep of each head its keys as [dim][token], then its values as [token][dim]."""

WHOLE_STORAGE = "page:HNC"
"""Axes of pools whose blocks are pages [head][token][content] of one storage."""


def is_convertible(ours: PoolRecord, theirs: PoolRecord, *, ranks: int, sources: int) -> bool:
    """Whether pages of ``theirs``, one of ``sources`` ranks, can be made into pages of ``ours``, one of ``ranks``.

    Pages of one head count may belong to any numbers of ranks: then ranks hold the same heads.
    """
    mine, other = ours.record, theirs.record
    same_cut = dataclasses.replace(other, block_tokens=mine.block_tokens, kv_heads=mine.kv_heads, packing=mine.packing)
    return (
        mine.matches(same_cut)
        and {mine.packing, other.packing} <= TRANSPOSED_KEYS
        and mine.axes == WHOLE_STORAGE
        and {ours.memory, theirs.memory} == {MemoryKind.HOST}
        and ours.block_bytes * other.block_tokens * other.kv_heads
        == theirs.block_bytes * mine.block_tokens * mine.kv_heads
        and (mine.kv_heads == other.kv_heads or mine.kv_heads * ranks == other.kv_heads * sources)
    )
