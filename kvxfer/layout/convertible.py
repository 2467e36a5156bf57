"""Decides whether a connector can convert blocks of one pool into blocks of another without loss. It can where they
differ only in the tokens of a block, the heads of a rank and the packing, and where the order of bytes in both packings
is known. ``kvxfer.layout.plan`` says which bytes go where, and a connector copies them.
"""

from __future__ import annotations

import dataclasses

from kvxfer.types import MemoryKind, PoolRecord

TRANSPOSED_KEYS = frozenset({"isa vec", "isa vec16"})
"""Packings of CPU_ATTN that keep of each head its keys as [dim][token], then its values as [token][dim]."""

WHOLE_STORAGE = "page:HNC"
"""Axes of pools whose blocks are pages [head][token][content] of one storage."""


def is_convertible(ours: PoolRecord, theirs: PoolRecord, *, ranks: int, sources: int) -> bool:
    """Whether pages of ``theirs`` can be converted into pages of ``ours``. Their engine has ``sources`` ranks, ours has
    ``ranks``.

    Where both pages have the same number of heads, the numbers of ranks do not matter: then several ranks hold the same
    heads.
    """
    mine, other = ours.record, theirs.record
    # Their record with our block size, heads and packing: every other field must match.
    recut = dataclasses.replace(other, block_tokens=mine.block_tokens, kv_heads=mine.kv_heads, packing=mine.packing)
    return (
        mine.matches(recut)
        and {mine.packing, other.packing} <= TRANSPOSED_KEYS
        and mine.axes == WHOLE_STORAGE
        and {ours.memory, theirs.memory} == {MemoryKind.HOST}
        # A token of one head takes as many bytes on both sides.
        and ours.block_bytes * other.block_tokens * other.kv_heads
        == theirs.block_bytes * mine.block_tokens * mine.kv_heads
        # The ranks of both sides hold as many heads together.
        and (mine.kv_heads == other.kv_heads or mine.kv_heads * ranks == other.kv_heads * sources)
    )
